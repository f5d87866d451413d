"""Queries of the Explore page: read from the address, and refused where they are out of bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqrtdk import scales
from sqrtdk.errors import InvalidValueError, unknown_name

QUERIES = 64
"""Queries per sample; the numbers shown are means over them."""
MOST_SCORES, MOST_CLAIMS = 64, 4

SOURCES = ("random", "scores")
DTYPES = ("float64", "float32", "float16", "bfloat16")
TRIO = ("none", "sqrt", "inverse")
"""The three that always stand side by side."""

# Python would also read "1_000", other scripts' digits and "nan".
_WHOLE = r"[+-]?\d+"
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"


class Bounds(NamedTuple):
    """What a number may be, and what it is if nothing is said."""

    least: float
    largest: float
    usual: float
    whole: bool = False

    def read(self, name: str, text: str, *, each: bool = False) -> float:
        """Read the number in a string.

        Raises:
            InvalidValueError: it is none, or out of bounds.
        """
        kind = "a whole number" if self.whole else "a number"
        expected = f"must be {kind} from {self.least:g} to {self.largest:g}"
        if len(text) > 40:
            raise InvalidValueError(name, f"{expected}, got {len(text)} characters", each=each)
        if not re.fullmatch(_WHOLE if self.whole else _NUMBER, text, re.ASCII):
            raise InvalidValueError(name, f"{expected}, got {text!r}", each=each)
        value = int(text) if self.whole else float(text)
        if not self.least <= value <= self.largest:
            raise InvalidValueError(name, f"{expected}, got {text}", each=each)
        return value


BOUNDS = {
    "d_k": Bounds(1, 1024, 64, whole=True),
    "n": Bounds(2, 8192, 1024, whole=True),
    "t": Bounds(0.1, 10.0, 1.0),
    "mean_q": Bounds(-2.0, 2.0, 0.0),
    "mean_k": Bounds(-2.0, 2.0, 0.0),
    "correlation": Bounds(-1.0, 1.0, 0.0),
    "seed": Bounds(0, 2**32 - 1, 0, whole=True),
}

# The registered policies with their one parameter. Left out: `temperature`, which is `sqrt` with the slider for t, and
# `llama4`, which is `sqrt` for all positions that are sampled here.
POLICIES: dict[str, Bounds | None] = {
    "none": None,
    "sqrt": None,
    "inverse": None,
    "fixed": Bounds(0.01, 1000.0, 10.0),
    "mup": Bounds(1.0, 1024.0, 64.0),
    "log_n": Bounds(0.01, 10.0, 1.0),
    "yarn": Bounds(1.0, 1024.0, 4.0),
    "cosine": Bounds(-5.0, math.log(100.0), math.log(10.0)),
    "qk_norm": Bounds(0.01, 100.0, 1.0),
}
DISTRIBUTIONS = ("normal", "uniform", "laplace", "student", "signs")


@dataclass(frozen=True)
class Experiment:
    """One setting of the page; the query of its address holds all of it.

    Attributes:
        source: origin of q and k: "random" samples or given "scores".
        d_k: length of queries and keys.
        n: keys per query.
        policy: a name in `POLICIES`, and its `parameter`; None is its usual one.
        t: factor on the policy's temperature; it divides the scale.
        distribution: of the entries of q and k, with variance 1.
        mean_q, mean_k: what is added to every entry.
        correlation: of the entries of a query with those of its own key, i mod n for query i.
        dtype: what q, k and v are rounded to.
        seed: of the random numbers.
        scores: q·k themselves, for the source "scores".
        claimed: lists of weights that a slide or an article claims for these scores, as written there.

    >>> Experiment.read({"d_k": "512", "policy": "fixed"}).parameter_used
    10.0
    """

    source: str = "random"
    d_k: int = 64
    n: int = 1024
    policy: str = "sqrt"
    parameter: float | None = None
    t: float = 1.0
    distribution: str = "normal"
    mean_q: float = 0.0
    mean_k: float = 0.0
    correlation: float = 0.0
    dtype: str = "float64"
    seed: int = 0
    scores: tuple[float, ...] = ()
    claimed: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Experiment:
        """The experiment that a query describes; what it leaves out is as usual.

        Raises:
            InvalidValueError: naming the parameter, what was expected and what came.
        """
        known = list(cls.__dataclass_fields__)
        for name in query:
            if name not in known:
                raise unknown_name("parameter", name[:40], known)
        values: dict[str, Any] = {
            name: bounds.read(name, query[name]) for name, bounds in BOUNDS.items() if name in query
        }
        values |= {
            name: _choose(name, query[name], choices)
            for name, choices in (("source", SOURCES), ("distribution", DISTRIBUTIONS), ("dtype", DTYPES))
            if name in query
        }
        values["policy"] = policy = _choose("policy", query.get("policy", "sqrt"), tuple(POLICIES))
        bounds = POLICIES[policy]
        if query.get("parameter") and bounds is not None:
            values["parameter"] = bounds.read("parameter", query["parameter"])
        if values.get("source") == "scores":
            values["scores"] = scores = _read_scores(query.get("scores", ""))
            values["n"] = len(scores)
            values["claimed"] = _read_claims(query.get("claimed", ""), len(scores))
        return cls(**values)

    @property
    def parameter_used(self) -> float | None:
        """The policy's parameter; None if it has none."""
        bounds = POLICIES[self.policy]
        return None if bounds is None else bounds.usual if self.parameter is None else self.parameter

    @property
    def is_of_the_trio(self) -> bool:
        """Whether its scale is one of the three that are shown anyway."""
        return self.policy in TRIO and self.t == 1.0

    @property
    def label(self) -> str:
        """Its policy in words.

        >>> Experiment(policy="fixed", t=2.0).label
        'fixed:10, t × 2'
        """
        name = self.policy if self.parameter_used is None else f"{self.policy}:{self.parameter_used:.4g}"
        return name if self.t == 1.0 else f"{name}, t × {self.t:.4g}"

    def scale(self, policy: str, d_k: int, n: int) -> float | scales.Policy:
        """What `sqrtdk.attention` is given as `scale`: of one of the trio, or of "chosen", this experiment's own.

        A number, the policy's factor divided by t; policies that normalise q and k have it in their parameter.
        """
        if policy != "chosen":
            return _factor(scales.get(policy), d_k, n)
        value = self.parameter_used
        own = scales.get(self.policy) if value is None else scales.get(self.policy, value)
        if isinstance(own, scales.QKNorm):
            return scales.QKNorm(own.gain / self.t)
        if isinstance(own, scales.Cosine):
            return scales.Cosine(own.log_scale - math.log(self.t))
        return _factor(own, d_k, n) / self.t


def factor_of(scale: float | scales.Policy, d_k: int, n: int) -> float:
    """The number that multiplies the product, whether given or a policy's.

    >>> factor_of(scales.QKNorm(2.0), 64, 8)
    0.25
    """
    return _factor(scale, d_k, n) if isinstance(scale, scales.Policy) else scale


def _factor(policy: scales.Policy, d_k: int, n: int) -> float:
    import numpy as np

    context = scales.ScaleContext(d_k=d_k, count_visible=lambda: np.array([n]))
    return float(np.asarray(policy.factor(context)).reshape(-1)[0])


def _choose(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise unknown_name(name, text[:40], list(choices))
    return text


def _read_scores(text: str) -> tuple[float, ...]:
    parts = text.split(",") if len(text) <= 40 * MOST_SCORES else []
    if not 2 <= len(parts) <= MOST_SCORES:
        came = str(len(parts)) if parts else f"{len(text)} characters"
        raise InvalidValueError("scores", f"must be 2 to {MOST_SCORES} numbers separated by commas, got {came}")
    return tuple(Bounds(-1000.0, 1000.0, 0.0).read("scores", part.strip(), each=True) for part in parts)


def _read_claims(text: str, keys: int) -> tuple[tuple[str, ...], ...]:
    """Read lists of weights as written, separated by semicolons; a list may leave out the last keys."""
    if not text.strip():
        return ()
    lists = text.split(";") if len(text) <= 40 * MOST_SCORES else []
    if not 1 <= len(lists) <= MOST_CLAIMS:
        expected = f"must be 1 to {MOST_CLAIMS} lists separated by semicolons"
        raise InvalidValueError("claimed", f"{expected}, got {text[:40]!r}")
    claims = []
    for one in lists:
        parts = [part.strip() for part in one.split(",")]
        if len(parts) > keys:
            raise InvalidValueError("claimed", f"must have at most {keys} weights, one per score, got {len(parts)}")
        for part in parts:
            Bounds(0.0, 1.0, 0.0).read("claimed", part, each=True)
        claims.append(tuple(parts))
    return tuple(claims)
