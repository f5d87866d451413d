"""Reproductions with training loops of their own: trained logits times a factor, QK-clip, heads over sets, sinks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from sqrtdk.exercises.estimates import Estimate
from sqrtdk.lab.laboratory import Lab
from sqrtdk.lab.outcomes import MARGIN
from sqrtdk.lab.spec import RunSpec
from sqrtdk.reproductions.lab_runs import estimate_shift, list_seeds, span_seeds
from sqrtdk.reproductions.reproduction import Chart, Expectation, Measured, trained_reproduction

_MARGIN = MARGIN * math.log(16)  # of the chance loss of recall with 16 symbols
_THRESHOLD = math.log(16) / 10.0
_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@trained_reproduction(
    "logit-factor",
    "A trained head is sharp: it bears logits that are several times too large, and breaks when they are several times "
    "too small",
    "the weight 1/(1 + (n − 1)·e^−κm) of a key that leads by m, for logits times κ",
    Expectation("held-out loss with logits times 4", "≤", _THRESHOLD),
    Expectation("held-out loss with logits times ¼", "≥", _THRESHOLD),
    Expectation("octaves to the break by larger logits minus octaves by smaller ones", "≥", 0.0),
    chart=Chart(
        "losses",
        "factor",
        "loss",
        "factor κ on the logits",
        "held-out loss, median of seeds",
        by=None,
        log_x=True,
        log_y=True,
        bound=(_THRESHOLD, "a tenth of chance"),
    ),
    scaled_down="recall, dₖ 64, 600 steps at a learning rate of 0.001, 6 seeds",
)
def scale_trained_logits(
    seed: int, lab: Lab, *, factors: Sequence[float] = _FACTORS, seeds: int = 6, steps: int = 600
) -> Measured:
    """Return the held-out loss of trained models whose scale is swapped for κ/√dₖ, without further training."""
    from sqrtdk.reproductions.training import evaluate, train_model

    losses = np.empty((seeds, len(factors)))
    for place, one in enumerate(list_seeds(seed, seeds)):
        spec = RunSpec(seed=one, steps=steps)
        model = train_model(spec).model
        for column, factor in enumerate(factors):
            model.set_scale(f"temperature:{1 / factor:g}")
            losses[place, column] = evaluate(model, spec)
    at = dict(zip(factors, losses.T, strict=True))
    up = [_octaves_to_break(of_seed, factors, 1) for of_seed in losses]
    down = [_octaves_to_break(of_seed, factors, -1) for of_seed in losses]
    return Measured(
        {
            "held-out loss with logits times 4": estimate_shift(at[4.0]),
            "held-out loss with logits times ¼": estimate_shift(at[0.25]),
            "octaves to the break by larger logits minus octaves by smaller ones": estimate_shift(
                np.subtract(up, down)
            ),
        },
        {"losses": [{"factor": factor, "loss": float(np.median(of)), **span_seeds(of)} for factor, of in at.items()]},
    )


def _octaves_to_break(losses: Iterable[float], factors: Sequence[float], direction: int) -> float:
    """Return |log₂ κ| of the first factor on that side of 1 whose loss passes the threshold, else one octave more."""
    side = sorted(
        (direction * math.log2(factor), loss)
        for factor, loss in zip(factors, losses, strict=True)
        if direction * math.log2(factor) >= 0
    )
    return next((octaves for octaves, loss in side if loss >= _THRESHOLD), side[-1][0] + 1)


_CLIP = 30.0


@trained_reproduction(
    "qk-clip",
    "QK-clip holds the largest logit at its threshold and costs no loss, beside training without it and with QK-norm",
    "Kimi Team 2025 (2507.20534), section 2.1",
    Expectation("control: largest logit of the last 50 steps without QK-clip", "≥", _CLIP),
    Expectation("largest logit of the last 50 steps with QK-clip", "≤", 1.1 * _CLIP),
    Expectation("final loss with QK-clip minus without", "≤", _MARGIN),
    Expectation("final loss with QK-clip minus with QK-norm", "≤", _MARGIN),
    chart=Chart(
        "largest",
        "step",
        "logit",
        "step",
        "largest logit, median of seeds",
        by="line",
        log_y=True,
        bound=(_CLIP, "threshold"),
    ),
    scaled_down="recall, dₖ 64, Adam at a learning rate of 0.01 instead of Muon, a threshold of 30 instead of 100, "
    "300 steps, 6 seeds",
)
def compare_clip_with_norm(seed: int, lab: Lab, *, seeds: int = 6, steps: int = 300) -> Measured:
    """Return the largest logits over training and the final losses of three ways to train."""
    from sqrtdk.reproductions.training import evaluate, train_model

    ways: dict[str, tuple[str, float | None]] = {
        "1/√dₖ": ("sqrt", None),
        "1/√dₖ with QK-clip": ("sqrt", _CLIP),
        "QK-norm": ("qk_norm", None),
    }
    losses, largest = dict[str, list[float]](), dict[str, list[list[float]]]()
    for name, (scale, threshold) in ways.items():
        losses[name], largest[name] = [], []
        for one in list_seeds(seed, seeds):
            spec = RunSpec(scale=scale, seed=one, steps=steps, lr=1e-2)
            trained = train_model(spec, threshold)
            losses[name].append(evaluate(trained.model, spec))
            largest[name].append(trained.largest)
    plain, clipped, normed = (np.array(of_name) for of_name in losses.values())
    rows = []
    for name, of_name in largest.items():
        medians = np.median(of_name, axis=0)
        rows += [{"line": name, "step": step, "logit": float(medians[step])} for step in range(0, steps, 10)]
    last = {name: [max(one[-50:]) for one in of_name] for name, of_name in largest.items()}
    return Measured(
        {
            "control: largest logit of the last 50 steps without QK-clip": estimate_shift(last["1/√dₖ"]),
            "largest logit of the last 50 steps with QK-clip": estimate_shift(last["1/√dₖ with QK-clip"]),
            "final loss with QK-clip minus without": estimate_shift(clipped - plain),
            "final loss with QK-clip minus with QK-norm": estimate_shift(clipped - normed),
        },
        {"largest": rows},
    )


_SIZES = (16, 64, 256, 1024, 4096)


@trained_reproduction(
    "dispersion",
    "A head that finds the largest of 16 items loses its focus as sets grow, and a temperature that depends on the "
    "entropy gives some of it back",
    "Veličković et al. 2024 (2410.01104), with the polynomial of its figure 5",
    Expectation("control: share right at 16 items", "≥", 0.9),
    Expectation("mean largest weight at 4096 items divided by that at 16", "≤", 0.5),
    Expectation("share right at 4096 items minus that at 16", "≤", -0.1),
    Expectation("share right with entropy-dependent temperature minus without, mean over larger sets", "≥", 0.0),
    chart=Chart("accuracy", "n", "accuracy", "items n", "share right", by="line", log_x=True),
    scaled_down="600 steps on sets of 16, sets of at most 4096, 6 seeds",
)
def measure_dispersion(
    seed: int, lab: Lab, *, seeds: int = 6, steps: int = 600, sizes: Sequence[int] = _SIZES, sets: int = 256
) -> Measured:
    """Return the share of right answers and the largest weight by size, with and without the temperature."""
    from sqrtdk.reproductions.sets import MAXIMUM, ask_head, train_head

    policies = ("1/√dₖ", "entropy-dependent")
    heads = [train_head(MAXIMUM, one, steps) for one in list_seeds(seed, seeds)]
    tested = {name: [ask_head(head, MAXIMUM, name, sizes, sets) for head in heads] for name in policies}
    accuracy = {name: np.array([one.accuracy for one in of_name]) for name, of_name in tested.items()}
    weights = np.array([one.max_weight for one in tested["1/√dₖ"]])
    plain, sharpened = accuracy.values()
    return Measured(
        {
            "control: share right at 16 items": estimate_shift(plain[:, 0]),
            "mean largest weight at 4096 items divided by that at 16": estimate_shift(weights[:, -1] / weights[:, 0]),
            "share right at 4096 items minus that at 16": estimate_shift(plain[:, -1] - plain[:, 0]),
            "share right with entropy-dependent temperature minus without, mean over larger sets": estimate_shift(
                (sharpened - plain)[:, 1:].mean(axis=1)
            ),
        },
        {
            "accuracy": _rows_by_size(accuracy, sizes),
            "max_weight": [{"n": n, "max_weight": float(of.mean())} for n, of in zip(sizes, weights.T, strict=True)],
        },
    )


def _rows_by_size(accuracy: dict[str, np.ndarray], sizes: Sequence[int]) -> list[dict[str, object]]:
    return [
        {"line": name, "n": n, "accuracy": float(of.mean()), **span_seeds(of)}
        for name, of_name in accuracy.items()
        for n, of in zip(sizes, of_name.T, strict=True)
    ]


@trained_reproduction(
    "length-generalisation",
    "Recall that was trained on 16 pairs fails on more with 1/√dₖ, and less with a scale that grows with ln n",
    "Nakanishi 2025 (2501.19399); Chiang and Cholak 2022 (2202.12172)",
    Expectation("control: share right at 16 pairs with 1/√dₖ", "≥", 0.9),
    Expectation("share right with 1/√dₖ at 4096 pairs minus that at 16", "≤", -0.1),
    Expectation("share right at 4096 pairs with log n minus with 1/√dₖ", "≥", 0.0),
    Expectation("share right at 4096 pairs with SSMax minus with 1/√dₖ", "≥", 0.0),
    chart=Chart("accuracy", "n", "accuracy", "pairs n", "share right", by="line", log_x=True),
    scaled_down="one head over sets of pairs, 600 steps on 16 pairs, at most 4096 pairs, 6 seeds",
)
def measure_lengths(
    seed: int, lab: Lab, *, seeds: int = 6, steps: int = 600, sizes: Sequence[int] = _SIZES, sets: int = 256
) -> Measured:
    """Return the share of right answers by the number of pairs; 1/√dₖ and log n share their trained heads."""
    from sqrtdk.reproductions.sets import RECALL, ask_head, train_head

    heads = [train_head(RECALL, one, steps) for one in list_seeds(seed, seeds)]
    learned = [train_head(RECALL, one, steps, learns_ssmax=True) for one in list_seeds(seed, seeds)]
    of_policy = {"1/√dₖ": heads, "log n": heads, "SSMax": learned}
    accuracy = {
        name: np.array([ask_head(head, RECALL, name, sizes, sets).accuracy for head in group])
        for name, group in of_policy.items()
    }
    plain, log_n, ssmax = accuracy.values()
    return Measured(
        {
            "control: share right at 16 pairs with 1/√dₖ": estimate_shift(plain[:, 0]),
            "share right with 1/√dₖ at 4096 pairs minus that at 16": estimate_shift(plain[:, -1] - plain[:, 0]),
            "share right at 4096 pairs with log n minus with 1/√dₖ": estimate_shift(log_n[:, -1] - plain[:, -1]),
            "share right at 4096 pairs with SSMax minus with 1/√dₖ": estimate_shift(ssmax[:, -1] - plain[:, -1]),
        },
        {"accuracy": _rows_by_size(accuracy, sizes)},
    )


@trained_reproduction(
    "sinks",
    "A task that is mostly nothing makes softmax attention put its weight on the first token; ReLU attention forms no "
    "such sink, and an output gate lowers its share",
    "Ran-Milo 2026 (2603.11487); Qiu et al. 2025 (2505.06708)",
    Expectation("weight on the first token where nothing is asked, softmax", "≥", 0.8),
    Expectation("weight on the first token where nothing is asked, ReLU", "≤", 0.1),
    Expectation("weight on the first token with an output gate minus without", "≤", -0.1),
    *(
        Expectation(f"control: loss relative to an output of zero, {kind}", "≤", 0.2)
        for kind in ("softmax", "ReLU", "softmax with gate")
    ),
    chart=Chart("sinks", "place", "weight", "", "weight on the first token", by="line"),
    scaled_down="one layer, one head, 16 tokens, 1000 steps, 6 seeds",
)
def compare_sinks(seed: int, lab: Lab, *, seeds: int = 6, steps: int = 1000) -> Measured:
    """Return the weight on the first token of three kinds of attention that learned the conditional task."""
    from sqrtdk.reproductions.sinks import Kind, train_layer

    kinds: tuple[Kind, ...] = ("softmax", "ReLU", "softmax with gate")
    found = {kind: [train_layer(kind, one, steps) for one in list_seeds(seed, seeds)] for kind in kinds}
    first = {kind: np.array([one.on_first for one in of_kind]) for kind, of_kind in found.items()}
    estimates: dict[str, Estimate] = {
        "weight on the first token where nothing is asked, softmax": estimate_shift(first["softmax"]),
        "weight on the first token where nothing is asked, ReLU": estimate_shift(first["ReLU"]),
        "weight on the first token with an output gate minus without": estimate_shift(
            first["softmax with gate"] - first["softmax"]
        ),
    }
    rows = []
    for place, kind in enumerate(kinds):
        estimates[f"control: loss relative to an output of zero, {kind}"] = estimate_shift(
            [one.relative_loss for one in found[kind]]
        )
        for asked, values in (
            ("nothing is asked", first[kind]),
            ("at the trigger", np.array([one.at_trigger for one in found[kind]])),
        ):
            row = {"line": asked, "place": place, "name": kind, "weight": float(values.mean())}
            rows.append(row | span_seeds(values))
    return Measured(estimates, {"sinks": rows})
