"""Input for Hugging Face models: a text, else random tokens; noise for images and sounds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.display import count
from sqrtdk.errors import InvalidValueError

__all__ = ["Feed", "propose_feeds"]

LONGEST = 512
"""Tokens per sequence, at most."""
MOST_SEQUENCES = 8
_SEED = 0
_KNOWN_ENOUGH = 0.5
"""A text that nobody chose is read if the tokenizer knows this share of its tokens."""
_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "seq_length")
IN_PYTHON = "in Python, sqrtdk.torch.audit(model, batch) takes a batch of yours"
_FRAMES = 320
"""Frames of a sound, where the model leaves it open: enough rows to judge a head."""


class Feed(NamedTuple):
    """Keyword arguments for a model, and in words what they are."""

    batch: dict[str, Tensor]
    words: str


_Maker = Callable[[Any, "_Reader", int], Feed]
"""Makes input for a model out of a text and its tokenizer, of so many sequences at most."""


def propose_feeds(model: Any, tokenizer: Any, text: str, name: str, *, is_chosen: bool) -> Iterator[Feed]:
    """What may fit a model of transformers, the likeliest first; the same every time.

    Args:
        model: the model; its class and configuration are asked what it takes.
        tokenizer: its tokenizer; None: tokens are drawn at random.
        text: what is tokenised, cut into sequences as long as the model takes, at most 8 of 512 tokens.
        name: what the text is called.
        is_chosen: whether the user chose the text. Otherwise random tokens take its place where the tokenizer knows
            less than half of it, as one for amino acids does of English.

    Raises:
        InvalidValueError: it takes something that cannot be made up, or its tokenizer knows nothing of a chosen text.
    """
    parameters = inspect.signature(model.forward).parameters
    named = (getattr(model, "main_input_name", None), *_MAKERS)
    main = next((one for one in named if one in _MAKERS and one in parameters), None)
    if main is None:
        own = {key: one for key, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        taken = ", ".join(key for key, one in own.items() if one.default is one.empty) or ", ".join(list(own)[:1])
        raise InvalidValueError(
            f"sqrtdk audit can make up texts, images and sounds, but {type(model).__name__} takes {taken}; {IN_PYTHON}"
        )
    maker = _MAKERS[main]
    reader = _Reader(tokenizer, text, name, is_chosen)
    first = maker(model, reader, MOST_SEQUENCES)
    if main != "input_ids" and _has_decoder(model):
        maker = _with_decoder(maker)
        first = maker(model, reader, 1)
    yield first
    for other in _MAKERS:
        if other in parameters and other not in first.batch:
            more = _MAKERS[other](model, reader, MOST_SEQUENCES)
            size = min(len(value) for value in (*first.batch.values(), *more.batch.values()))
            one, two = maker(model, reader, size), _MAKERS[other](model, reader, size)
            yield Feed({**one.batch, **two.batch}, f"{one.words}; {two.words}")


def _with_decoder(maker: _Maker) -> _Maker:
    def make(model: Any, reader: _Reader, most: int) -> Feed:
        feed, written = maker(model, reader, most), reader.read(model, most)
        starts = _shift(written.batch["input_ids"], model.config)
        return Feed({**feed.batch, "decoder_input_ids": starts}, f"{feed.words}; {written.words} for the decoder")

    return make


class _Reader(NamedTuple):
    """What is read: a text, and the tokenizer that reads it."""

    tokenizer: Any
    text: str
    name: str
    is_chosen: bool

    def read(self, model: Any, most: int) -> Feed:
        """Tokens `[B, L]` for the model, with the mask that says that none of them is padding."""
        limit = _count_positions(model, self.tokenizer)
        if self.tokenizer is None:
            ids, words = _draw_tokens(model, limit, most, "there is no tokenizer")
        elif not self.is_chosen and self._known_share() < _KNOWN_ENOUGH:
            ids, words = _draw_tokens(model, limit, most, f"the tokenizer does not know {self.name}")
        else:
            ids, words = self._tokenise(limit, most)
        return Feed({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, words)

    def _known_share(self) -> float:
        """How much of the text the tokenizer knows."""
        ids = self.tokenizer(self.text, add_special_tokens=False, verbose=False)["input_ids"]
        return 1.0 - ids.count(self.tokenizer.unk_token_id) / len(ids) if ids else 0.0

    def _tokenise(self, limit: int, most: int) -> tuple[Tensor, str]:
        if not self._known_share():
            raise InvalidValueError(f"in {self.name} there is nothing that the model's tokenizer knows")
        whole = len(self.tokenizer(self.text, verbose=False)["input_ids"])
        cut = self.tokenizer(self.text, truncation=True, max_length=limit, return_overflowing_tokens=True)["input_ids"]
        pieces = [cut] if isinstance(cut[0], int) else cut
        # The last piece is shorter than the others; alone it is all there is.
        pieces = [piece for piece in pieces if len(piece) == len(pieces[0])][:most]
        ids = torch.tensor(pieces)
        sequences = "" if len(pieces) == 1 else f" in {len(pieces)} sequences"
        cut_off = "" if ids.numel() >= whole else f" of {whole}"
        unknown = sum(piece.count(self.tokenizer.unk_token_id) for piece in pieces)
        strange = f", {unknown} of them unknown to the tokenizer" if unknown else ""
        return ids, f"{self.name}, {ids.numel()}{cut_off} tokens{sequences}{strange}"


def _draw_tokens(model: Any, limit: int, most: int, why: str) -> tuple[Tensor, str]:
    config = model.config.get_text_config()
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InvalidValueError(f"{type(model).__name__} has no tokenizer and names no vocab_size to draw tokens from")
    names = [name for name in vars(model.config) | vars(config) if name.endswith(("_token_id", "_token_index"))]
    told = [getattr(one, name, None) for name in names for one in (model.config, config)]
    special = {token for one in told for token in (one if isinstance(one, list | tuple) else [one])}
    plain = [token for token in range(config.vocab_size) if token not in special]
    sequences = _count_sequences(limit, most)
    chosen = torch.randint(len(plain), (sequences, limit), generator=_generator())
    split = "" if sequences == 1 else f" in {sequences} sequences"
    words = f"{chosen.numel()} random tokens{split}, of a vocabulary of {config.vocab_size} ({why})"
    return torch.tensor(plain)[chosen], words


def _count_sequences(length: int, most: int) -> int:
    """How many short sequences together are as long as a long one."""
    return min(math.ceil(LONGEST / length), most)


def _count_positions(model: Any, tokenizer: Any) -> int:
    """How many tokens a sequence may have: what configuration, tokenizer and position embeddings allow."""
    config = model.config.get_text_config()
    limits = [LONGEST, *(getattr(config, name, None) for name in _LIMITS), getattr(tokenizer, "model_max_length", None)]
    limit = min(int(one) for one in limits if isinstance(one, int | float) and 0 < one < math.inf)
    for name, module in model.named_modules():
        # Positions that are counted from behind the one of padding.
        padding, weight = getattr(module, "padding_idx", None), getattr(module, "weight", None)
        if "position" in name and isinstance(padding, int) and isinstance(weight, Tensor):
            limit = min(limit, len(weight) - padding - 1)
    return limit


def _feed_text(model: Any, reader: _Reader, most: int) -> Feed:
    feed = reader.read(model, most)
    if not _has_decoder(model):
        return feed
    starts = _shift(feed.batch["input_ids"], model.config)
    return Feed({**feed.batch, "decoder_input_ids": starts}, f"{feed.words}, for encoder and decoder")


def _has_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _shift(ids: Tensor, config: Any) -> Tensor:
    """The tokens that a decoder sees when it writes these: a start in front, the last one left out."""
    named = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    start = next((one for one in named if isinstance(one, int)), 0)
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)


def _feed_image(model: Any, reader: _Reader, most: int) -> Feed:
    config = getattr(model.config, "vision_config", None) or model.config
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    patch = getattr(config, "patch_size", None)
    images = _count_sequences(max(height // patch * (width // patch), 1), most) if isinstance(patch, int) else 1
    pixels = _draw(model, images, getattr(config, "num_channels", 3), height, width)
    return Feed({"pixel_values": pixels}, f"noise in place of {count(images, 'image')} of {height} × {width}")


def _feed_features(model: Any, reader: _Reader, most: int) -> Feed:
    config = model.config
    bins = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 80))
    shape = (1, 4 * _FRAMES, bins)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # Two frames become one position, and the model takes no other number of them.
        shape = (1, bins, 2 * config.max_source_positions)
    return Feed({"input_features": _draw(model, *shape)}, "noise in place of a sound")


def _feed_samples(model: Any, reader: _Reader, most: int) -> Feed:
    config = model.config
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        values = _draw(model, 1, config.max_length, config.num_mel_bins)
    else:
        values = _draw(model, 1, _FRAMES * math.prod(getattr(config, "conv_stride", (320,))) + 400)
    return Feed({"input_values": values}, "noise in place of a sound")


def _draw(model: Any, *shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator()).to(model.dtype)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


_MAKERS: dict[str, _Maker] = {
    "input_ids": _feed_text,
    "pixel_values": _feed_image,
    "input_features": _feed_features,
    "input_values": _feed_samples,
}
