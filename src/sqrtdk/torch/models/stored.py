"""Audits of stored models: reads safetensors only, runs none of the model's own code, needs no network."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sqrtdk.audits import Audit
from sqrtdk.audits.checkpoints import find_checkpoint
from sqrtdk.errors import InvalidValueError, SqrtdkError, missing_extra
from sqrtdk.show.table import count
from sqrtdk.torch.models.audit import MisfitError, audit
from sqrtdk.torch.models.inputs import IN_PYTHON, Feed, propose_feeds
from sqrtdk.torch.transformers_internals import build_model, has_base_model
from sqrtdk.wording.numbers import write_number

__all__ = ["StoredModel", "audit_stored", "load_model"]

_OFFLINE = {"local_files_only": True, "trust_remote_code": False}
_MOST_MISSING = 0.5
"""Largest share of tensors that may be missing in the checkpoint. Beyond it, the model is not the checkpoint's."""
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
    """Loaded model, its tokenizer if there is one, and notes about the loading."""

    model: nn.Module
    tokenizer: Any
    notes: list[str]


def load_model(path: Path) -> StoredModel:
    """Load the model of a directory in its stored dtype, without its task head if the base class is known.

    Raises:
        MissingExtraError: if transformers is not installed.
        InvalidValueError: if transformers cannot load the model, or the weights belong to another model.
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
        except Exception as error:  # files of other authors may fail in any way
            raise InvalidValueError(f"MODEL could not be loaded from {str(path)!r}: {_first_words(error)}") from error
        tokenizer = _load_tokenizer(transformers, path)
    return StoredModel(model, tokenizer, _judge_loading(model, info, path))


def _load_tokenizer(transformers: Any, path: Path) -> Any:
    """Return the tokenizer of the directory; None if there is none that this version of transformers can load."""
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None  # otherwise transformers makes an empty tokenizer
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **_OFFLINE)
        tokenizer("A")["input_ids"]
    except Exception:  # files of other authors may fail in any way
        return None
    return tokenizer


def _choose_class(transformers: Any, config: Any) -> Any:
    """Return the class without a task head, whose outputs are small; else the class that the configuration names."""
    if has_base_model(config):
        return transformers.AutoModel
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise InvalidValueError(f"transformers {transformers.__version__} knows no model of type {config.model_type!r}")


def _require_stored(kind: Any, config: Any, path: Path) -> None:
    """Raise for a configuration with far more numbers than the files hold, before memory is allocated."""
    with torch.device("meta"):
        asked = sum(parameter.numel() for parameter in build_model(kind, config).parameters())
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    # The smallest formats have one bit per number, and half of the tensors may be missing. Small models always fit.
    if asked > max(16 * stored, 2**30):
        raise InvalidValueError(
            f"config.json in {str(path)!r} must be that of its weights, got one for {write_number(asked, 3)} numbers "
            f"beside {stored} bytes of safetensors"
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
    """Silence the progress bars and reports of transformers; sqrtdk reports problems itself."""
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


_BUILT_IN = "the built-in text"


def audit_stored(
    name: str, text: str | None = None, on_step: Callable[[str, float], None] = lambda doing, share: None
) -> Audit:
    """Audit the model of a directory or of an installed package.

    Args:
        name: a name that `sqrtdk.audits.checkpoints.find_checkpoint` finds.
        text: input text; None for the text that comes with sqrtdk. Models that read no text get noise. Models without a
            tokenizer, or with one that does not know the text of sqrtdk, get random tokens. `about["input"]` says which
            input was used.
        on_step: called with the current activity and the finished share.

    Returns:
        The audit, with `source`, `input` and `date` in `about`.

    Raises:
        InvalidValueError: if there is no such model, if it cannot be loaded, or if no generated input fits it.
        MissingExtraError: if transformers is not installed.
    """
    path = find_checkpoint(name)
    on_step(f"loading {name}", 0.1)
    stored = load_model(path)
    if text is not None and stored.tokenizer is None:
        raise InvalidValueError(f"{name} has no tokenizer that could read a text; without one it gets random tokens")
    content = (
        text if text is not None else (resources.files("sqrtdk.records.data") / "text.txt").read_text(encoding="utf-8")
    )
    if not content.strip():
        raise InvalidValueError("there are no words in the text")
    kind = type(stored.model).__name__
    misfit: InvalidValueError | None = None
    for feed in _make_feeds(stored, content, is_chosen=text is not None):
        if text is not None and "input_ids" not in feed.batch and "decoder_input_ids" not in feed.batch:
            continue
        on_step(f"running {name} on {feed.words}", 0.5)
        try:
            audited = audit(stored.model, feed.batch)
        except MisfitError as error:
            misfit = misfit or InvalidValueError(f"{name} cannot be run on {feed.words}: {error.raised}; {IN_PYTHON}")
            continue
        about = {
            **audited.about,
            "source": name,
            "command": f"sqrtdk audit {shlex.quote(name)}{'' if text is None else ' --text FILE'}",
            "versions": {**audited.about["versions"], "transformers": metadata.version("transformers")},
            "input": feed.words,
            "date": datetime.now(UTC).date().isoformat(),
            "notes": [*audited.about["notes"], *stored.notes],
        }
        return replace(audited, about=about)
    raise misfit or InvalidValueError(f"a text is for models that read, but {name} ({kind}) takes none")


def _make_feeds(stored: StoredModel, text: str, *, is_chosen: bool) -> list[Feed]:
    name = "the text" if is_chosen else _BUILT_IN
    try:
        return list(propose_feeds(stored.model, stored.tokenizer, text, name, is_chosen=is_chosen))
    except SqrtdkError:
        raise
    except Exception as error:  # an unusual configuration or tokenizer may fail in any way
        kind = type(stored.model).__name__
        raise InvalidValueError(
            f"no input can be made up for {kind}: {type(error).__name__}: {error}; {IN_PYTHON}"
        ) from error
