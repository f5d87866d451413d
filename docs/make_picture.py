"""Draw docs/images/scale.png, the picture of the README, and docs/images/theory.png, that of the theory page."""

import math
from pathlib import Path

import numpy as np

from sqrtdk import attention_gradients, softmax, theory
from sqrtdk.exercises.gaussian_rows import POLICIES, choose_effort, policy_factors, sample_policies
from sqrtdk.report.files import write_whole
from sqrtdk.report.matplotlib_renderer import render
from sqrtdk.report.palette import policy_colour
from sqrtdk.report.panels import Axis, Figure, Line, Panel, Points, ReferenceLine, floats, name_ticks
from sqrtdk.setting_names import name_policy

IMAGES = Path(__file__).parent / "images"
KEYS, FEW_KEYS, SEED = 1024, 16, 0
BLUE, ORANGE, GREY = "#0b5fa5", "#c24f0a", "#6b7280"
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def plan_scale():
    """Plan the entropy ratio over dₖ: lines are exact averages, marks are measured, with their 95% intervals."""
    expected = {d_k: [theory.expected_rows(s, d_k, KEYS).entropy_ratio for s in policy_factors(d_k)] for d_k in SIZES}
    measured = {d_k: sample_policies(d_k=d_k, n=KEYS, seed=SEED, **choose_effort(d_k, KEYS)._asdict()) for d_k in SIZES}
    series = []
    for at, policy in enumerate(POLICIES):
        colour, label = policy_colour(policy), name_policy(policy)
        means = [measured[d_k][policy].mean("entropy_ratio") for d_k in SIZES]
        ends = {"low": floats(one.low for one in means), "high": floats(one.high for one in means)}
        series.append(Line(floats(SIZES), floats(expected[d_k][at] for d_k in SIZES), colour, label))
        series.append(Points(floats(SIZES), floats(one.value for one in means), colour, **ends))
    begins, crossing = theory.unscaled_crossover(KEYS).begins, theory.concentration_crossing(KEYS)
    lines = (
        ReferenceLine(begins, f"2 ln n = {begins:.1f}", "vertical", "start"),
        ReferenceLine(crossing, f"Σp² ≥ ½ from {crossing} on", "vertical", "start"),
    )
    panel = Panel(
        "",
        Axis("dₖ, length of queries and keys", log=True, ticks=name_ticks(SIZES)),
        Axis("H/ln n  (1: all keys alike, 0: one key)", low=0.0, high=1.04),
        tuple(series),
        lines,
    )
    sqrt, none = (
        [measured[d_k][policy].mean("entropy_ratio").value for d_k in (SIZES[0], SIZES[-1])]
        for policy in ("sqrt", "none")
    )
    counts = sorted({math.prod(choose_effort(d_k, KEYS)) for d_k in SIZES})
    rows = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return Figure(
        f"With 1/√dₖ attention over {KEYS} keys keeps {sqrt[0]:.0%} of its entropy at dₖ\u00a0=\u00a0{SIZES[0]} and "
        f"{sqrt[1]:.0%} at {SIZES[-1]}; without a scale {none[0]:.0%} become {none[1]:.0%}",
        (panel,),
        columns=1,
        panel_height=330,
        caption=f"Standard normal q and k, n = {KEYS} keys. Lines: exact averages; marks: means of {rows} rows "
        f"with 95% intervals, seed {SEED}. Unscaled rows begin to concentrate at dₖ = 2 ln n. From dₖ = {crossing} on "
        "one or two keys hold most of the weight. 1/dₖ makes rows uniform.",
    )


def plan_theory():
    """Plan Σp² over ρ and unscaled gradients over dₖ: exact averages, their limits, and samples."""
    rng = np.random.default_rng(SEED)
    width = math.sqrt(2 * math.log(KEYS))
    rhos = np.linspace(0.02, 3.0, 120)
    marks = np.array([0.25, 0.5, 0.65, 0.75, 0.85, 1.0, 1.25, 1.5, 2.0, 3.0])
    rows = [(softmax(rho * width * rng.standard_normal((2000, KEYS))) ** 2).sum(axis=1) for rho in marks]
    limits = [theory.condensation(rho * width, KEYS).sum_p2 for rho in rhos]
    concentration = Panel(
        f"Σp² of Gaussian rows, n = {KEYS}",
        Axis("saturation index ρ"),
        Axis("Σp²", log=True),
        (
            Line(floats(rhos), floats(theory.expected_softmax(r * width, KEYS).sum_p2 for r in rhos), BLUE, "exact"),
            Line(floats(rhos), floats(limits), ORANGE, "limit", dash="dash"),
            Points(floats(marks), floats(row.mean() for row in rows), BLUE, "sampled mean"),
            Points(floats(marks), floats(np.median(row) for row in rows), GREY, "sampled median", symbol="diamond"),
        ),
    )
    sizes = (16, 32, 64, 128, 256, 512, 1024, 2048)
    norms = {}
    for d_k in sizes:
        q, grad = rng.standard_normal((2, 600, 4, d_k))
        k, v = rng.standard_normal((2, 600, FEW_KEYS, d_k))
        gradient = attention_gradients(q, k, v, grad, scale=1.0).query
        norms[d_k] = np.linalg.norm(gradient, axis=-1) / np.linalg.norm(grad, axis=-1)
    exact = [theory.gradient_scale(1.0, d_k=d_k, n=FEW_KEYS) for d_k in sizes]
    of_large = [theory.unscaled_gradients(d_k, FEW_KEYS) for d_k in sizes]
    gradients = Panel(
        f"‖∂loss/∂q‖/‖∂loss/∂o‖ without scaling, n = {FEW_KEYS}",
        Axis("dₖ", log=True, ticks=name_ticks(sizes)),
        Axis("", log=True),
        (
            Line(floats(sizes), floats(exact), BLUE),
            Line(floats(sizes), floats(one.root_mean_square for one in of_large), ORANGE, dash="dash"),
            Line(floats(sizes), floats(one.mean for one in of_large), ORANGE, dash="dash"),
            Points(floats(sizes), floats(math.sqrt((norms[d_k] ** 2).mean()) for d_k in sizes), BLUE, symbol="square"),
            Points(floats(sizes), floats(norms[d_k].mean() for d_k in sizes), BLUE),
            Points(floats(sizes), floats(np.median(norms[d_k]) for d_k in sizes), GREY, symbol="diamond"),
        ),
    )
    medians = np.median(norms[sizes[0]]), np.median(norms[sizes[-1]])
    return Figure(
        "Without scaling the mean gradient stays while the median falls "
        f"from {medians[0]:.2g} at dₖ\u00a0=\u00a0{sizes[0]} to {medians[1]:.1g} at {sizes[-1]}",
        (concentration, gradients),
        columns=2,
        panel_height=330,
        caption="Left: 2000 rows per mark. Right: 600 samples of 4 queries per mark; squares are root mean squares, "
        f"circles means, diamonds medians. Dashed: limits for many keys and for large dₖ. Seed {SEED}.",
    )


if __name__ == "__main__":
    for name, plan in {"scale": plan_scale, "theory": plan_theory}.items():
        print(f"picture written to {write_whole(IMAGES / f'{name}.png', render(plan(), 'png'))}")
