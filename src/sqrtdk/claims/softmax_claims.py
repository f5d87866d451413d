"""Claims about the softmax: worked numbers, saturation, and what dividing by dₖ does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import attention, scaled_dot_product_attention, softmax, theory
from sqrtdk.claims.claim import Verdict, VerdictName, agree, claim, row
from sqrtdk.claims.evidence import Evidence
from sqrtdk.exercises.gaussian_rows import choose_effort, name_importance, sample_policies
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import write_number

Array = npt.NDArray[np.float64]


def _worked(claimed: list[float], scores: list[float], *, decimals: int = 3) -> tuple[Array, bool]:
    computed = softmax(np.asarray(scores, dtype=np.float64))
    return computed, agree(claimed, computed, decimals=decimals)


@claim("soft.exp", "S0", "e^1 2.718, e^5 148.4, e^10 22 026, e^20 485 165 195, e^50 5 184 705 528 587 072 045")
def _exp(evidence: Evidence) -> Verdict:
    claimed = {1: 2.718, 5: 148.4, 10: 22_026.0, 20: 485_165_195.0, 50: 5_184_705_528_587_072_045.0}
    ratio = {x: math.exp(x) / value for x, value in claimed.items()}
    off = {x: r for x, r in ratio.items() if abs(r - 1) > 1e-3}
    return Verdict(
        ", ".join(f"e^{x} = {math.exp(x):.7g}" for x in claimed),
        "wrong" if off else "holds",
        " ".join(f"e^{x} is {write_number(r)} times the number given." for x, r in off.items())
        + f" {len(claimed) - len(off)} of the {len(claimed)} are right.",
        {"ratio": ratio},
    )


@claim("soft.powers", "S0", "e^0.5 1.649, e^1.25 3.490, e^1.5 4.482, e^1.75 5.755, e^12 162 755, e^14 1 202 604")
def _powers(evidence: Evidence) -> Verdict:
    claimed = {0.5: 1.649, 1.25: 3.490, 1.5: 4.482, 1.75: 5.755, 12: 162_755.0, 14: 1_202_604.0}
    off = [x for x, value in claimed.items() if not agree(value, math.exp(x), decimals=0 if x > 5 else 3)]
    return Verdict(
        ", ".join(f"e^{x:g} = {math.exp(x):.{0 if x > 5 else 3}f}" for x in claimed),
        "wrong" if off else "holds",
        f"{len(claimed) - len(off)} of the {len(claimed)} are right to the digit"
        + (f"; not e^{', e^'.join(f'{x:g}' for x in off)}." if off else "."),
        {"exponentials": {str(x): math.exp(x) for x in claimed}},
    )


@claim("soft.50", "S0", "softmax[50, 10, 5] ≈ [1.0, 0.0, 0.0]")
def _fifty(evidence: Evidence) -> Verdict:
    computed, fits = _worked([1.0, 0.0, 0.0], [50, 10, 5], decimals=1)
    return Verdict(
        f"[1 − {write_number(computed[1:].sum(), 2)}, {write_number(computed[1], 2)}, {write_number(computed[2], 2)}]",
        "holds" if fits else "wrong",
        "A lead of 40 leaves e^−40 to the next.",
        {"weights": computed.tolist()},
    )


@claim("soft.5", "S0", "softmax[5, 1, 0.5] = [0.971, 0.018, 0.011], sum of exponentials 152.780")
def _five_small(evidence: Evidence) -> Verdict:
    computed, fits = _worked([0.971, 0.018, 0.011], [5, 1, 0.5])
    total = float(np.exp([5, 1, 0.5]).sum())
    return Verdict(
        f"{row(computed)}, sum {total:.3f}",
        "holds" if fits and agree(152.780, total, decimals=3) else "wrong",
        "Computed digit by digit.",
        {"weights": computed.tolist(), "sum": total},
    )


@claim("soft.sum", "S0", "148.4 + 2.718 + 1.649 = 152.780")
def _sum(evidence: Evidence) -> Verdict:
    shown, exact = 148.4 + 2.718 + 1.649, float(np.exp([5, 1, 0.5]).sum())
    adds_up, is_right = (agree(152.780, total, decimals=3) for total in (shown, exact))
    return Verdict(
        f"the terms as shown add up to {shown:.3f}, e^5 + e^1 + e^0.5 is {exact:.3f}",
        "holds" if adds_up else ("depends" if is_right else "wrong"),
        "The sum is that of the exponentials "
        + ("as shown." if adds_up else "before rounding: e^5 is shown with one decimal, and 0.013 is lost.")
        if adds_up or is_right
        else "Neither the terms as shown nor the exponentials add up to it.",
        {"shown": shown, "exact": exact},
    )


@claim("soft.dk4", "S0", "dₖ = 4, q = [1,0,1,0], k = [0,1,1,1]: dot 1, scaled 0.5")
def _dk4(evidence: Evidence) -> Verdict:
    q, k = np.array([[1.0, 0, 1, 0]]), np.array([[0.0, 1, 1, 1]])
    statistics = attention(q, k, k).statistics
    without = attention(q, k, k, scale="none").statistics
    assert statistics is not None
    assert without is not None
    dot, scaled = float(without.max_logit[0]), float(statistics.max_logit[0])
    return Verdict(
        f"dot {dot:g}, scaled {scaled:g}",
        "holds" if (dot, scaled) == (1.0, 0.5) else "wrong",
        "The only key's logit, read off the row statistics.",
        {"dot": dot, "scaled": scaled},
    )


@claim(
    "soft.dk64",
    "S0",
    "scores [14,10,12]: [0.867, 0.016, 0.117] (sum 1 387 386); over 8: [0.419, 0.254, 0.326] (sum 13.727)",
)
def _dk64(evidence: Evidence) -> Verdict:
    scores = np.array([14.0, 10.0, 12.0])
    raw, raw_fits = _worked([0.867, 0.016, 0.117], [14, 10, 12])
    scaled, scaled_fits = _worked([0.419, 0.254, 0.326], [14 / 8, 10 / 8, 12 / 8])
    sums = float(np.exp(scores).sum()), float(np.exp(scores / 8).sum())
    sums_fit = agree(1_387_386, sums[0], decimals=0) and agree(13.727, sums[1], decimals=3)
    return Verdict(
        f"{row(raw)} (sum {sums[0]:,.0f}); over 8: {row(scaled)} (sum {sums[1]:.3f})",
        "holds" if raw_fits and scaled_fits and sums_fit else "wrong",
        "Computed digit by digit.",
        {"no_scaling": raw.tolist(), "scaled": scaled.tolist(), "sums": sums},
    )


@claim("soft.peak", "S3", "scores [8.5, −2.1, 7.9, …] give [0.99, 0.00, 0.01, …]")
def _peak(evidence: Evidence) -> Verdict:
    computed, fits = _worked([0.99, 0.00, 0.01], [8.5, -2.1, 7.9], decimals=2)
    ratio = float(computed[0] / computed[2])
    with_more = softmax(np.array([8.5, -2.1, 7.9, 3.0, -1.0, 8.0]))
    constant = math.isclose(ratio, float(with_more[0] / with_more[2]))
    return Verdict(
        f"alone {row(computed)}; first to third {ratio:.2f} to 1",
        "holds" if fits or not constant else "wrong",
        f"The ratio of the first to the third is e^0.6 = {ratio:.2f} whatever follows; 0.99 to 0.01 would be 99.",
        {"weights": computed.tolist(), "ratio": ratio},
    )


@claim("soft.scores8", "S3", "scores [9.2, −3.1, 8.8, −5.4, 1.2] over 8: [1.15, −0.39, 1.10, −0.68, 0.15]")
def _scores8(evidence: Evidence) -> Verdict:
    scaled = np.array([9.2, -3.1, 8.8, -5.4, 1.2]) / 8
    fits = agree([1.15, -0.39, 1.10, -0.68, 0.15], scaled, decimals=2)
    return Verdict(
        row(scaled, 4),
        "holds" if fits else "wrong",
        "Equal at the precision the source prints." if fits else "Not equal at the precision the source prints.",
        {"scaled": scaled.tolist()},
    )


@claim("soft.five", "S3", "scores [9.2, −3.1, 8.8, −5.4, 1.2] give [0.599, 0, 0.401, 0, 0]")
def _five(evidence: Evidence) -> Verdict:
    computed, fits = _worked([0.599, 0.0, 0.401, 0.0, 0.0], [9.2, -3.1, 8.8, -5.4, 1.2])
    return Verdict(
        row(computed),
        "holds" if fits else "wrong",
        "Equal at the precision the source prints."
        if fits
        else f"Largest difference {np.abs(computed - [0.599, 0, 0.401, 0, 0]).max():.4f}.",
        {"weights": computed.tolist()},
    )


@claim("soft.five8", "S3", "the same over 8 gives [0.31, 0.07, 0.30, 0.05, 0.12]")
def _five8(evidence: Evidence) -> Verdict:
    claimed = [0.31, 0.07, 0.30, 0.05, 0.12]
    computed, fits = _worked(claimed, [x / 8 for x in (9.2, -3.1, 8.8, -5.4, 1.2)], decimals=2)
    return Verdict(
        row(computed),
        "holds" if fits else "wrong",
        f"The weights are {row(computed, 2)}. The weights given sum to {sum(claimed):.2f}; weights must sum to 1.",
        {"weights": computed.tolist(), "claimed_sum": sum(claimed)},
    )


def _mean(quantity: str, d_k: int, n: int, policy: str, evidence: Evidence) -> float:
    """Return a mean over the rows that `sqrtdk explain` and `sqrtdk gradients` measure at this size."""
    sampled = sample_policies(d_k=d_k, n=n, **choose_effort(d_k, n)._asdict(), seed=evidence.seed)
    return sampled[policy].mean(quantity).value


def _count_rows(sizes: Iterable[tuple[int, int]]) -> str:
    """Return the range of rows that the sizes (dₖ, n) were measured on."""
    counts = [math.prod(choose_effort(d_k, n)) for d_k, n in sizes]
    return f"{min(counts)} to {max(counts)} rows each"


def _name_crossings(ns: Sequence[int]) -> str:
    """Return the first dₖ with E Σp² ≥ ½ without scaling, exact at each n, and its many-key limit."""
    exact = " and ".join(f"dₖ = {theory.concentration_crossing(n)} at n = {n}" for n in ns)
    limits = " and ".join(f"{theory.crossover_without_scaling(n).concentrated:.1f}" for n in ns)
    return f"{exact} (limits for many keys, 8 ln n: {limits})"


@claim("soft.onehot", "all", "without scaling, large dₖ makes the weights nearly one-hot")
def _onehot(evidence: Evidence) -> Verdict:
    table = {(d, n): _mean("sum_p2", d, n, "none", evidence) for n in (16, 1024) for d in (4, 64, 512)}
    grows = all(table[4, n] < table[64, n] < table[512, n] for n in (16, 1024))
    varies = table[64, 16] - table[64, 1024] > 0.02
    listed = ", ".join(f"dₖ {d}, n {n}: {value:.3f}" for (d, n), value in table.items())
    return Verdict(
        f"E Σp²: {listed} ({_count_rows(table)}, seed {evidence.seed}); E Σp² ≥ ½ from {_name_crossings((16, 1024))}",
        "depends" if grows and varies else ("holds" if grows else "wrong"),
        "Σp² is 1 for one-hot weights and ½ for two equal ones"
        + ("; it depends on n as well as on dₖ." if varies else "."),
        {
            "sum_p2": {f"{d},{n}": value for (d, n), value in table.items()},
            "half_from": {n: theory.concentration_crossing(n) for n in (16, 1024)},
        },
    )


@claim("soft.uniform", "S1", "dividing by dₖ makes the weights nearly uniform, 1/n each, and attention cannot focus")
def _uniform(evidence: Evidence) -> Verdict:
    n = 1024
    at = {d: _mean("entropy_ratio", d, n, "inverse", evidence) for d in (4, 64, 512)}
    uniform = at[64] > 0.99 and at[512] > 0.99
    rng = np.random.default_rng(evidence.seed)
    q, k = rng.standard_normal((2, 64, 64))
    _, default = scaled_dot_product_attention(q, k, k)
    _, grown = scaled_dot_product_attention(8.0 * q, k, k, scale=1 / 64)
    apart = float(np.abs(default - grown).max())
    return Verdict(
        f"entropy ratio at n = {n}: "
        + ", ".join(f"dₖ {d}: {ratio:.4f}" for d, ratio in at.items())
        + f"; with q grown √dₖ times the weights are those of 1/√dₖ (difference {write_number(apart, 2)})",
        ("depends" if apart < 1e-12 else "holds") if uniform else "wrong",
        f"{'Nearly' if uniform else 'Not nearly'} uniform at initialisation; but what it can express is the same, q "
        "only has to grow √dₖ times, so whether it fails to focus is a matter of learning.",
        {"entropy_ratio": at, "difference_after_growth": apart},
    )


def _round_to(x: Array, precision: str) -> Array:
    """Round float64 numbers to a precision, round half to even; bfloat16 by its bits, as NumPy has none."""
    if precision == "bfloat16":
        bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
        kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return kept.astype(np.uint32).view(np.float32).astype(np.float64)
    return x.astype(precision).astype(np.float64)


def _weights_in(precision: str, q: Array, k: Array, scale: float) -> Array:
    """Return attention weights with every intermediate rounded to a precision and products accumulated in float64."""
    scores = _round_to(_round_to(q, precision) @ _round_to(k, precision).T, precision)
    logits = _round_to(scores * scale, precision)
    e = _round_to(np.exp(_round_to(logits - logits.max(axis=-1, keepdims=True), precision)), precision)
    return _round_to(e / e.sum(axis=-1, keepdims=True), precision)


_WIDTHS, _KEYS = (64, 512, 4096), 64
_POWERS = {"none": 0.0, "sqrt": -0.5, "inverse": -1.0}


class _RoundingErrors(NamedTuple):
    """Errors of weights in a precision: the largest relative error of p, and the root mean square error of p − 1/n."""

    of_weights: float
    of_signal: float


def _measure_rounding(precision: str, d_k: int, rng: np.random.Generator) -> dict[str, _RoundingErrors]:
    """Return the errors under each scaling, on the same q and k."""
    q, k = (_round_to(x, precision) for x in rng.standard_normal((2, _KEYS, d_k)))
    errors = {}
    for name, power in _POWERS.items():
        exact, rounded = softmax(q @ k.T * d_k**power), _weights_in(precision, q, k, d_k**power)
        kept = exact > 1e-3 * exact.max(axis=-1, keepdims=True)
        errors[name] = _RoundingErrors(
            float((np.abs(rounded - exact) / exact)[kept].max()),
            float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact - 1 / _KEYS)),
        )
    return errors


@claim("soft.unstable", "S1", "dividing by dₖ could be numerically unstable in floating point")
def _unstable(evidence: Evidence) -> Verdict:
    rng = np.random.default_rng(evidence.seed)
    precisions = ("float32", "bfloat16", "float16")
    errors = {(name, d): _measure_rounding(name, d, rng) for name in precisions for d in _WIDTHS}
    finite = all(math.isfinite(error) for by_scale in errors.values() for one in by_scale.values() for error in one)
    calmest = all(min(by, key=lambda name: by[name].of_weights) == "inverse" for by in errors.values())
    worst = all(max(by, key=lambda name: by[name].of_signal) == "inverse" for by in errors.values())
    listed = "; ".join(
        f"{precision} "
        + ", ".join(
            f"{name_policy(name)} {' / '.join(write_number(errors[precision, d][name].of_signal, 2) for d in _WIDTHS)}"
            for name in _POWERS
        )
        for precision in precisions
    )
    largest = {
        precision: {name: max(errors[precision, d][name].of_weights for d in _WIDTHS) for name in _POWERS}
        for precision in precisions
    }
    relative = "; ".join(
        f"{precision} " + ", ".join(f"{name_policy(name)} {write_number(error, 2)}" for name, error in by.items())
        for precision, by in largest.items()
    )
    least = "the smallest" if calmest else "not always the smallest"
    most = "the largest" if worst else "not always the largest"
    verdicts: dict[tuple[bool, bool], VerdictName] = {(True, False): "wrong", (False, True): "holds"}
    return Verdict(
        f"rounding error relative to p − 1/n, n {_KEYS}, dₖ {' / '.join(map(str, _WIDTHS))}: {listed}; largest error "
        f"relative to p: {relative}; seed {evidence.seed}; all finite: {finite}",
        verdicts.get((calmest, worst), "depends") if finite else "depends",
        f"Relative to p, dividing by dₖ has {least} error of the three in all sizes and precisions. Relative to "
        f"p − 1/n, what attention adds to a plain average, it has {most}: the larger dₖ, the nearer the weights come "
        "to 1/n, and rounding keeps the digits of p, not those of the difference.",
        {
            "relative_error": largest,
            "finite": finite,
            "errors": {f"{name},{d}": {scale: one._asdict() for scale, one in by.items()}
                       for (name, d), by in errors.items()},
        },
    )  # fmt: skip


def _gain(d_k: int, n: int, evidence: Evidence) -> float:
    """Return effective keys with 1/√dₖ over those with no scaling, by which `sqrtdk explain` judges importance."""
    sqrt, none = (_mean("effective_keys", d_k, n, policy, evidence) for policy in ("sqrt", "none"))
    return sqrt / none


@claim("soft.small", "S0, S3", "at small dₖ scaling matters little, at large dₖ it is critical")
def _small(evidence: Evidence) -> Verdict:
    ns, widths = (16, 1024), (1, 4, 64, 512)
    sizes = [(d, n) for n in ns for d in widths]
    loss = {
        (d, n): _mean("entropy_ratio", d, n, "sqrt", evidence) - _mean("entropy_ratio", d, n, "none", evidence)
        for d, n in sizes
    }
    gains = {at: _gain(*at, evidence) for at in sizes}
    matters = {at: name_importance(gain) for at, gain in gains.items()}
    somewhat_from, much_from = (
        {n: next((d for d in range(1, 65) if name_importance(_gain(d, n, evidence)) in names), math.inf) for n in ns}
        for names in (("somewhat", "much"), ("much",))
    )
    large = all(matters[512, n] == "much" for n in ns)
    small = {matters[4, n] for n in ns}
    verdict: VerdictName = "depends"
    if not large or small == {"much"}:
        verdict = "wrong"
    elif small == {"little"}:
        verdict = "holds"
    listed = ", ".join(f"dₖ {d}, n {n}: {write_number(gains[d, n], 3)} ({matters[d, n]})" for d, n in sizes)
    return Verdict(
        f"effective keys with 1/√dₖ over those with no scaling: {listed} ({_count_rows(sizes)}, "
        f"seed {evidence.seed}); E Σp² ≥ ½ from {_name_crossings(ns)}",
        verdict,
        f"Scaling matters {'much' if large else 'not always much'} at dₖ = 512; what is small depends on n: it matters "
        + " and ".join(f"somewhat from dₖ = {somewhat_from[n]}, much from {much_from[n]} at n = {n}" for n in ns)
        + " (1.1 and 2 times the keys).",
        {
            "entropy_ratio_lost": {f"{d},{n}": value for (d, n), value in loss.items()},
            "effective_keys_ratio": {f"{d},{n}": value for (d, n), value in gains.items()},
            "matters": {f"{d},{n}": name for (d, n), name in matters.items()},
            "matters_from": much_from,
            "half_from": {n: theory.concentration_crossing(n) for n in ns},
        },
    )
