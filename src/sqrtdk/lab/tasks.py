"""Training tasks for a small transformer: input, questions, and the loss at which a task counts as solved."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sqrtdk import checks
from sqrtdk.errors import InvalidValueError, unknown_name

Codes = npt.NDArray[np.int64]

_HELD_OUT_STREAM = 3
_HELD_OUT_SEQUENCES = 512
_HELD_OUT_WINDOWS = 256
_PAGE = 2048


@dataclass(frozen=True)
class Batch:
    """Sequences and their questions.

    Args:
        tokens: what the model reads, `[B, L]`.
        targets: the right answers at the last T positions, `[B, T]`.
    """

    tokens: Codes
    targets: Codes


@dataclass(frozen=True)
class Task(ABC):
    """Base of the tasks: loss and accuracy count the last `answers` positions of a sequence only."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def alphabet(self) -> int:
        """Return the number of symbols, in the input and in the answers."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Length L of a sequence."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """Return the number T of asked positions at the end of a sequence."""

    @property
    @abstractmethod
    def threshold(self) -> float:
        """Return the loss in nats below which the task counts as solved."""

    @property
    @abstractmethod
    def solved_when(self) -> str:
        """Return the threshold in words."""

    @property
    @abstractmethod
    def data_hash(self) -> str | None:
        """SHA-256 of the data the task reads; None for a task that generates its own."""

    @property
    def chance_loss(self) -> float:
        """Return the loss in nats of a uniform guess."""
        return math.log(self.alphabet)

    @abstractmethod
    def sample(self, rng: np.random.Generator, size: int) -> Batch:
        """Sample a batch for training."""

    @abstractmethod
    def held_out(self) -> Batch:
        """Return the data every run is judged on, the same for all of them."""


@dataclass(frozen=True)
class Recall(Task):
    """Associative recall: k₁ v₁ k₂ v₂ … and then every key again in another order; at each the answer is its value.

    Keys and values share one alphabet; the keys of a sequence differ, its values need not.

    >>> batch = Recall(pairs=2, symbols=4).sample(np.random.default_rng(0), size=1)
    >>> batch.tokens.shape, batch.targets.shape
    ((1, 6), (1, 2))
    """

    pairs: int = 8
    symbols: int = 16
    name = "recall"

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", checks.integer("pairs", self.pairs, 1))
        object.__setattr__(self, "symbols", checks.integer("symbols", self.symbols, 2))
        if self.symbols < self.pairs:
            raise InvalidValueError(
                "symbols",
                f"must be at least pairs ({self.pairs}), as the keys of a sequence differ, got {self.symbols}",
            )

    @property
    def alphabet(self) -> int:
        """Return the number of symbols, which keys and values share."""
        return self.symbols

    @property
    def length(self) -> int:
        """Two positions for each pair and one for its query."""
        return 3 * self.pairs

    @property
    def answers(self) -> int:
        """One for each pair."""
        return self.pairs

    @property
    def threshold(self) -> float:
        """Return a tenth of the loss of a guess."""
        return self.chance_loss / 10.0

    @property
    def solved_when(self) -> str:
        """Return the threshold in words."""
        return (
            f"recall counts as solved when the loss on the queries is below {self.threshold:.3f} nats, "
            f"a tenth of chance (ln {self.symbols} = {self.chance_loss:.3f})"
        )

    @property
    def data_hash(self) -> None:
        """None: the sequences are generated."""
        return None

    def sample(self, rng: np.random.Generator, size: int) -> Batch:
        """Sample `size` new sequences."""
        keys = rng.random((size, self.symbols)).argsort(axis=1)[:, : self.pairs]
        values = rng.integers(0, self.symbols, (size, self.pairs))
        order = rng.random((size, self.pairs)).argsort(axis=1)
        pairs = np.stack([keys, values], axis=2).reshape(size, 2 * self.pairs)
        queries = np.take_along_axis(keys, order, axis=1)
        return Batch(np.concatenate([pairs, queries], axis=1), np.take_along_axis(values, order, axis=1))

    def held_out(self) -> Batch:
        """Return 512 sequences from a generator of their own, the same for every run."""
        return self.sample(np.random.default_rng([_HELD_OUT_STREAM]), _HELD_OUT_SEQUENCES)


@dataclass(frozen=True)
class _Corpus:
    training: Codes
    held_out: Codes
    alphabet: int
    sha256: str
    bigram_loss: float


@lru_cache(maxsize=1)
def _read_corpus() -> _Corpus:
    from pydoc_data.topics import topics  # half a megabyte that only this task needs

    text = "\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    code_of = {character: code for code, character in enumerate(characters)}
    codes = np.array([code_of[character] for character in text], dtype=np.int64)
    # The topics differ too much for a tail to stand for the rest (its pairs cost 2.32 nats, theirs 2.49).
    is_held_out = np.arange(len(codes)) // _PAGE % 10 == 9
    training, held_out = codes[~is_held_out], codes[is_held_out]
    counts = np.ones((len(characters), len(characters)))
    np.add.at(counts, (training[:-1], training[1:]), 1.0)
    log_probability = np.log(counts / counts.sum(axis=1, keepdims=True))
    return _Corpus(
        training=training,
        held_out=held_out,
        alphabet=len(characters),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        bigram_loss=float(-log_probability[held_out[:-1], held_out[1:]].mean()),
    )


@dataclass(frozen=True)
class Text(Task):
    """Next-character prediction on the help pages in the standard library's `pydoc_data.topics`.

    Every tenth page of 2048 characters is held out. The pages differ between Python versions, so their
    SHA-256 goes into every record.
    """

    context: int = 64
    name = "text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", checks.integer("context", self.context, 2))
        shorter = min(len(_read_corpus().training), len(_read_corpus().held_out))
        if self.context >= shorter:
            raise InvalidValueError(
                "context", f"must be below {shorter}, the length of the held-out text, got {self.context}"
            )

    @property
    def alphabet(self) -> int:
        """Return the number of different characters."""
        return _read_corpus().alphabet

    @property
    def length(self) -> int:
        """Return the context."""
        return self.context

    @property
    def answers(self) -> int:
        """Every position is asked for the character that follows."""
        return self.context

    @property
    def threshold(self) -> float:
        """Return the held-out loss of character pairs: a model without attention can do no better."""
        return _read_corpus().bigram_loss

    @property
    def solved_when(self) -> str:
        """Return the threshold in words."""
        return (
            f"text counts as solved when the loss is below {self.threshold:.3f} nats, the held-out loss of counted "
            f"character pairs, so only by looking further back than one character "
            f"(chance: ln {self.alphabet} = {self.chance_loss:.3f})"
        )

    @property
    def data_hash(self) -> str:
        """Return the SHA-256 of the whole input."""
        return _read_corpus().sha256

    def sample(self, rng: np.random.Generator, size: int) -> Batch:
        """Sample `size` windows anywhere in the training input."""
        training = _read_corpus().training
        return self._windows(training, rng.integers(0, len(training) - self.context, size))

    def held_out(self) -> Batch:
        """Return 256 windows spread evenly over the held-out pages."""
        pages = _read_corpus().held_out
        last = len(pages) - self.context - 1
        return self._windows(pages, np.linspace(0, last, _HELD_OUT_WINDOWS).astype(np.int64))

    def _windows(self, codes: Codes, starts: Codes) -> Batch:
        windows = codes[starts[:, None] + np.arange(self.context + 1)]
        return Batch(windows[:, :-1], windows[:, 1:])


_TASKS: dict[str, type[Task]] = {task.name: task for task in (Recall, Text)}


def names() -> list[str]:
    """Return the names of the tasks.

    >>> names()
    ['recall', 'text']
    """
    return list(_TASKS)


def get(name: str, parameters: Mapping[str, Any] | None = None) -> Task:
    """Make a task from its name and parameters.

    >>> get("recall", {"pairs": 4}).length
    12

    Raises:
        InvalidValueError: unknown task or parameter (the message lists the known ones), or a bad value.
    """
    if name not in _TASKS:
        raise unknown_name("task", name, names())
    known = [item.name for item in fields(_TASKS[name])]
    for parameter in parameters or {}:
        if parameter not in known:
            raise unknown_name(f"parameter of task {name!r}", parameter, known)
    return _TASKS[name](**(parameters or {}))
