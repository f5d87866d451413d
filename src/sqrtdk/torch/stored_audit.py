"""Auditing a model from its files: find it, load it, feed it, judge it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata, resources

from sqrtdk.audits import Audit
from sqrtdk.checkpoints import find_checkpoint
from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.torch.audit import MisfitError, audit
from sqrtdk.torch.model_input import IN_PYTHON, Feed, propose_feeds
from sqrtdk.torch.stored_model import StoredModel, load_model

__all__ = ["audit_stored"]

_BUILT_IN = "the built-in text"


def audit_stored(
    name: str, text: str | None = None, on_step: Callable[[str, float], None] = lambda doing, share: None
) -> Audit:
    """Audit the model of a directory or of an installed package.

    Args:
        name: what `sqrtdk.checkpoints.find_checkpoint` finds.
        text: what the model reads; None: a text that comes with sqrtdk. Models that read no text get noise; models
            without a tokenizer, or with one that does not know sqrtdk's text, get random tokens; `about["input"]` says
            which.
        on_step: called with what is going on and the share of it that is done.

    Returns:
        The audit, with `source`, `input` and `date` in `about`.

    Raises:
        InvalidValueError: there is no such model, it cannot be loaded, or nothing that can be made up fits it.
        MissingExtraError: transformers is not installed.
    """
    path = find_checkpoint(name)
    on_step(f"loading {name}", 0.1)
    stored = load_model(path)
    if text is not None and stored.tokenizer is None:
        raise InvalidValueError(f"{name} has no tokenizer that could read a text; without one it gets random tokens")
    content = text if text is not None else (resources.files("sqrtdk.data") / "text.txt").read_text(encoding="utf-8")
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
    except Exception as error:  # a configuration or a tokenizer that is not as those of other models are
        kind = type(stored.model).__name__
        raise InvalidValueError(
            f"no input can be made up for {kind}: {type(error).__name__}: {error}; {IN_PYTHON}"
        ) from error
