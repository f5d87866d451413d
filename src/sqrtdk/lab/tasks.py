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
from sqrtdk.errors import InvalidValueError, missing_extra, unknown_name

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

    @classmethod
    @abstractmethod
    def parameters_at(cls, length: int) -> dict[str, Any]:
        """Return the parameters with which a sequence has this length; a length that cannot be is an error."""

    @abstractmethod
    def sample(self, rng: np.random.Generator, size: int) -> Batch:
        """Sample a batch for training."""

    @abstractmethod
    def held_out(self) -> Batch:
        """Return the data every run is judged on, the same for all of them."""

    def write(self, tokens: Codes) -> list[str]:
        """Return the symbols of a sequence as they are shown; numbers if the task has no other names for them."""
        return [str(token) for token in tokens.tolist()]

    def find_answers(self, tokens: Codes) -> list[int]:
        """Return for each question of a sequence the position that holds the answer; none if no one position does."""
        return []


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

    @classmethod
    def parameters_at(cls, length: int) -> dict[str, Any]:
        """Return a third of the length as pairs, and as many symbols as pairs or the default, whichever is more.

        >>> Recall.parameters_at(96)
        {'pairs': 32, 'symbols': 32}
        """
        if length % 3 or length < 3:
            raise InvalidValueError("lengths", f"of recall must be multiples of 3, got {length}")
        return {"pairs": length // 3, "symbols": max(length // 3, cls.symbols)}

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

    def write(self, tokens: Codes) -> list[str]:
        """Return letters, and numbers beyond Z.

        >>> Recall().write(np.array([0, 25, 26]))
        ['A', 'Z', '26']
        """
        return [chr(ord("A") + token) if token < 26 else str(token) for token in tokens.tolist()]

    def find_answers(self, tokens: Codes) -> list[int]:
        """Return the position of the value that follows each asked key.

        >>> Recall(pairs=2).find_answers(np.array([3, 5, 1, 5, 1, 3]))
        [3, 1]
        """
        pairs = tokens[: 2 * self.pairs : 2].tolist()
        return [2 * pairs.index(key) + 1 for key in tokens[2 * self.pairs :].tolist()]


@dataclass(frozen=True)
class _Corpus:
    characters: str
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
        characters="".join(characters),
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

    @classmethod
    def parameters_at(cls, length: int) -> dict[str, Any]:
        """Return the length as the context."""
        return {"context": length}

    def sample(self, rng: np.random.Generator, size: int) -> Batch:
        """Sample `size` windows anywhere in the training input."""
        training = _read_corpus().training
        return self._windows(training, rng.integers(0, len(training) - self.context, size))

    def held_out(self) -> Batch:
        """Return 256 windows spread evenly over the held-out pages."""
        pages = _read_corpus().held_out
        last = len(pages) - self.context - 1
        return self._windows(pages, np.linspace(0, last, _HELD_OUT_WINDOWS).astype(np.int64))

    def write(self, tokens: Codes) -> list[str]:
        """Return the characters."""
        return [_read_corpus().characters[token] for token in tokens]

    def _windows(self, codes: Codes, starts: Codes) -> Batch:
        windows = codes[starts[:, None] + np.arange(self.context + 1)]
        return Batch(windows[:, :-1], windows[:, 1:])


_PIXELS = 64
_LEVELS = 17
_HELD_OUT_IMAGES = 5


@dataclass(frozen=True)
class _Images:
    training: Batch
    held_out: Batch
    sha256: str


@lru_cache(maxsize=1)
def _read_images() -> _Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing_extra("scikit-learn", "digits") from None
    data = load_digits()
    pixels, classes = data.data.astype(np.int64), data.target.astype(np.int64)[:, None]
    is_held_out = np.arange(len(pixels)) % _HELD_OUT_IMAGES == _HELD_OUT_IMAGES - 1
    return _Images(
        training=Batch(pixels[~is_held_out], classes[~is_held_out]),
        held_out=Batch(pixels[is_held_out], classes[is_held_out]),
        sha256=hashlib.sha256(pixels.tobytes() + classes.tobytes()).hexdigest(),
    )


@dataclass(frozen=True)
class Digits(Task):
    """Handwritten digits of scikit-learn: 64 pixels of 17 grey levels, row by row; at the last the answer is the digit.

    1797 images of 8 × 8 pixels (the test set of UCI's optical recognition data). Every fifth is held out.
    """

    name = "digits"

    def __post_init__(self) -> None:
        _read_images()  # without scikit-learn there is no such task

    @property
    def alphabet(self) -> int:
        """Return the number of grey levels; the ten digits are among them."""
        return _LEVELS

    @property
    def length(self) -> int:
        """Return the number of pixels."""
        return _PIXELS

    @property
    def answers(self) -> int:
        """One, at the last pixel."""
        return 1

    @property
    def chance_loss(self) -> float:
        """Return the loss in nats of a guess among ten digits."""
        return math.log(10)

    @property
    def threshold(self) -> float:
        """Return half the loss of a guess."""
        return self.chance_loss / 2.0

    @property
    def solved_when(self) -> str:
        """Return the threshold in words."""
        return (
            f"digits counts as solved when the held-out loss is below {self.threshold:.3f} nats, "
            f"half of chance (ln 10 = {self.chance_loss:.3f})"
        )

    @property
    def data_hash(self) -> str:
        """Return the SHA-256 of pixels and digits."""
        return _read_images().sha256

    @classmethod
    def parameters_at(cls, length: int) -> dict[str, Any]:
        """Return nothing: the images have 64 pixels."""
        if length != _PIXELS:
            raise InvalidValueError("lengths", f"of digits must be {_PIXELS}, the pixels of an image, got {length}")
        return {}

    def sample(self, rng: np.random.Generator, size: int) -> Batch:
        """Sample `size` images of the training part."""
        images = _read_images().training
        chosen = rng.integers(0, len(images.tokens), size)
        return Batch(images.tokens[chosen], images.targets[chosen])

    def held_out(self) -> Batch:
        """Return every fifth image."""
        return _read_images().held_out


_TASKS: dict[str, type[Task]] = {task.name: task for task in (Recall, Text, Digits)}


def names() -> list[str]:
    """Return the names of the tasks.

    >>> names()
    ['recall', 'text', 'digits']
    """
    return list(_TASKS)


def parameters_at(name: str, length: int | None) -> dict[str, Any]:
    """Return the parameters with which a task's sequences have a length; None: the task's own.

    >>> parameters_at("recall", 12)
    {'pairs': 4, 'symbols': 16}

    Raises:
        InvalidValueError: unknown task, or a length that the task cannot have.
    """
    if name not in _TASKS:
        raise unknown_name("task", name, names())
    return {} if length is None else _TASKS[name].parameters_at(checks.integer("lengths", length, 1))


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
