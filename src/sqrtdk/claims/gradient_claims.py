"""Claims about gradients through the softmax."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sqrtdk import attention, softmax, theory
from sqrtdk.claims.claim import Verdict, VerdictName, agree, claim, row, show_interval
from sqrtdk.claims.evidence import Evidence
from sqrtdk.exercises import gradients
from sqrtdk.exercises.estimates import Estimate, estimate_mean
from sqrtdk.exercises.gaussian_rows import choose_effort, policy_factors, sample_attention, sample_policies
from sqrtdk.wording.numbers import write_number, write_percent


@claim("grad.jacobian", "S2, S3", "∂sᵢ/∂xⱼ = sᵢ(δᵢⱼ − sⱼ): diagonal sᵢ(1−sᵢ), off-diagonal −sᵢsⱼ")
def _jacobian(evidence: Evidence) -> Verdict:
    rng = np.random.default_rng(evidence.seed)
    worst, step = 0.0, 1e-6
    for n in (2, 5, 16):
        x = 2.0 * rng.standard_normal(n)
        shifts = step * np.eye(n)
        differences = (softmax(x + shifts) - softmax(x - shifts)).T / (2 * step)
        worst = max(worst, float(np.abs(differences - theory.softmax_jacobian(softmax(x))).max()))
    return Verdict(
        f"largest difference to central differences {write_number(worst, 2)}",
        "holds" if worst < 1e-8 else "wrong",
        "Three random rows of 2, 5 and 16 logits, differentiated numerically with step 1e-6.",
        {"difference": worst},
    )


@claim("grad.healthy", "S3", "s = [0.3, 0.3, 0.2, 0.2] → diagonal [0.21, 0.21, 0.16, 0.16]")
def _healthy(evidence: Evidence) -> Verdict:
    diagonal = np.diag(theory.softmax_jacobian([0.3, 0.3, 0.2, 0.2]))
    return Verdict(
        row(diagonal, 2),
        "holds" if agree([0.21, 0.21, 0.16, 0.16], diagonal, decimals=2) else "wrong",
        "sᵢ(1 − sᵢ).",
        {"diagonal": diagonal.tolist()},
    )


@claim("grad.vanish", "all", "s → one-hot → every Jacobian entry → 0, so without scaling gradients vanish")
def _vanish(evidence: Evidence) -> Verdict:
    cells = {
        (cell["d_k"], cell["n"], cell["scale"]): cell
        for cell in gradients(d_ks=(64, 512), ns=(16, 1024), seed=evidence.seed).tables["vanish"]
    }
    sizes = [(d, n) for d in (64, 512) for n in (16, 1024)]
    trace_falls = all(
        cells[d, n, "none"]["jacobian_trace_mean"] < cells[d, n, "sqrt"]["jacobian_trace_mean"] for d, n in sizes
    )
    larger = [at for at in sizes if cells[*at, "none"]["grad_q_mean"] > cells[*at, "sqrt"]["grad_q_mean"]]
    uneven = all(cells[*at, "none"]["top_share"] > cells[*at, "sqrt"]["top_share"] for at in sizes)
    wide = [cells[64, 1024, name]["grad_q_mean"] for name in ("none", "sqrt", "inverse")]
    narrow = [cells[512, 16, name] for name in ("none", "sqrt", "inverse")]
    lowest = "smallest" if wide[2] == min(wide) else "not the smallest"
    return Verdict(
        f"mean ‖∂q‖ with no scaling / 1/√dₖ / 1/dₖ at dₖ 64, n 1024: {write_number(wide[0], 3)} / "
        f"{write_number(wide[1], 2)} / {write_number(wide[2], 2)}; at dₖ 512, n 16 median "
        f"{' / '.join(write_number(c['grad_q_median'], 2) for c in narrow)}, 5th percentile "
        f"{' / '.join(write_number(c['grad_q_p5'], 1) for c in narrow)} ({cells[64, 1024, 'none']['rows']} and "
        f"{narrow[0]['rows']} rows, seed {evidence.seed})",
        "depends" if trace_falls and larger else ("holds" if trace_falls else "wrong"),
        f"The Jacobian trace 1 − Σp² {'shrinks as they say' if trace_falls else 'does not always shrink'}, but the "
        f"mean gradient of q is larger without scaling in {len(larger)} of {len(sizes)} sizes and 1/dₖ has the "
        f"{lowest}; "
        f"without scaling gradients become {'uneven' if uneven else 'not more uneven'}: at dₖ 512, n 16 a twentieth of "
        f"the rows holds {write_percent(narrow[0]['top_share'])} of their square, with 1/√dₖ "
        f"{write_percent(narrow[1]['top_share'])}.",
        {f"{d},{n},{name}": {key: cell[key] for key in ("jacobian_trace_mean", "jacobian_norm_mean", "grad_q_mean",
                                                        "grad_q_median", "grad_q_p5", "top_share")}
         for (d, n, name), cell in cells.items()},
    )  # fmt: skip


_SIZES = [(d, n) for d in (64, 512) for n in (16, 1024)]
_SAMPLES = 16


def _measure_elements(d_k: int, n: int, seed: int) -> tuple[Estimate, Estimate]:
    """Return the shares of logits and rows with no scaling whose gradients are below 1% of the median with 1/√dₖ."""
    effort = choose_effort(d_k, n)
    none, sqrt, _ = policy_factors(d_k)
    elements: dict[float, list[npt.NDArray[np.float64]]] = {none: [], sqrt: []}
    for q, k, v, grad_output in islice(sample_attention(d_k=d_k, n=n, queries=effort.queries, seed=seed), _SAMPLES):
        grad_weights = grad_output @ v.T
        for factor, collected in elements.items():
            p = attention(q, k, v, scale=factor, weights=True).weights
            assert p is not None
            collected.append(np.abs(p * (grad_weights - (p * grad_weights).sum(axis=-1, keepdims=True))))
    shares = (np.stack(elements[none]) < np.median(elements[sqrt]) / 100).mean(axis=(1, 2))
    rows = sample_policies(d_k=d_k, n=n, **effort._asdict(), seed=seed)
    dead = rows["none"].grad_q < np.median(rows["sqrt"].grad_q) / 100
    return estimate_mean(shares), estimate_mean(dead.mean(axis=1))


@claim("grad.most", "S1", "without scaling, gradients vanish for most elements")
def _most(evidence: Evidence) -> Verdict:
    measured = {at: _measure_elements(*at, evidence.seed) for at in _SIZES}
    most = [at for at, (elements, _) in measured.items() if elements.low > 0.5]
    few = [at for at, (elements, _) in measured.items() if elements.high < 0.5]
    verdict: VerdictName = "depends"
    if len(most) == len(_SIZES):
        verdict = "holds"
    elif len(few) == len(_SIZES):
        verdict = "wrong"
    dead = [rows.value for _, rows in measured.values()]
    return Verdict(
        "share of logits whose gradient is below a hundredth of the median with 1/√dₖ: "
        + ", ".join(f"dₖ {d}, n {n}: {show_interval(elements)}" for (d, n), (elements, _) in measured.items())
        + f" (95% over {_SAMPLES} samples of q, k, v, seed {evidence.seed}); of queries: "
        + ", ".join(f"{share:.2f}" for share in dead),
        verdict,
        f"Gradients vanish for most logits in {len(most)} of {len(_SIZES)} sizes, as few keys hold the weight. The "
        f"gradient of a query is a sum over all keys, and is that small in "
        f"{write_percent(min(dead))} to {write_percent(max(dead))} of the "
        "rows.",
        {f"{d},{n}": {"elements": elements.value, "queries": rows.value}
         for (d, n), (elements, rows) in measured.items()},
    )  # fmt: skip


class _Extremes(NamedTuple):
    """Shares of rows whose gradient is far larger, far smaller, or either, than with 1/√dₖ."""

    large: Estimate
    small: Estimate
    either: Estimate


@claim("grad.explode", "S1", "without scaling there are either exploding or vanishing gradients")
def _explode(evidence: Evidence) -> Verdict:
    shares, sizes = {}, {}
    for d, n in _SIZES:
        rows = sample_policies(d_k=d, n=n, **choose_effort(d, n)._asdict(), seed=evidence.seed)
        gradient, usual = rows["none"].grad_q, float(np.median(rows["sqrt"].grad_q))
        large, small = gradient > 10 * usual, gradient < usual / 10
        shares[d, n] = _Extremes(*(estimate_mean(one.mean(axis=1)) for one in (large, small, large | small)))
        # The gradient at the output has dₖ standard normal entries, so that its length is about √dₖ.
        sizes[d, n] = float(gradient.mean()) / d**0.5, float(np.sqrt((gradient**2).mean())) / d**0.5
    limit = theory.gradients_without_scaling(512, 16)
    most = [at for at, share in shares.items() if share.either.low > 0.5]
    both = [at for at, share in shares.items() if share.large.low > 0 and share.small.low > 0]
    verdict: VerdictName = "depends"
    if len(most) == len(_SIZES):
        verdict = "holds"
    elif not both and not most:
        verdict = "wrong"
    return Verdict(
        "share of rows with ‖∂q‖ above ten times and below a tenth of the median with 1/√dₖ: "
        + ", ".join(f"dₖ {d}, n {n}: {one.large.value:.2f} and {one.small.value:.2f}" for (d, n), one in shares.items())
        + f" (seed {evidence.seed}); at n 16 the mean ‖∂q‖/‖∂o‖ is {sizes[64, 16][0]:.2f} at dₖ 64 and "
        f"{sizes[512, 16][0]:.2f} at dₖ 512 (limit for large dₖ {limit.mean:.2f}), its root mean square "
        f"{sizes[64, 16][1]:.1f} and {sizes[512, 16][1]:.1f} (limit {limit.root_mean_square:.1f} at dₖ 512)",
        verdict,
        f"Both at once in {len(both)} of {len(_SIZES)} sizes: some rows of one layer get far more and others far less "
        f"than with 1/√dₖ. Rows of one or the other kind are more than half in {len(most)} of {len(_SIZES)} sizes.",
        {
            "shares": {f"{d},{n}": one._asdict() for (d, n), one in shares.items()},
            "per_output_gradient": {f"{d},{n}": {"mean": mean, "rms": rms} for (d, n), (mean, rms) in sizes.items()},
        },
    )
