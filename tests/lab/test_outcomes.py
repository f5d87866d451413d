"""Outcomes: medians, comparisons and choices by hand-made rows, and the sentences made from them."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqrtdk.lab import AblationSpec
from sqrtdk.lab.ablation import _headline, read_ablation
from sqrtdk.lab.intervals import holm, wilcoxon_p, wilson
from sqrtdk.lab.outcomes import choose_best, compare, quartiles, summarise
from sqrtdk.lab.tasks import Recall

MARGIN = 0.03


def run(scale, seed, loss, *, lr=1e-3, init="unit", qk_step="unit", d_k=64, status="done", steps=None):
    return {
        "scale": scale,
        "d_k": d_k,
        "seed": seed,
        "init": init,
        "qk_step": qk_step,
        "lr": lr,
        "status": status,
        "final_loss": loss,
        "final_accuracy": None if loss is None else 0.5,
        "solved": loss is not None and loss < 0.277,
        "steps_to_threshold": steps,
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_quartiles_are_numpys(values):
    np.testing.assert_allclose(quartiles(values), np.quantile(values, [0.25, 0.5, 0.75]), rtol=1e-9, atol=1e-9)


def test_quartiles_with_diverged_runs():
    assert quartiles([1.0, 2.0, math.inf, math.inf]) == (1.75, math.inf, math.inf)
    assert quartiles([math.inf]) == (math.inf, math.inf, math.inf)
    assert quartiles([-math.inf, 1.0, 2.0, 3.0]) == (-math.inf, 1.5, 2.25)


def test_summary_by_hand():
    rows = [
        run("sqrt", 0, 0.1, steps=100),
        run("sqrt", 1, 0.2, steps=300),
        run("sqrt", 2, 2.0),
        run("sqrt", 3, None, status="diverged"),
        run("sqrt", 4, None, status="failed"),
    ]
    (row,) = summarise(rows)
    assert row["final_loss_median"] == pytest.approx(1.1)
    assert row["final_loss_iqr"] == [pytest.approx(0.175), None]
    assert row["solved_fraction"] == 0.5
    assert row["steps_to_threshold_median"] == 200
    assert row["reached_threshold"] == 2
    assert (row["n"], row["diverged"], row["failed"]) == (4, 1, 1)


def test_summary_of_runs_that_never_got_there():
    (row,) = summarise([run("none", seed, 2.6) for seed in range(3)])
    assert row["steps_to_threshold_median"] is None
    assert row["solved_fraction"] == 0.0
    (row,) = summarise([run("none", 0, None, status="failed")])
    assert (row["n"], row["final_loss_median"], row["solved_fraction"]) == (0, None, None)


def test_best_rate_is_the_lowest_median_and_an_edge_is_named():
    losses = {("none", 1e-4): 2.0, ("none", 1e-3): 1.0, ("none", 1e-2): None, ("sqrt", 1e-4): 0.3, ("sqrt", 1e-3): 0.3}
    rows = [
        run(scale, 0, loss, lr=lr, status="diverged" if loss is None else "done")
        for (scale, lr), loss in losses.items()
    ]
    none, sqrt = choose_best(summarise(rows))
    assert (none["scale"], none["lr"], none["lrs"], none["at_edge"]) == ("none", 1e-3, 3, False)
    assert (sqrt["scale"], sqrt["lr"], sqrt["lrs"], sqrt["at_edge"]) == ("sqrt", 1e-4, 2, True)


def test_comparison_pairs_by_seed():
    rows = [run("sqrt", seed, 0.1 * seed) for seed in range(4)]
    rows += [run("none", seed, loss) for seed, loss in ((3, 2.3), (1, 0.1), (0, 1.0), (7, 9.0))]
    (row,) = compare(rows, MARGIN)
    assert (row["basis"], row["scale"], row["against"]) == ("same_lr", "none", "sqrt")
    assert row["n"] == 3
    assert row["median_difference"] == pytest.approx(1.0)
    assert (row["higher"], row["lower"]) == (2, 0)
    assert row["wilcoxon_p"] == wilcoxon_p([1.0, 0.0, 2.0])


def test_each_setting_is_compared_at_its_own_rate_and_size():
    rows = [run("sqrt", seed, 0.1, lr=3e-3) for seed in range(3)] + [
        run("none", seed, 1.0, lr=1e-4) for seed in range(3)
    ]
    rows += [run(scale, seed, loss, d_k=16) for scale, loss in (("sqrt", 0.2), ("none", 0.7)) for seed in range(3)]
    large, small = compare(rows, MARGIN, "best_lr")
    assert (large["basis"], large["lr"], large["against_lr"], large["d_k"]) == ("best_lr", 1e-4, 3e-3, 64)
    assert large["median_difference"] == pytest.approx(0.9)
    assert (small["d_k"], small["median_difference"]) == (16, pytest.approx(0.5))


def test_rescaled_starts_are_held_against_unit_with_sqrt():
    rows = [run("sqrt", 0, 0.1), run("none", 0, 0.3, init="rescaled"), run("sqrt", 0, 0.2, init="rescaled")]
    rows += [run("inverse", 0, 0.4, init="grown"), run("none", 0, 0.6, qk_step="rescaled")]
    rows += [run("sqrt", 0, 0.7, init="torch"), run("none", 0, 0.9, init="torch")]
    result = compare(rows, MARGIN)
    assert {(row["scale"], row["init"], row["qk_step"]): row["against_init"] for row in result} == {
        ("none", "rescaled", "unit"): "unit",
        ("sqrt", "rescaled", "unit"): "unit",
        ("inverse", "grown", "unit"): "unit",
        ("none", "unit", "rescaled"): "unit",
        ("none", "torch", "unit"): "torch",
    }
    assert [row["median_difference"] for row in result] == pytest.approx([0.2, 0.1, 0.3, 0.5, 0.2])
    # Without `unit` the same init is what there is to compare with.
    assert compare([row for row in rows if row["init"] == "rescaled"], MARGIN)[0]["against_init"] == "rescaled"


def test_both_diverged_is_a_tie_and_one_is_an_infinite_difference():
    rows = [run("sqrt", seed, loss) for seed, loss in enumerate((None, 0.1, 0.1))]
    rows += [run("none", seed, loss) for seed, loss in enumerate((None, None, None))]
    rows = [{**row, "status": "diverged" if row["final_loss"] is None else "done"} for row in rows]
    (row,) = compare(rows, MARGIN)
    assert (row["higher"], row["lower"], row["n"]) == (2, 0, 3)
    assert row["median_difference"] is None
    assert row["wilcoxon_p"] == pytest.approx(0.5)


def test_without_sqrt_there_is_nothing_to_compare():
    assert compare([run("none", 0, 2.0), run("inverse", 0, 1.0)], MARGIN) == []


DIVERGED = [None] * 8
SMALL = [0.001, -0.002, 0.003, 0.001, -0.001, 0.002, 0.0, 0.001]


@pytest.mark.parametrize(
    ("differences", "outcome", "words"),
    [
        (SMALL, "as well", "it does as well"),
        ([1.0 + value for value in SMALL], "worse", "it does worse"),
        ([-1.0 + value for value in SMALL], "better", "it does better"),
        ([100 * value for value in SMALL], "not distinguishable", "they are not distinguishable"),
        (SMALL[:5], "not distinguishable", "too few seeds for an interval"),
        (DIVERGED, "worse", "the loss differs by +∞ [+∞, +∞]"),
        ([*SMALL[:7], None], "not distinguishable", "+∞]"),
    ],
    ids=["equal", "worse", "better", "noise", "few", "diverged", "one diverged"],
)
def test_outcome_is_decided_by_the_interval(differences, outcome, words):
    rows = [run("sqrt", seed, 3.0) for seed in range(len(differences))]
    rows += [
        run("none", seed, None if difference is None else 3.0 + difference)
        for seed, difference in enumerate(differences)
    ]
    (row,) = compare(rows, MARGIN)
    assert row["outcome"] == outcome
    assert words in read(rows)


def test_p_values_are_corrected_or_left_out():
    scales = {"none": 1.0, "inverse": 0.5, "mup": 0.1}
    for seeds, enough in ((8, True), (6, False)):
        rows = [run("sqrt", seed, 0.1 + 0.01 * seed) for seed in range(seeds)]
        rows += [run(scale, seed, 0.1 + more * seed) for scale, more in scales.items() for seed in range(seeds)]
        result = compare(rows, MARGIN)
        expected = holm([row["wilcoxon_p"] for row in result]) if enough else [None] * 3
        assert [row["holm_p"] for row in result] == expected
        text = read(rows)
        assert ("corrected by Holm for 3 comparisons" in text) == enough == (", p = " in text)
        assert ("No p-value is given" in text) != enough


def read(rows, **changes):
    """The sentences that an ablation of these runs has."""
    best = choose_best(summarise(rows))
    return " ".join(read_ablation(Recall(), best, compare(rows, MARGIN), AblationSpec(**changes)))


def test_solved_fractions_have_their_interval():
    (row,) = summarise([run("sqrt", seed, 0.1 if seed else 2.0) for seed in range(8)])
    assert row["solved_fraction"] == 7 / 8
    assert row["solved_interval"] == list(wilson(7, 8))
    assert "solved by 7 of 8 seeds (53% to 98%)" in read([run("sqrt", seed, 0.1 if seed else 2.0) for seed in range(8)])


def test_reading_says_what_the_numbers_say():
    rows = [run("sqrt", seed, 0.01, steps=200) for seed in range(3)] + [run("none", seed, 2.6) for seed in range(3)]
    text = read(rows)
    assert "solved by 3 of 3 seeds" in text
    assert "solved by 0 of 3 seeds" in text
    assert "the loss differs by +2.59 (too few seeds for an interval)" in text
    assert "higher in 3 and lower in 0 of 3 seeds; they are not distinguishable" in text
    assert "not a confidence interval" in text
    assert "the training loss got below the threshold in 3 of 3, after 200 steps" in text
    assert "chosen" not in text
    assert "no part in the choice" not in text
    # The same rows with the roles exchanged must read the other way round.
    swapped = [{**row, "scale": "none" if row["scale"] == "sqrt" else "sqrt"} for row in rows]
    assert "the loss differs by −2.59" in read(swapped)


def test_reading_says_how_learning_rates_were_chosen():
    rows = [run("sqrt", 0, 0.3)]
    text = read(rows, lrs=(1e-3, 3e-3), selection=2)
    assert "lowest median loss on other seeds (1000, 1001); the reported seeds had no part in the choice" in text
    assert "at the edge" not in text
    best = [{**row, "at_edge": True} for row in choose_best(summarise(rows))]
    edge = read_ablation(Recall(), best, [], AblationSpec())[-1]
    assert edge.endswith("a better one may lie outside: 1/√dₖ (dₖ = 64, lr 0.001).")


def test_reading_of_equal_policies_and_of_a_policy_that_only_failed():
    text = read([run("sqrt", 0, 0.3), run("mup", 0, 0.3), run("none", 0, None, status="failed")])
    assert "mup (dₖ = 64, lr 0.001) against 1/√dₖ (lr 0.001): the losses are equal" in text
    assert "no scaling (dₖ = 64, lr 0.001): every run failed." in text
    assert "Rescaled init" not in text


def test_settings_are_named_in_words_wherever_they_are_told():
    rows = [run("sqrt", 0, 0.01), run("inverse", 0, 0.02), run("none", 0, 2.6), run("none", 0, 0.03, init="rescaled")]
    assert _headline(Recall(), choose_best(summarise(rows))) == (
        "median held-out loss of 1 seed: 1/√dₖ 0.01; 1/dₖ 0.02; no scaling 2.60; "
        f"no scaling, rescaled init 0.03; chance {Recall().chance_loss:.2f}."
    )
    text = read(rows)
    assert "no scaling, rescaled init (dₖ = 64, lr 0.001) against 1/√dₖ (lr 0.001): the loss differs by +0.02" in text
    assert "Rescaled init: W_q and W_k begin with a factor" in text
    assert "Rescaled step" not in text
    text += read([*rows, run("none", 0, 0.01, init="rescaled", qk_step="rescaled")])
    assert "no scaling, rescaled init and step" in text
    assert "With both, Adam makes the same function as with 1/√dₖ" in text
    assert not re.search(r"\b(sqrt|none|inverse|unit|grown)\b", text)


def test_the_headline_of_several_sizes_leaves_the_controls_to_the_table():
    rows = [run(scale, 0, 0.1, d_k=d_k) for d_k in (16, 64) for scale in ("none", "sqrt")]
    rows += [run("none", 0, 0.1, init="rescaled"), run("none", 0, 0.1, qk_step="rescaled")]
    shown = _headline(Recall(), choose_best(summarise(rows)))
    assert "no scaling, dₖ 16 0.10; 1/√dₖ, dₖ 16 0.10; no scaling, dₖ 64 0.10; 1/√dₖ, dₖ 64 0.10; chance" in shown


def learned(seed, mean, heads, spread, scale="learned"):
    result = {"temperature": mean, "temperature_least": min(heads), "temperature_largest": max(heads)}
    return run(scale, seed, 0.1) | result | {"temperature_spread": spread, "temperatures": heads, "layers": 2}


def test_temperatures_are_summed_up_only_where_some_were_learned():
    plain = [run("sqrt", seed, 0.2) for seed in range(3)]
    assert not any(name.startswith("temperature") for name in summarise(plain)[0])
    diverged = run("learned", 3, None, status="diverged")
    # Two layers of two heads: the geometric means of a layer are 1, 1.2, 1.1 and 2, 1, 1.
    rows = [
        learned(0, 1.0, [0.8, 1.25, 4.0, 1.0], 0.0),
        learned(1, 1.2, [1.2, 1.2, 1.0, 1.0], 0.2),
        learned(2, 1.1, [1.1, 1.1, 0.5, 2.0], 0.1),
        diverged,
    ]
    sqrt, result = summarise([*plain, *rows])
    assert {name: value for name, value in sqrt.items() if name.startswith("temperature")} == dict.fromkeys(
        ["temperature_by_layer", "temperature_median", "temperature_range", "temperature_spread_median"]
    )
    assert result["temperature_median"] == 1.1
    assert result["temperature_by_layer"] == pytest.approx([1.1, 1.0])
    assert result["temperature_range"] == [0.5, 4.0]
    assert result["temperature_spread_median"] == 0.1
    told = read_ablation(Recall(), choose_best([sqrt, result]), compare([*plain, *rows], MARGIN), AblationSpec())
    sentences = [text for text in told if "τ/√dₖ" in text]
    assert len(sentences) == 1
    assert "from 1 to 1.100 in layer 1, 1.000 in layer 2" in sentences[0]
    assert "single heads from 0.500 to 4.000" in sentences[0]
    assert "standard deviation of 0.1 (0 at the start)" in sentences[0]
