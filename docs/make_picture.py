"""Makes the pictures of the README (report.png: the page beside the curve), the theory page and Performance."""

import io
import json
import math
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from sqrtdk import attention_gradients, softmax, theory
from sqrtdk.exercises import concentration, gradients, variance
from sqrtdk.exercises.gaussian_rows import POLICIES, choose_effort, policy_factors, sample_policies
from sqrtdk.lab.shipped import load_ablation
from sqrtdk.records.record import Record
from sqrtdk.report import render_report
from sqrtdk.report.files import write_whole
from sqrtdk.report.matplotlib_renderer import render
from sqrtdk.report.palette import policy_colour
from sqrtdk.report.panels import Axis, Figure, Line, Panel, Points, ReferenceLine, floats, name_ticks
from sqrtdk.wording.names import name_policy

IMAGES = Path(__file__).parent / "images"
KEYS, FEW_KEYS, SEED = 1024, 16, 0
BLUE, ORANGE, GREY = "#0b5fa5", "#c24f0a", "#6b7280"
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def plan_scale():
    """Return the figure of the entropy ratio over dₖ: lines are exact averages, marks are means with 95% intervals."""
    expected = {d_k: [theory.expected_rows(s, d_k, KEYS).entropy_ratio for s in policy_factors(d_k)] for d_k in SIZES}
    measured = {d_k: sample_policies(d_k=d_k, n=KEYS, seed=SEED, **choose_effort(d_k, KEYS)._asdict()) for d_k in SIZES}
    series = []
    for at, policy in enumerate(POLICIES):
        colour, label = policy_colour(policy), name_policy(policy)
        means = [measured[d_k][policy].mean("entropy_ratio") for d_k in SIZES]
        ends = {"low": floats(one.low for one in means), "high": floats(one.high for one in means)}
        series.append(Line(floats(SIZES), floats(expected[d_k][at] for d_k in SIZES), colour, label))
        series.append(Points(floats(SIZES), floats(one.value for one in means), colour, **ends))
    begins, crossing = theory.crossover_without_scaling(KEYS).begins, theory.concentration_crossing(KEYS)
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
        f"{sqrt[1]:.0%} at {SIZES[-1]}; without scaling {none[0]:.0%} and {none[1]:.0%}",
        (panel,),
        columns=1,
        panel_height=330,
        caption=f"Standard normal q and k, n = {KEYS} keys. Lines: exact averages; marks: means of {rows} rows "
        f"with 95% intervals, seed {SEED}. Without scaling weights begin to concentrate at dₖ = 2 ln n, and from "
        f"dₖ = {crossing} on one or two keys hold most of the weight.",
    )


def plan_theory():
    """Return the figure of Σp² over ρ and of gradients without scaling over dₖ: exact averages, limits and samples."""
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
    of_large = [theory.gradients_without_scaling(d_k, FEW_KEYS) for d_k in sizes]
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


def plan_growth():
    """Return the figure of time per logit and peak memory over the number of keys, from the numbers in Performance."""
    record = Record.from_json(json.loads((Path(__file__).parents[1] / "benchmarks/growth.json").read_text()))
    curves = [curve for curve in record.curves["growth"] if curve["window"] is None]
    colours = dict(zip((curve["contender"] for curve in curves), (BLUE, "#5aa786", GREY, ORANGE), strict=True))
    times, peaks = [], []
    for curve in curves:
        name, colour = curve["contender"], colours[curve["contender"]]
        known = [(n, time) for n, time in zip(curve["n"], curve["milliseconds"], strict=True) if time is not None]
        per_logit = floats(1e6 * time / n**2 for n, time in known)
        times.append(Line(floats(n for n, _ in known), per_logit, colour, name))
        rows = [row for row in record.tables["memory"] if row["contender"] == name and row["mebibytes"]]
        peaks.append(Line(floats(row["n"] for row in rows), floats(row["mebibytes"] for row in rows), colour))
    keys = Axis("queries and keys", log=True, ticks=name_ticks(curves[0]["n"]))
    longest = max(curves[0]["n"])
    taken = {row["contender"]: row["mebibytes"] for row in record.tables["memory"] if row["n"] == longest}
    return Figure(
        f"At {longest} keys sqrtdk takes {taken['sqrtdk']:.1f} MiB beyond inputs and results, the textbook "
        f"{taken['textbook in torch']:.0f} MiB",
        (
            Panel("Nanoseconds per logit", keys, Axis("", low=0.0, high=10.0), tuple(times)),
            Panel("Peak memory beyond inputs and results, MiB", keys, Axis("", log=True), tuple(peaks)),
        ),
        columns=2,
        panel_height=330,
        caption=f"One head, dₖ = 64, float32, no mask. {record.spec['cpu']}, {record.spec['threads']} threads.",
    )


def photograph(page, height, style):
    """Open a page with its own style in chromium and return the image of its first screen."""
    with tempfile.TemporaryDirectory() as folder:
        file, image = Path(folder) / "page.html", Path(folder) / "page.png"
        file.write_text(page.replace("</head>", f"<style>{style}</style></head>"), encoding="utf-8")
        subprocess.run(
            [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={folder}/profile", f"--window-size=760,{height}"),
                *("--force-device-scale-factor=1.25", "--virtual-time-budget=8000", f"--screenshot={image}"),
                file.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        return Image.open(image).convert("RGB").copy()


def compose_report():
    """Return the picture of the README: the first screen of the report, beside the curve above the sliders."""
    records = [variance(seed=SEED), concentration(seed=SEED), gradients(seed=SEED), load_ablation()]
    page = photograph(render_report(records, only=["answer"]), 985, "nav, #making { display: none }")
    hidden = (
        "header, nav, #making { display: none } main { padding-top: 0 } section { border: 0; margin: 0; padding: 0 }"
    )
    sliders = photograph(render_report([], only=["try"]), 665, hidden)
    curve = Image.open(io.BytesIO(render(plan_scale(), "png"))).convert("RGB")
    curve = curve.resize((page.width, round(curve.height * page.width / curve.width)))
    whole = Image.new("RGB", (2 * page.width, max(page.height, curve.height + sliders.height)), "white")
    for image, place in ((page, (0, 0)), (curve, (page.width, 0)), (sliders, (page.width, curve.height))):
        whole.paste(image, place)
    content = io.BytesIO()
    whole.quantize(64).save(content, "PNG", optimize=True)
    return content.getvalue()


if __name__ == "__main__":
    for name, plan in {"theory": plan_theory, "growth": plan_growth}.items():
        print(f"picture written to {write_whole(IMAGES / f'{name}.png', render(plan(), 'png'))}")
    if shutil.which("chromium") is None:
        print("the README's picture is not written: it needs chromium")
    else:
        print(f"picture written to {write_whole(IMAGES / 'report.png', compose_report())}")
