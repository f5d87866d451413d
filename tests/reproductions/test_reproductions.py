"""Reproductions: what is expected is stated before, and judged by the interval of what is measured."""

import json
import math

import pytest

from sqrtdk.commands.cli import main
from sqrtdk.errors import InvalidValueError, MissingExtraError
from sqrtdk.exercises.estimates import Estimate
from sqrtdk.reproductions import REPRODUCTIONS, exact, list_expectations, reproduce
from sqrtdk.reproductions.reproduction import Chart, Expectation, Measured, Reproduction

CHART = Chart("rows", "x", "y", "x", "y")


@pytest.mark.slow
def test_published_results_are_reproduced():
    record = reproduce(seed=1)
    assert {row["verdict"] for row in record.tables["reproductions"]} == {"pass"}
    assert all("reproduced. " in sentence for sentence in record.reading)
    assert record.curves.keys() == {name for name, one in REPRODUCTIONS.items() if not one.trains}
    for name, curves in record.curves.items():
        chart = REPRODUCTIONS[name].chart
        assert {row[chart.by] for row in curves[chart.curve]} >= set(chart.predicted)


def test_ssmax_by_hand():
    rows = exact.compare_softmax_with_ssmax(0).curves["max_weight"]
    for row in rows:
        factor = 0.43 * math.log(row["n"]) if row["policy"] == "ssmax" else 1.0
        assert row["max_weight"] == pytest.approx(1 / (1 + (row["n"] - 1) * math.exp(-5 * factor)), rel=1e-12)


@pytest.mark.parametrize("of_critical", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_the_weight_on_oneself_by_hand(rho, of_critical):
    gamma, n = of_critical / (1 - rho), 100
    expected = 1 / (1 + (n - 1) * n ** (-gamma * (1 - rho)))
    assert exact._weigh_itself(rho, n, gamma) == pytest.approx(expected, rel=1e-9)


def test_a_result_that_is_not_there_is_not_reproduced(monkeypatch):
    rules = (Expectation("a", "≤", 1.0), Expectation("b", "≥", 1.0), Expectation("c", "≥", 1.0))
    values = {"a": 2.0, "b": 1.0, "c": Estimate(1.0, 0.5, 1.5)}
    monkeypatch.setitem(
        REPRODUCTIONS,
        "none",
        Reproduction("none", "Nothing", "nobody", rules, lambda seed, lab: Measured(values, {}), CHART),
    )
    record = reproduce(["none"])
    assert [row["verdict"] for row in record.tables["reproductions"]] == ["fail", "pass", "unclear"]
    assert record.reading == [
        "Nothing: reproduced in part. 1 of 3 expectations hold, but not a ≤ 1 (fail: 2), c ≥ 1 (unclear: 1 [0.5, 1.5])."
    ]
    values["b"] = 0.0
    assert reproduce(["none"]).reading[0].startswith("Nothing: not reproduced. 0 of 3 expectations hold, but not a ≤ 1")


def test_training_is_asked_for_by_name_or_all(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "ssmax", "--all"])
    assert ended.value.code == 2
    assert "--all must stand without names, got ssmax" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reproduce(["ssmax"]).spec["names"] == ["ssmax"]
    with pytest.raises(MissingExtraError, match="torch"):
        reproduce(["sinks"])


def test_unknown_names_list_the_known():
    for ask in (reproduce, list_expectations):
        with pytest.raises(InvalidValueError, match=r"unknown reproduction 'ssmx'; known: .*did you mean 'ssmax'\?"):
            ask(["ssmx"])


@pytest.mark.parametrize("arguments", [["ssmax"], ["ssmax", "--list"]])
def test_the_command(capsys, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main(["reproduce", *arguments, "--json"])
    rows = json.loads(capsys.readouterr().out)["reproductions"]
    assert [row["name"] for row in rows] == ["ssmax"] * 3
    assert ("verdict" in rows[0]) == (len(arguments) == 1)
    with pytest.raises(SystemExit):
        main(["reproduce", *arguments])
    assert "Nakanishi 2025" in capsys.readouterr().out
