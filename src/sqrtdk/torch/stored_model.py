"""Models from a directory, through transformers: safetensors alone, no code of the model's own, no network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sqrtdk.display import count
from sqrtdk.errors import InvalidValueError, missing_extra

__all__ = ["StoredModel", "load_model"]

_OFFLINE = {"local_files_only": True, "trust_remote_code": False}
_MOST_MISSING = 0.5
"""A model of which more of the tensors are not in the checkpoint is not the checkpoint's."""
_LONGEST_REASON = 300
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)


class StoredModel(NamedTuple):
    """A loaded model, its tokenizer if there is one, and what is to be said about it."""

    model: nn.Module
    tokenizer: Any
    notes: list[str]


def load_model(path: Path) -> StoredModel:
    """Load the model of a directory, in the dtype it is stored in, without the head of its task where it can be told.

    Raises:
        MissingExtraError: transformers is not installed.
        InvalidValueError: transformers cannot load it, or its weights are those of another model.
    """
    try:
        import transformers
    except ImportError:
        raise missing_extra("transformers", "hf") from None
    with _quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(path, **_OFFLINE)
            kind = _choose_class(transformers, config)
            _require_stored(kind, config, path)
            model, info = kind.from_pretrained(
                path, config=config, use_safetensors=True, output_loading_info=True, **_OFFLINE
            )
        except InvalidValueError:
            raise
        except Exception as error:  # whatever is wrong with files that somebody else wrote
            raise InvalidValueError(f"MODEL could not be loaded from {str(path)!r}: {_first_words(error)}") from error
        tokenizer = _load_tokenizer(transformers, path)
    return StoredModel(model, tokenizer, _judge_loading(model, info, path))


def _load_tokenizer(transformers: Any, path: Path) -> Any:
    """The tokenizer of the directory; None if there is none, or none that this version of transformers can load."""
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None  # else transformers makes an empty one up
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **_OFFLINE)
        tokenizer("A")["input_ids"]
    except Exception:  # whatever is wrong with files that somebody else wrote
        return None
    return tokenizer


def _choose_class(transformers: Any, config: Any) -> Any:
    """The class without a head, whose outputs are small; else the one that the configuration names."""
    if type(config) in transformers.AutoModel._model_mapping:
        return transformers.AutoModel
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise InvalidValueError(f"transformers {transformers.__version__} knows no model of type {config.model_type!r}")


def _require_stored(kind: Any, config: Any, path: Path) -> None:
    """Refuse a configuration that asks for far more numbers than the files hold, before memory is asked for."""
    make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    with torch.device("meta"):
        asked = sum(parameter.numel() for parameter in make(config).parameters())
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    # The smallest formats have one bit per number, and half of the tensors may be missing. Small models fit anyway.
    if asked > max(16 * stored, 2**30):
        raise InvalidValueError(
            f"config.json in {str(path)!r} must be that of its weights, got one for {asked:.3g} numbers beside "
            f"{stored} bytes of safetensors"
        )


def _judge_loading(model: nn.Module, info: dict[str, Any], path: Path) -> list[str]:
    missing = sorted(info["missing_keys"]) + sorted(str(one[0]) for one in info.get("mismatched_keys", ()))
    tensors = len(model.state_dict())
    if len(missing) > _MOST_MISSING * tensors:
        raise InvalidValueError(
            f"the weights in {str(path)!r} must be those of its config.json, got none that fit "
            f"{len(missing)} of {tensors} tensors, {missing[0]} for one"
        )
    if not missing:
        return []
    verb = "is" if len(missing) == 1 else "are"
    named = ", ".join(missing[:2]) + (", …" if len(missing) > 2 else "")
    return [f"{count(len(missing), 'tensor')} of {tensors} {verb} not in the checkpoint and drawn at random: {named}."]


def _first_words(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]} …"


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the bars and reports of transformers, whose news come in our own words."""
    logging = transformers.utils.logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
