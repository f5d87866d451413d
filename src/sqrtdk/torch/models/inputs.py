"""Inputs for Hugging Face models: text or random tokens, and noise for images and sounds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError
from sqrtdk.show.table import count
from sqrtdk.torch.models.random_input import generator, normal, read_image_shape, read_mel_bins, read_vision

__all__ = ["Feed", "propose_feeds"]

LONGEST = 512
"""Largest number of tokens per sequence."""
MOST_SEQUENCES = 8
_KNOWN_ENOUGH = 0.5
"""Least share of known tokens for the built-in text. Below it, random tokens are used."""
_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "seq_length")
IN_PYTHON = "in Python, sqrtdk.torch.audit(model, batch) takes a batch of yours"
_FRAMES = 320
"""Number of sound frames if the model does not fix it: enough rows to judge a head."""


class Feed(NamedTuple):
    """Keyword arguments for a model, and a description."""

    batch: dict[str, Tensor]
    words: str


_Maker = Callable[[Any, "_Reader", int], Feed]
"""Function that makes input for a model from a text and its tokenizer, with at most the given number of sequences."""


def propose_feeds(model: Any, tokenizer: Any, text: str, name: str, *, is_chosen: bool) -> Iterator[Feed]:
    """Yield inputs that may fit a Hugging Face model, likeliest first; the inputs are the same every time.

    Args:
        model: the model; its class and configuration determine the kind of input.
        tokenizer: its tokenizer; None for random tokens.
        text: text to tokenise, cut into sequences of the model's length, at most 8 of 512 tokens.
        name: name of the text in messages.
        is_chosen: whether the user chose the text. If not, random tokens replace a text of which the tokenizer knows
            less than half, such as English for an amino-acid tokenizer.

    Raises:
        InvalidValueError: if the model needs an input that cannot be generated, or its tokenizer knows no chosen text.
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
    """Text input and its tokenizer."""

    tokenizer: Any
    text: str
    name: str
    is_chosen: bool

    def read(self, model: Any, most: int) -> Feed:
        """Return tokens `[B, L]` for the model, and a mask that marks no padding."""
        limit = _count_positions(model, self.tokenizer)
        if self.tokenizer is None:
            ids, words = _draw_tokens(model, limit, most, "there is no tokenizer")
        elif not self.is_chosen and self._known_share() < _KNOWN_ENOUGH:
            ids, words = _draw_tokens(model, limit, most, f"the tokenizer does not know {self.name}")
        else:
            ids, words = self._tokenise(limit, most)
        return Feed({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, words)

    def _known_share(self) -> float:
        """Return the share of the text that the tokenizer knows."""
        ids = self.tokenizer(self.text, add_special_tokens=False, verbose=False)["input_ids"]
        return 1.0 - ids.count(self.tokenizer.unk_token_id) / len(ids) if ids else 0.0

    def _tokenise(self, limit: int, most: int) -> tuple[Tensor, str]:
        if not self._known_share():
            raise InvalidValueError(f"in {self.name} there is nothing that the model's tokenizer knows")
        whole = len(self.tokenizer(self.text, verbose=False)["input_ids"])
        cut = self.tokenizer(self.text, truncation=True, max_length=limit, return_overflowing_tokens=True)["input_ids"]
        pieces = [cut] if isinstance(cut[0], int) else cut
        # The last piece is shorter than the others and is kept only if there is no other.
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
    chosen = torch.randint(len(plain), (sequences, limit), generator=generator())
    split = "" if sequences == 1 else f" in {sequences} sequences"
    words = f"{chosen.numel()} random tokens{split}, of a vocabulary of {config.vocab_size} ({why})"
    return torch.tensor(plain)[chosen], words


def _count_sequences(length: int, most: int) -> int:
    """Return the number of short sequences that together are as long as a long one."""
    return min(math.ceil(LONGEST / length), most)


def _count_positions(model: Any, tokenizer: Any) -> int:
    """Return the number of tokens per sequence that configuration, tokenizer and position embeddings allow."""
    config = model.config.get_text_config()
    limits = [LONGEST, *(getattr(config, name, None) for name in _LIMITS), getattr(tokenizer, "model_max_length", None)]
    limit = min(int(one) for one in limits if isinstance(one, int | float) and 0 < one < math.inf)
    for name, module in model.named_modules():
        # These positions are counted from the index after the padding index.
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
    """Return the decoder input for these tokens: a start token in front, the last token left out."""
    named = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    start = next((one for one in named if isinstance(one, int)), 0)
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)


def _feed_image(model: Any, reader: _Reader, most: int) -> Feed:
    config = read_vision(model.config)
    channels, height, width = read_image_shape(config, 224)
    patch = getattr(config, "patch_size", None)
    images = _count_sequences(max(height // patch * (width // patch), 1), most) if isinstance(patch, int) else 1
    pixels = _draw(model, images, channels, height, width)
    return Feed({"pixel_values": pixels}, f"noise in place of {count(images, 'image')} of {height} × {width}")


def _feed_features(model: Any, reader: _Reader, most: int) -> Feed:
    config = model.config
    bins = read_mel_bins(config)
    shape = (1, 4 * _FRAMES, bins)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # Two frames become one position, and the model accepts no other number of frames.
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
    return normal(*shape).to(model.dtype)


_MAKERS: dict[str, _Maker] = {
    "input_ids": _feed_text,
    "pixel_values": _feed_image,
    "input_features": _feed_features,
    "input_values": _feed_samples,
}
