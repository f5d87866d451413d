"""Claims about the operation itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from sqrtdk import attention, scaled_dot_product_attention, softmax
from sqrtdk.claims.claim import Verdict, claim, row
from sqrtdk.claims.evidence import Evidence
from sqrtdk.wording.numbers import write_number


@claim(
    "op.formula",
    "all",
    "Attention(Q,K,V) = softmax(QKᵀ/√dₖ)·V, with weights on request whose rows sum to 1",
)
def _formula(evidence: Evidence) -> Verdict:
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
    return Verdict(
        f"largest difference to the sum written out {write_number(worst_output, 2)}; rows of weights sum to 1 within "
        f"{write_number(worst_sum, 2)}",
        "holds" if max(worst_output, worst_sum) < 1e-12 else "wrong",
        "Four shapes up to dₖ = 512 computed twice, by `scaled_dot_product_attention` and term by term.",
        {"output_difference": worst_output, "row_sum_difference": worst_sum},
    )


# The section's two samples in its obvious form, written anew: the first calls a softmax that the section defines only
# later and under another name, the second uses NumPy without importing it.
_SAMPLES = {
    "attention": """
import numpy as np

def run(Q, K, V):
    scores = Q @ K.T / np.sqrt(Q.shape[-1])
    weights = softmax(scores)
    return weights @ V, weights
""",
    "stable softmax": """
def run(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)
""",
}


def _run_sample(name: str, *arguments: object, **names: object) -> Any:
    """Run one of the code samples in a namespace with the given names and Python's own."""
    namespace: dict[str, Any] = dict(names)
    exec(_SAMPLES[name], namespace)
    return namespace["run"](*arguments)


@claim("op.code", "S3", "both code samples compute what the section describes")
def _code(evidence: Evidence) -> Verdict:
    q, k, v = np.random.default_rng(evidence.seed).standard_normal((3, 16, 64))
    missing = {}
    for name, arguments in {"attention": (q, k, v), "stable softmax": (q,)}.items():
        try:
            _run_sample(name, *arguments)
        except NameError as error:
            missing[name] = str(error.name)
    expected = scaled_dot_product_attention(q, k, v)
    as_meant = _run_sample("attention", q, k, v, softmax=softmax)
    apart = max(float(np.abs(one - other).max()) for one, other in zip(as_meant, expected, strict=True))
    apart = max(apart, float(np.abs(_run_sample("stable softmax", q, np=np) - softmax(q)).max()))
    right = apart < 1e-12
    printed = ", ".join(f"{name} raises NameError ({lacking} is not defined)" for name, lacking in missing.items())
    return Verdict(
        f"as printed: {printed or 'both run'}; as meant: within {write_number(apart, 2)} of "
        "`scaled_dot_product_attention` and `softmax`",
        ("depends" if missing else "holds") if right else "wrong",
        (f"The samples run once {' and '.join(missing.values())} are defined." if missing else "The samples run.")
        + " They are rewritten here in their obvious form, without the names that the section leaves undefined.",
        {"missing": missing, "difference_as_meant": apart},
    )


@claim("op.stable", "S3", "softmax subtracts the row maximum first: no overflow for any finite score")
def _stable(evidence: Evidence) -> Verdict:
    finite = True
    for dtype in (np.float32, np.float64):
        top = float(np.finfo(dtype).max)
        for scores in ([top, top], [top, -top], [-top, -top], [88.8, 0.0], [710.0, 709.0], [1e30, 1e30 * (1 - 1e-7)]):
            p = softmax(np.asarray(scores, dtype=dtype))
            finite &= bool(np.isfinite(p).all() and abs(p.sum() - 1) < 1e-6)
    with np.errstate(over="ignore", invalid="ignore"):
        naive = np.exp(np.float32(89.0)) / np.exp(np.float32(89.0))
    return Verdict(
        f"finite and summing to 1 up to ±{write_number(np.finfo(np.float64).max, 2)}; without the subtraction "
        f"softmax([89]) is {naive}",
        "holds" if finite and not np.isfinite(naive) else "wrong",
        "exp overflows float32 above 88.7; after subtracting the maximum every exponent is ≤ 0.",
        {"all_finite": finite, "naive_is_finite": bool(np.isfinite(naive))},
    )


@claim("op.same", "S3", "subtracting the maximum gives the same result")
def _same(evidence: Evidence) -> Verdict:
    rng = np.random.default_rng(evidence.seed)
    worst = 0.0
    for size in (1.0, 10.0, 50.0):
        x = size * rng.standard_normal((256, 32))
        e = np.exp(x)  # about e^±250 at most: neither overflow nor underflow, so that both forms can be compared
        plain = e / e.sum(axis=-1, keepdims=True)
        worst = max(worst, float((np.abs(softmax(x) - plain) / plain).max()))
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(np.array([1000.0, 999.0]))
        beyond = e / e.sum()
    stable = softmax(np.array([1000.0, 999.0]))
    # exp turns the rounding of an exponent of size x into a relative error of x·2⁻⁵³, here of a few hundred of them.
    return Verdict(
        f"largest relative difference to exp(x)/Σexp(x) {write_number(worst, 2)} where that is finite; at [1000, 999] "
        f"it is [{beyond[0]:g}, {beyond[1]:g}], with the subtraction {row(stable)}",
        "holds" if worst < 1e-12 else "wrong",
        "e^(x−m) = e^x·e^−m, and e^−m cancels: equal but for the rounding of float64, and finite where the plain form "
        "is not.",
        {"relative_difference": worst},
    )


@claim("op.always", "S3", "the division is negligible in cost, so always do it")
def _always(evidence: Evidence) -> Verdict:
    shares = {}
    for d in (4, 16, 64, 128):
        products = 2 * 2 * d  # multiplications and additions per score for QKᵀ and for P·V with dᵥ = dₖ
        shares[d] = {"on_scores": 1 / products, "on_query": d / (1024 * products)}
    at_64 = shares[64]
    return Verdict(
        f"of the multiplications and additions at dₖ = 64: {at_64['on_scores']:.2%} applied to the scores, "
        f"{at_64['on_query']:.4%} applied to q (1024 keys); at dₖ = 4: {shares[4]['on_scores']:.1%}",
        "holds" if at_64["on_scores"] < 0.01 else "wrong",
        "The scale takes one multiplication per score, the two products 4·dₖ. Applied to q, it takes none per score.",
        {"shares": shares},
    )


@claim("op.instability", "S3", "always scale: it prevents instability")
def _instability(evidence: Evidence) -> Verdict:
    d_k, n, growth = 64, 1024, 3.0
    rng = np.random.default_rng(evidence.seed)
    q, k = rng.standard_normal((64, d_k)), rng.standard_normal((n, d_k))

    def measure(size: float, scale: str) -> float:
        statistics = attention(size * q, size * k, k, scale=scale).statistics
        assert statistics is not None
        return float(statistics.sum_p2.mean())

    no_scaling, start, grown = measure(1.0, "none"), measure(1.0, "sqrt"), measure(growth, "sqrt")
    smaller = measure(d_k**-0.25, "none")
    entry = np.float16(32.0)
    with np.errstate(over="ignore"):
        after = (entry * entry * np.float16(d_k)) / np.float16(d_k**0.5)
        before = (entry / np.float16(d_k**0.5)) * entry * np.float16(d_k)
    prevents = start < no_scaling
    always = grown < no_scaling / 2 and bool(np.isfinite(after))
    return Verdict(
        f"mean Σp² at dₖ {d_k}, n {n}: {write_number(no_scaling, 2)} with no scaling, {write_number(start, 2)} with "
        f"1/√dₖ, {write_number(grown, 2)} with 1/√dₖ once q and k are {growth:g} times as long; float16 with entries "
        f"of {entry:g}: q·k/√dₖ is {after:g}, (q/√dₖ)·k is {before:g}",
        ("holds" if always else "depends") if prevents else "wrong",
        f"1/√dₖ {'prevents' if prevents else 'does not prevent'} saturation at the start. Vectors that grow in "
        f"training {'do not undo it' if grown < no_scaling / 2 else 'undo it'}, and a product that is divided after "
        f"it was rounded to float16 is {'finite' if np.isfinite(after) else 'infinite'}. With no scaling but a "
        f"rescaled init (q and k × dₖ^−¼) Σp² is {write_number(smaller, 2)} as well.",
        {"sum_p2": {"none": no_scaling, "sqrt": start, "sqrt_grown": grown, "none_smaller_weights": smaller},
         "float16": {"divided_after": float(after) if np.isfinite(after) else None, "divided_before": float(before)}},
    )  # fmt: skip
