"""Claims about the operation itself."""

from __future__ import annotations

import numpy as np

from sqrtdk import attention, scaled_dot_product_attention, softmax
from sqrtdk.claims.claim import Finding, claim
from sqrtdk.claims.evidence import Evidence


@claim(
    "op.formula",
    "all",
    "Attention(Q,K,V) = softmax(QKᵀ/√dₖ)·V, with weights on request whose rows sum to 1",
)
def _formula(evidence: Evidence) -> Finding:
    rng = np.random.default_rng(evidence.seed)
    worst_sum, worst_output = 0.0, 0.0
    for queries, keys, d_k in ((1, 1, 1), (5, 7, 4), (16, 31, 64), (3, 64, 512)):
        q, k, v = rng.standard_normal((queries, d_k)), rng.standard_normal((keys, d_k)), rng.standard_normal((keys, 3))
        output, weights = scaled_dot_product_attention(q, k, v)
        # Term by term, without the stable softmax: scores stay far from overflow here.
        e = np.exp(np.einsum("ld,sd->ls", q, k) / d_k**0.5)
        worst_output = max(worst_output, np.abs(output - np.einsum("ls,sv->lv", e, v) / e.sum(1)[:, None]).max())
        worst_output = max(worst_output, np.abs(output - attention(q, k, v).output).max())
        worst_sum = max(worst_sum, np.abs(weights.sum(axis=-1) - 1).max())
    return Finding(
        f"largest difference to the sum written out {worst_output:.0e}; "
        f"rows of weights sum to 1 within {worst_sum:.0e}",
        "holds" if max(worst_output, worst_sum) < 1e-12 else "wrong",
        "Four shapes up to dₖ = 512 computed twice, by `scaled_dot_product_attention` and term by term.",
        {"output_difference": worst_output, "row_sum_difference": worst_sum},
    )


@claim("op.stable", "S3", "softmax subtracts the row maximum first: no overflow for any finite score")
def _stable(evidence: Evidence) -> Finding:
    finite = True
    for dtype in (np.float32, np.float64):
        top = float(np.finfo(dtype).max)
        for scores in ([top, top], [top, -top], [-top, -top], [88.8, 0.0], [710.0, 709.0], [1e30, 1e30 * (1 - 1e-7)]):
            p = softmax(np.asarray(scores, dtype=dtype))
            finite &= bool(np.isfinite(p).all() and abs(p.sum() - 1) < 1e-6)
    with np.errstate(over="ignore", invalid="ignore"):
        naive = np.exp(np.float32(89.0)) / np.exp(np.float32(89.0))
    return Finding(
        f"finite and summing to 1 up to ±{np.finfo(np.float64).max:.2g}; "
        f"without the subtraction softmax([89]) is {naive}",
        "holds" if finite and not np.isfinite(naive) else "wrong",
        "exp overflows float32 above 88.7; after subtracting the maximum every exponent is ≤ 0.",
        {"all_finite": finite, "naive_is_finite": bool(np.isfinite(naive))},
    )


@claim("op.always", "S3", "the division is negligible in cost, so always do it")
def _always(evidence: Evidence) -> Finding:
    shares = {}
    for d in (4, 16, 64, 128):
        products = 2 * 2 * d  # multiplications and additions per score for QKᵀ and for P·V with dᵥ = dₖ
        shares[d] = {"on_scores": 1 / products, "on_query": d / (1024 * products)}
    at_64 = shares[64]
    return Finding(
        f"of the multiplications and additions at dₖ = 64: {at_64['on_scores']:.2%} applied to the scores, "
        f"{at_64['on_query']:.4%} applied to q (1024 keys); at dₖ = 4: {shares[4]['on_scores']:.1%}",
        "holds" if at_64["on_scores"] < 0.01 else "wrong",
        "One multiplication per score stands against 4·dₖ for the two products, and none per score if q carries it.",
        {"shares": shares},
    )
