"""Claims about gradients through the softmax."""

from __future__ import annotations

import numpy as np

from sqrtdk import softmax, theory
from sqrtdk.claims.claim import Finding, agree, claim, row
from sqrtdk.claims.evidence import Evidence
from sqrtdk.exercises import gradients


@claim("grad.jacobian", "S2, S3", "∂sᵢ/∂xⱼ = sᵢ(δᵢⱼ − sⱼ): diagonal sᵢ(1−sᵢ), off-diagonal −sᵢsⱼ")
def _jacobian(evidence: Evidence) -> Finding:
    rng = np.random.default_rng(evidence.seed)
    worst, step = 0.0, 1e-6
    for n in (2, 5, 16):
        x = 2.0 * rng.standard_normal(n)
        shifts = step * np.eye(n)
        differences = (softmax(x + shifts) - softmax(x - shifts)).T / (2 * step)
        worst = max(worst, float(np.abs(differences - theory.softmax_jacobian(softmax(x))).max()))
    return Finding(
        f"largest difference to central differences {worst:.0e}",
        "holds" if worst < 1e-8 else "wrong",
        "Three random rows of 2, 5 and 16 logits, differentiated numerically with step 1e-6.",
        {"difference": worst},
    )


@claim("grad.healthy", "S3", "s = [0.3, 0.3, 0.2, 0.2] → diagonal [0.21, 0.21, 0.16, 0.16]")
def _healthy(evidence: Evidence) -> Finding:
    diagonal = np.diag(theory.softmax_jacobian([0.3, 0.3, 0.2, 0.2]))
    return Finding(
        row(diagonal, 2),
        "holds" if agree([0.21, 0.21, 0.16, 0.16], diagonal, decimals=2) else "wrong",
        "sᵢ(1 − sᵢ).",
        {"diagonal": diagonal.tolist()},
    )


@claim("grad.vanish", "all", "s → one-hot → every Jacobian entry → 0, so without scaling gradients vanish")
def _vanish(evidence: Evidence) -> Finding:
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
    return Finding(
        f"mean ‖∂q‖ for none/√dₖ/dₖ at dₖ 64, n 1024: {wide[0]:.3g} / {wide[1]:.2g} / {wide[2]:.2g}; at dₖ 512, n 16 "
        f"median {' / '.join(format(c['grad_q_median'], '.2g') for c in narrow)}, 5th percentile "
        f"{' / '.join(format(c['grad_q_p5'], '.1g') for c in narrow)} "
        f"({cells[64, 1024, 'none']['rows']} and {narrow[0]['rows']} rows, seed {evidence.seed})",
        "depends" if trace_falls and larger else ("holds" if trace_falls else "wrong"),
        f"The diagonal (1 − Σp²) {'shrinks as they say' if trace_falls else 'does not always shrink'}, but the mean "
        "gradient of q is larger without scaling in "
        f"{len(larger)} of {len(sizes)} sizes and 1/dₖ has the {lowest}; "
        f"unscaled gradients become {'uneven' if uneven else 'not more uneven'}: at dₖ 512, n 16 a twentieth of the "
        f"rows holds {narrow[0]['top_share']:.0%} of their square, with 1/√dₖ {narrow[1]['top_share']:.0%}.",
        {f"{d},{n},{name}": {key: cell[key] for key in ("jacobian_trace_mean", "jacobian_norm_mean", "grad_q_mean",
                                                        "grad_q_median", "grad_q_p5", "top_share")}
         for (d, n, name), cell in cells.items()},
    )  # fmt: skip
