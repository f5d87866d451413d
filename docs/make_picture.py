"""Draws docs/images/scale.png, the picture of the README: how far attention spreads over its keys as dₖ grows."""

import math
from pathlib import Path

from sqrtdk.exercises.expectation import expect_rows
from sqrtdk.exercises.gaussian_rows import POLICIES, choose_effort, policy_factors, sample_policies
from sqrtdk.report.files import write_whole
from sqrtdk.report.matplotlib_renderer import render
from sqrtdk.report.palette import policy_colour
from sqrtdk.report.panels import Axis, Figure, Line, Panel, Points, ReferenceLine, floats, name_ticks
from sqrtdk.setting_names import name_policy
from sqrtdk.theory import unscaled_crossover

PICTURE = Path(__file__).parent / "images" / "scale.png"
KEYS, SEED = 1024, 0
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def plan():
    """The figure: lines are exact averages, marks are measured, with their 95% intervals."""
    expected = {d_k: [expect_rows(d_k, KEYS).at_scale(s).entropy_ratio for s in policy_factors(d_k)] for d_k in SIZES}
    measured = {d_k: sample_policies(d_k=d_k, n=KEYS, seed=SEED, **choose_effort(d_k, KEYS)._asdict()) for d_k in SIZES}
    series = []
    for at, policy in enumerate(POLICIES):
        colour, label = policy_colour(policy), name_policy(policy)
        means = [measured[d_k][policy].mean("entropy_ratio") for d_k in SIZES]
        ends = {"low": floats(one.low for one in means), "high": floats(one.high for one in means)}
        series.append(Line(floats(SIZES), floats(expected[d_k][at] for d_k in SIZES), colour, label))
        series.append(Points(floats(SIZES), floats(one.value for one in means), colour, **ends))
    begins, nearly = unscaled_crossover(KEYS)
    lines = (
        ReferenceLine(begins, f"2 ln n = {begins:.1f}", "vertical", "start"),
        ReferenceLine(nearly, f"8 ln n = {nearly:.1f}", "vertical", "start"),
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
    (rows,) = {math.prod(choose_effort(d_k, KEYS)) for d_k in SIZES}
    return Figure(
        f"With 1/√dₖ attention over {KEYS} keys keeps {sqrt[0]:.0%} of its entropy at dₖ\u00a0=\u00a0{SIZES[0]} and "
        f"{sqrt[1]:.0%} at {SIZES[-1]}; without a scale {none[0]:.0%} become {none[1]:.0%}",
        (panel,),
        columns=1,
        panel_height=330,
        caption=f"Standard normal q and k, n = {KEYS} keys. Lines: exact averages; marks: means of {rows} rows "
        f"with 95% intervals, seed {SEED}. Unscaled rows begin to condense at 2 ln n and are nearly one-hot from "
        "8 ln n on; 1/dₖ makes them uniform.",
    )


if __name__ == "__main__":
    print(f"picture written to {write_whole(PICTURE, render(plan(), 'png'))}")
