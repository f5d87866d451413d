"""Outcomes: medians, tests and choices by hand-made rows, and the exact test against enumeration."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqrtdk.errors import InvalidValueError
from sqrtdk.lab.ablation import _headline, _read
from sqrtdk.lab.outcomes import choose_best, compare, quartiles, summarise, wilcoxon_p
from sqrtdk.lab.tasks import Recall


def run(scale, seed, loss, *, lr=1e-3, init="unit", status="done", steps=None):
    return {
        "scale": scale,
        "d_k": 64,
        "seed": seed,
        "init": init,
        "lr": lr,
        "status": status,
        "final_loss": loss,
        "final_accuracy": None if loss is None else 0.5,
        "solved": loss is not None and loss < 0.277,
        "steps_to_threshold": steps,
    }


def enumerate_wilcoxon(differences):
    values = [value for value in differences if value != 0]
    if not values:
        return 1.0
    sizes = np.abs(values)
    ranks = [np.mean([i + 1 for i, other in enumerate(sorted(sizes)) if other == size]) for size in sizes]
    observed = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product((0, 1), repeat=len(values))]
    below = sum(total <= observed for total in sums) / len(sums)
    above = sum(total >= observed for total in sums) / len(sums)
    return min(1.0, 2 * min(below, above))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(-4, 4) | st.floats(-10, 10), max_size=9))
def test_wilcoxon_is_exact_with_ties_and_zeros(differences):
    assert wilcoxon_p(differences) == pytest.approx(enumerate_wilcoxon(differences), abs=1e-12)


def test_wilcoxon_takes_infinite_differences_and_refuses_nan():
    assert wilcoxon_p([math.inf, math.inf, 1.0, 2.0, 3.0]) == pytest.approx(2 / 32)
    assert wilcoxon_p([-math.inf, 1.0]) == enumerate_wilcoxon([-5.0, 1.0])
    with pytest.raises(InvalidValueError, match="must not hold NaN"):
        wilcoxon_p([1.0, math.nan])


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
    (row,) = compare(rows, choose_best(summarise(rows)))
    assert (row["basis"], row["scale"], row["against"]) == ("same_lr", "none", "sqrt")
    assert row["n"] == 3
    assert row["median_difference"] == pytest.approx(1.0)
    assert (row["higher"], row["lower"]) == (2, 0)
    assert row["wilcoxon_p"] == pytest.approx(enumerate_wilcoxon([1.0, 0.0, 2.0]))


def test_comparison_at_the_best_rates_crosses_rates():
    losses = {("sqrt", 1e-3): 0.1, ("sqrt", 1e-2): 0.5, ("none", 1e-3): 2.0, ("none", 1e-2): 1.0}
    rows = [run(scale, seed, loss, lr=lr) for (scale, lr), loss in losses.items() for seed in range(3)]
    result = compare(rows, choose_best(summarise(rows)))
    same = {row["lr"]: row["median_difference"] for row in result if row["basis"] == "same_lr"}
    assert same == {1e-3: pytest.approx(1.9), 1e-2: pytest.approx(0.5)}
    (best,) = [row for row in result if row["basis"] == "best_lr"]
    assert (best["lr"], best["against_lr"]) == (1e-2, 1e-3)
    assert best["median_difference"] == pytest.approx(0.9)


def test_absorbed_is_held_against_unit_with_sqrt():
    rows = [run("sqrt", 0, 0.1), run("none", 0, 0.3, init="absorbed"), run("sqrt", 0, 0.2, init="absorbed")]
    result = compare(rows, choose_best(summarise(rows)))
    assert [(row["scale"], row["init"], row["against_init"]) for row in result] == [
        ("none", "absorbed", "unit"),
        ("sqrt", "absorbed", "unit"),
    ]
    assert result[0]["median_difference"] == pytest.approx(0.2)


def test_both_diverged_is_a_tie_and_one_is_an_infinite_difference():
    rows = [run("sqrt", seed, loss) for seed, loss in enumerate((None, 0.1, 0.1))]
    rows += [run("none", seed, loss) for seed, loss in enumerate((None, None, None))]
    rows = [{**row, "status": "diverged" if row["final_loss"] is None else "done"} for row in rows]
    (row,) = compare(rows, choose_best(summarise(rows)))
    assert (row["higher"], row["lower"], row["n"]) == (2, 0, 3)
    assert row["median_difference"] is None
    assert row["wilcoxon_p"] == pytest.approx(0.5)


def test_without_sqrt_there_is_nothing_to_compare():
    rows = [run("none", 0, 2.0), run("inverse", 0, 1.0)]
    assert compare(rows, choose_best(summarise(rows))) == []


def test_reading_says_what_the_numbers_say():
    rows = [run("sqrt", seed, 0.01, steps=200) for seed in range(3)] + [run("none", seed, 2.6) for seed in range(3)]
    best = choose_best(summarise(rows))
    text = " ".join(_read(Recall(), best, compare(rows, best)))
    assert "solved by 3 of 3 seeds" in text
    assert "solved by 0 of 3 seeds" in text
    assert "the loss is 2.59 above" in text
    assert "higher in 3 and lower in 0 of 3 seeds, p = 0.25" in text
    assert "not a confidence interval" in text
    assert "the training loss got below the threshold in 3 of 3, after 200 steps" in text
    # The same rows with the roles exchanged must read the other way round.
    swapped = [{**row, "scale": "none" if row["scale"] == "sqrt" else "sqrt"} for row in rows]
    best = choose_best(summarise(swapped))
    text = " ".join(_read(Recall(), best, compare(swapped, best)))
    assert "the loss is 2.59 below" in text


def test_reading_of_equal_policies_and_of_a_policy_that_only_failed():
    rows = [run("sqrt", 0, 0.3), run("mup", 0, 0.3), run("none", 0, None, status="failed")]
    best = choose_best(summarise(rows))
    text = " ".join(_read(Recall(), best, compare(rows, best)))
    assert "mup (dₖ = 64, lr 0.001) against 1/√dₖ (lr 0.001): the losses are equal" in text
    assert "no scaling (dₖ = 64, lr 0.001): every run failed." in text
    assert "Smaller start" not in text


def test_settings_are_named_in_words_wherever_they_are_told():
    rows = [run("sqrt", 0, 0.01), run("inverse", 0, 0.02), run("none", 0, 2.6), run("none", 0, 0.03, init="absorbed")]
    best = choose_best(summarise(rows))
    assert _headline(Recall(), best) == (
        "median held-out loss of 1 seed: 1/√dₖ 0.01; 1/dₖ 0.02; no scaling 2.60; "
        f"no scaling, smaller start 0.03; chance {Recall().chance_loss:.2f}."
    )
    text = " ".join(_read(Recall(), best, compare(rows, best)))
    assert "no scaling, smaller start (dₖ = 64, lr 0.001) against 1/√dₖ (lr 0.001): the loss is 0.02" in text
    assert "Smaller start: W_q and W_k begin dₖ^¼ times smaller" in text
    assert not re.search(r"\b(sqrt|none|inverse|unit|absorbed|init)\b", text)


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
    summary = choose_best([sqrt, result])
    sentences = [text for text in _read(Recall(), summary, compare([*plain, *rows], summary)) if "τ/√dₖ" in text]
    assert len(sentences) == 1
    assert "from 1 to 1.100 in layer 1, 1.000 in layer 2" in sentences[0]
    assert "single heads from 0.500 to 4.000" in sentences[0]
    assert "standard deviation of 0.1 (0 at the start)" in sentences[0]
