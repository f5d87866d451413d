"""Claims about papers and published models: quotes, reasons, widths of heads."""

from __future__ import annotations

from collections import Counter

from sqrtdk.claims.claim import Verdict, claim, covers, estimate_variance, show_interval
from sqrtdk.claims.evidence import Evidence
from sqrtdk.exercises.variance import sample_dot_products
from sqrtdk.records.families import load_zoo
from sqrtdk.wording.numbers import write_percent

_PAPER = "Vaswani et al. 2017, section 3.2.1"
# The power of dₖ that multiplies the dot products in the paper ("we scale the dot products by 1/√dₖ").
_POWER_IN_PAPER = -0.5
_PAIRS = 20_000


@claim("scale.quoted", "S2", "the paper: “we scale the dot products by √dₖ”")
def _quoted(evidence: Evidence) -> Verdict:
    d_k, quoted = 64, 0.5
    dots = sample_dot_products(d_k, _PAIRS, evidence.seed)
    as_quoted, as_printed = (estimate_variance(dots * d_k**power) for power in (quoted, _POWER_IN_PAPER))
    return Verdict(
        f"the paper has “1/√dₖ” ({_PAPER}); at dₖ {d_k} a factor √dₖ would give q·k the variance "
        f"{show_interval(as_quoted)}, 1/√dₖ gives {show_interval(as_printed)} (95%, {_PAIRS} samples, "
        f"seed {evidence.seed})",
        "holds" if quoted == _POWER_IN_PAPER else "wrong",
        "The quote has lost the “1/”: to scale by √dₖ is to multiply, which makes scores larger; the formula of the "
        "same source divides.",
        {"variance_as_quoted": as_quoted.value, "variance_as_in_the_paper": as_printed.value},
    )


@claim("scale.reason", "S0", "the authors of the paper chose √dₖ for exactly this reason: the variance of q·k is dₖ")
def _reason(evidence: Evidence) -> Verdict:
    d_k = 64
    variance = estimate_variance(sample_dot_products(d_k, _PAIRS, evidence.seed))
    fits = covers(variance, d_k)
    return Verdict(
        f"the paper gives small gradients of the softmax as the reason and opens it with “We suspect” ({_PAPER}); its "
        f"footnote 4 has the variance, sampled at dₖ {d_k} as {show_interval(variance)} (95%, {_PAIRS} samples, "
        f"seed {evidence.seed})",
        "depends" if fits else "wrong",
        "The paper names the variance to illustrate why products grow, and offers the reason as a suspicion that it "
        "does not test; “exactly” is the source's own word."
        if fits
        else "The variance is not dₖ.",
        {"variance": variance.value, "interval": [variance.low, variance.high]},
    )


@claim("scale.widths", "S0", "in real models dₖ is 64, 128, or even larger")
def _widths(evidence: Evidence) -> Verdict:
    record = load_zoo()
    widths = Counter(row["d_k"] for row in record.tables["families"] if row["d_k"] is not None)
    known = widths.total()
    smaller = {d_k: times for d_k, times in sorted(widths.items()) if d_k < 64}
    below = sum(smaller.values())
    larger = sum(times for d_k, times in widths.items() if d_k > 128)
    common = [d_k for d_k, _ in widths.most_common(2)]
    return Verdict(
        f"of {known} families of the transformers library {record.versions['transformers']} whose dₖ is known, at the "
        f"default of each: 64 in {widths[64]}, 128 in {widths[128]}, between them in "
        f"{known - widths[64] - widths[128] - larger - below}, above 128 in {larger}, below 64 in {below}",
        ("depends" if below else "holds") if 2 * below < known else "wrong",
        (f"{write_percent((known - below) / known)} have 64 or more" if below else "All have 64 or more")
        + f", and the two most common are {' and '.join(map(str, sorted(common)))}"
        + (f"; {below} have less, down to {min(smaller)}." if below else ".")
        + " Families of a library are counted here, not models in use.",
        {"families": {str(d_k): times for d_k, times in sorted(widths.items())}, "known": known, "below_64": below},
    )


@claim("scale.mentioned", "S3", "the scaling is rarely mentioned in papers")
def _mentioned(evidence: Evidence) -> Verdict:
    return Verdict(
        f"not computable here; the paper that introduced it gives it a formula, a paragraph and a footnote ({_PAPER})",
        "undecided",
        "Deciding it takes a count over a sample of papers and a bound for “rarely”; neither is at hand, and no "
        "computation stands in for them.",
    )
