"""Replies to a student's answers: a mistake is recognised by what it computes, on inputs that tell mistakes apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import softmax, theory
from sqrtdk.errors import unknown_name
from sqrtdk.exercises.gradients import gradients
from sqrtdk.exercises.saturation import saturation
from sqrtdk.exercises.temperature import temperature
from sqrtdk.exercises.variance import variance
from sqrtdk.wording.guesses import compare_number, is_close
from sqrtdk.wording.numbers import write_number

__all__ = ["EXERCISES", "Reply", "check", "compare"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reply:
    """Reply to an answer or a guess, which a notebook shows as its sentence.

    Args:
        right: whether the answer is right; None if there is none yet.
        says: the sentence.
    """

    right: bool | None
    says: str

    def __repr__(self) -> str:
        return self.says


class _Part(NamedTuple):
    """Part of an answer: its right value, and the value that each known mistake gives."""

    name: str
    right: Array
    mistakes: Mapping[str, Any]


class _Exercise(NamedTuple):
    """Inputs for the student's function, the parts of its answer, and the number to guess."""

    inputs: Callable[[], list[tuple[Any, ...]]]
    parts: Callable[[list[tuple[Any, ...]]], list[_Part]]
    guessed: Callable[[], float]
    tolerance: float = 1e-6
    read: Callable[[Any], Any] = lambda output: output


def check(exercise: str, answer: Any) -> Reply:
    """Check a student's function by what it computes.

    Args:
        exercise: its name, one of `EXERCISES`.
        answer: the function that the exercise asks for.

    Returns:
        A reply. A known mistake is named, any other is told by its shape or its factor. An exception in the function is
        told, not raised.

    Raises:
        InvalidValueError: an unknown exercise.

    >>> check("spread", lambda q, k: ((q * k).sum(axis=1).var(), ...))
    Not filled in yet: the standard deviation after the division.
    >>> check("spread", lambda q, k: ((q * k).sum(axis=1).var(), 1.0))
    The standard deviation of q·k: this is the variance. The standard deviation is its square root.
    """
    known = _find(exercise)
    if answer is None or answer is ...:
        return Reply(None, "Not filled in yet.")
    if not callable(answer):
        return Reply(False, f"The answer must be a function, got {type(answer).__name__}.")
    inputs = known.inputs()
    try:
        outputs = [answer(*(np.copy(one) if isinstance(one, np.ndarray) else one for one in given)) for given in inputs]
        outputs = [known.read(output) for output in outputs]
    except Exception as error:  # the student's own function
        return Reply(False, f"Your function raises {type(error).__name__}: {error}")
    return _judge(known.parts(inputs), outputs, known.tolerance)


def compare(exercise: str, guess: Any) -> Reply:
    """Compare a guess with the number that sqrtdk computes.

    >>> compare("saturation", 10)
    Your guess, 10, is 2 times the computed 5.04.
    >>> compare("saturation", ...)
    No guess yet: set guess to a number.

    Raises:
        InvalidValueError: an unknown exercise.
    """
    known = _find(exercise)
    if guess is None or guess is ...:
        return Reply(None, "No guess yet: set guess to a number.")
    if isinstance(guess, bool) or not isinstance(guess, int | float | np.integer | np.floating):
        return Reply(None, f"A guess must be a number, got {type(guess).__name__}.")
    computed = known.guessed()
    return Reply(is_close(float(guess), computed), compare_number(float(guess), computed))


def _find(exercise: str) -> _Exercise:
    if exercise not in EXERCISES:
        raise unknown_name("exercise", exercise, list(EXERCISES))
    return EXERCISES[exercise]


def _judge(parts: list[_Part], outputs: list[Any], tolerance: float) -> Reply:
    if len(parts) > 1:
        if outputs[0] is None or outputs[0] is ...:
            return Reply(None, "Not filled in yet.")
        if not isinstance(outputs[0], tuple | list) or len(outputs[0]) != len(parts):
            return Reply(False, f"The function must return {len(parts)} values.")
        columns = [[output[place] for output in outputs] for place in range(len(parts))]
    else:
        columns = [outputs]
    for part, values in zip(parts, columns, strict=True):
        if any(value is None or value is ... for value in values):
            return Reply(None, f"Not filled in yet: {part.name}.")
    for part, values in zip(parts, columns, strict=True):
        says = _explain(part, values, tolerance)
        if says:
            return Reply(False, f"{part.name[0].upper()}{part.name[1:]}: {says}")
    return Reply(True, "Right.")


def _explain(part: _Part, values: list[Any], tolerance: float) -> str:
    """Return what is wrong with the values of a part; empty if nothing is."""
    try:
        given = np.array(values[0] if len(values) == 1 else values, dtype=np.float64)
    except (TypeError, ValueError):
        return f"it must be numbers, got {type(values[0]).__name__}."
    if _same(given, part.right, tolerance):
        return ""
    for mistake, wrong in part.mistakes.items():
        if _same(given, np.asarray(wrong, dtype=np.float64), tolerance):
            return mistake
    if given.shape != part.right.shape:
        return f"it must have shape {part.right.shape}, got {given.shape}."
    if not np.isfinite(given).all():
        return "it is not finite."
    factor = float((given * part.right).sum() / (part.right**2).sum())
    if _same(given, factor * part.right, tolerance):
        return f"it is {write_number(factor, 3)} times the right one."
    return f"it differs from the right one by up to {write_number(float(np.abs(given - part.right).max()), 2)}."


def _same(one: Array, two: Array, tolerance: float) -> bool:
    rounding = 1e-12 + tolerance * float(np.abs(two).max())
    return one.shape == two.shape and np.allclose(one, two, rtol=tolerance, atol=rounding)


# 1: the spread of q·k


def _sample_pairs() -> list[tuple[Any, ...]]:
    q, k = np.random.default_rng(1).standard_normal((2, 500, 48))
    return [(q, k)]


def _parts_of_spread(inputs: list[tuple[Any, ...]]) -> list[_Part]:
    ((q, k),) = inputs
    dots, d_k = (q * k).sum(axis=1), q.shape[1]
    spread, root = dots.std(), math.sqrt(q.shape[1])
    return [
        _Part(
            "the standard deviation of q·k",
            spread,
            {
                "this is the variance. The standard deviation is its square root.": dots.var(),
                "the sum runs over the pairs. Sum over the dₖ entries of each pair (axis=1).": (q * k)
                .sum(axis=0)
                .std(),
                "the products are not added up. q·k is their sum over axis 1.": (q * k).std(),
                "this is the mean of the products. q·k is their sum.": (q * k).mean(axis=1).std(),
                "it is divided by √dₖ already. That belongs to the second number.": spread / root,
                "this is the mean of |q·k|, which is smaller.": np.abs(dots).mean(),
                "q and k are added. Multiply them.": (q + k).sum(axis=1).std(),
            },
        ),
        _Part(
            "the standard deviation after the division",
            spread / root,
            {
                "it is divided by dₖ in all: the √ is missing, or √dₖ divides twice.": spread / d_k,
                "this is the variance. The standard deviation is its square root.": dots.var() / d_k,
                "the variance is divided by √dₖ. Divide q·k, then take the standard deviation.": dots.var() / root,
                "it is not divided.": spread,
                "it is multiplied by √dₖ. Divide.": spread * root,
                "it is divided by √(number of pairs). dₖ is the length of q, its second axis.": spread / len(q) ** 0.5,
            },
        ),
    ]


# 2: the share of 1 − Σp² that is left

_LEADS = (0.5, 2.0, 5.0)


def _parts_of_saturation(inputs: list[tuple[Any, ...]]) -> list[_Part]:
    def over_leads(number: Callable[[Array], float], zeros: int = 3) -> Array:
        return np.array([number(softmax(np.array([x, *[0.0] * zeros]))) for (x,) in inputs])

    trace = over_leads(lambda p: 1.0 - (p**2).sum())
    squares = over_leads(lambda p: (p**2).sum())
    largest = over_leads(lambda p: p.max())
    five = over_leads(lambda p: 1.0 - (p**2).sum(), zeros=4)
    return [
        _Part(
            "the share that is left",
            trace / 0.75,
            {
                "this is 1 − Σp² itself. Divide it by its value at x = 0.": trace,
                "this is Σp². The trace is 1 − Σp².": squares,
                "this is Σp² over its value at x = 0. The trace is 1 − Σp².": squares / 0.25,
                "this is the largest weight.": largest,
                "this is 1 minus the largest weight. Subtract the sum of all squares.": 1.0 - largest,
                "this is 1 minus the square of the largest weight. Subtract the squares of all.": 1.0 - largest**2,
                "it is 0 for every x: the weights are not squared, or softmax lacks its exponential.": 0.0 * trace,
                "there are four zeros. softmax([x, 0, 0, 0]) has three.": five / 0.8,
                "this is the share that is gone.": 1.0 - trace / 0.75,
            },
        )
    ]


# 3: W_q and W_k without the division


def _sample_projections() -> list[tuple[Any, ...]]:
    w_q, w_k = np.random.default_rng(2).standard_normal((2, 10, 48))
    return [(w_q, w_k)]


def _multiply_projections(output: Any) -> Any:
    """Return W_q·W_kᵀ, which the scores are made of, of a pair that is filled in."""
    if not isinstance(output, tuple | list) or len(output) != 2:
        return output
    w_q, w_k = output
    return None if any(one is None or one is ... for one in output) else np.asarray(w_q) @ np.asarray(w_k).T


def _parts_of_rescaling(inputs: list[tuple[Any, ...]]) -> list[_Part]:
    ((w_q, w_k),) = inputs
    width, d_k = w_q.shape
    scores = w_q @ w_k.T
    return [
        _Part(
            "the scores x·W_q·W_kᵀ·xᵀ",
            scores * d_k**-0.5,
            {
                "nothing has changed.": scores,
                "they are divided by dₖ: each matrix takes the whole 1/√dₖ, so the scale is applied twice, or the √ is "
                "missing. Together they must take 1/√dₖ.": scores / d_k,
                "they are divided by dₖ^¼ in all: one of the two is not rescaled.": scores * d_k**-0.25,
                "they are divided by dₖ² in all. Together the matrices must take 1/√dₖ.": scores / d_k**2,
                "they are multiplied by √dₖ. Make the matrices smaller.": scores * d_k**0.5,
                "dₖ is the second axis of the matrices, and the first one was taken.": scores * width**-0.5,
            },
        )
    ]


# 4: weights at a temperature


def _sample_queries() -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(3)
    return [(rng.standard_normal((5, 48)), rng.standard_normal((9, 48)), 5.0)]


def _parts_of_temperature(inputs: list[tuple[Any, ...]]) -> list[_Part]:
    ((q, k, tau),) = inputs
    dots, root = q @ k.T, math.sqrt(q.shape[1])
    raised, columns = np.exp(dots / tau), softmax(dots / tau, axis=0)
    return [
        _Part(
            "the weights",
            softmax(dots / tau, axis=1),
            {
                "the scores are multiplied by τ. Divide by it.": softmax(dots * tau, axis=1),
                "the sums run over the queries, the wrong axis. Weights of each query add up to 1 (axis=1).": columns,
                "all weights together add up to 1. The weights of each query must.": raised / raised.sum(),
                "τ is not used.": softmax(dots, axis=1),
                "1/√dₖ is used in place of 1/τ.": softmax(dots / root, axis=1),
                "the scale is applied twice: by 1/√dₖ and by 1/τ.": softmax(dots / tau / root, axis=1),
                "the scores are divided by √τ. τ is √dₖ itself, not dₖ.": softmax(dots / math.sqrt(tau), axis=1),
                "these are the scores. Softmax is missing.": dots / tau,
                "these are exponentials. Divide them by their sum over the keys.": raised,
                "queries and keys have changed places.": softmax(dots.T / tau, axis=1),
            },
        )
    ]


# 5: the gradient of a query


def _sample_row() -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(4)
    shapes = ((48,), (9, 48), (9, 3), (3,))
    return [(*(rng.standard_normal(shape) for shape in shapes), 0.2)]


def _parts_of_gradient(inputs: list[tuple[Any, ...]]) -> list[_Part]:
    ((q, k, v, grad_output, scale),) = inputs
    p, other = softmax(scale * k @ q), softmax(k @ q)
    toward = v @ grad_output
    scores = theory.softmax_jacobian(p) @ toward
    return [
        _Part(
            "the gradient of q",
            scale * k.T @ scores,
            {
                "the factor `scale` is missing: the scores are scale·q·k.": k.T @ scores,
                "`scale` is applied twice.": scale**2 * k.T @ scores,
                "the weights are computed without `scale`.": scale * k.T @ theory.softmax_jacobian(other) @ toward,
                "the Jacobian is diag(p) − p·pᵀ, and p·pᵀ is missing.": scale * k.T @ (p * toward),
                "only the diagonal p·(1 − p) of the Jacobian is used.": scale * k.T @ (p * (1.0 - p) * toward),
                "the sign is wrong.": -scale * k.T @ scores,
                "this is the gradient of the scaled scores. Multiply by scale and the keys.": scores,
                "this is the gradient of q·k. Multiply by the keys.": scale * scores,
                "this is the gradient of the weights. The softmax Jacobian, scale and keys follow.": toward,
            },
        )
    ]


def _spread_at_512() -> float:
    return float(variance(d_ks=(512,)).tables["variance"][0]["measured"])


def _saturated_from() -> float:
    return float(next(row["x"] for row in saturation().tables["points"] if row["main"]))


def _keys_at_half() -> float:
    return float(next(row["effective_keys"] for row in temperature().tables["temperature"] if row["relative"] == 0.5))


def _gradient_ratio() -> float:
    means = {row["scale"]: row["grad_q_mean"] for row in gradients(d_ks=(64,), ns=(1024,)).tables["vanish"]}
    return float(means["none"] / means["sqrt"])


EXERCISES: dict[str, _Exercise] = {
    # Students may divide by N or by N − 1.
    "spread": _Exercise(_sample_pairs, _parts_of_spread, cache(_spread_at_512), tolerance=2e-3),
    "saturation": _Exercise(lambda: [(x,) for x in _LEADS], _parts_of_saturation, cache(_saturated_from)),
    "rescale": _Exercise(_sample_projections, _parts_of_rescaling, lambda: 64**-0.5, read=_multiply_projections),
    "temperature": _Exercise(_sample_queries, _parts_of_temperature, cache(_keys_at_half)),
    "gradient": _Exercise(_sample_row, _parts_of_gradient, cache(_gradient_ratio)),
}
"""Exercises by name, in the order of the notebook."""
