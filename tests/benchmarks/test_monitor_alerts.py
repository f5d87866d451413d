"""Forced failures and healthy runs: the table of the documentation, and one run of each kind."""

import json
from pathlib import Path

import pytest

from benchmarks.monitor_alerts import FAILURES, HEALTHY, SEEDS, train, write_table

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "monitor-alerts.json").read_text(encoding="utf-8"))


def test_the_page_has_the_table_of_the_record():
    assert write_table(RECORD) in (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")


def test_every_failure_is_alerted_within_20_steps_with_its_cause_and_no_healthy_run_is():
    by_case = {case.name: [run for run in RECORD["runs"] if run["case"] == case.name] for case in (*FAILURES, *HEALTHY)}
    assert {len(runs) for runs in by_case.values()} == {len(SEEDS)}
    for case in FAILURES:
        assert all(0 <= run["alert_at"] - run["shown_at"] <= 20 for run in by_case[case.name]), case.name
    assert [run["alerts"] for case in HEALTHY for run in by_case[case.name]] == [[]] * 20


@pytest.mark.slow
@pytest.mark.parametrize("case", [FAILURES[2], FAILURES[5], HEALTHY[1]], ids=lambda case: case.name)
def test_a_run_is_the_one_of_the_record(case):
    run = train(case, 0)
    (recorded,) = (one for one in RECORD["runs"] if (one["case"], one["seed"]) == (case.name, 0))
    assert (run["shown_at"], run["alert_at"]) == (recorded["shown_at"], recorded["alert_at"])
    assert bool(run["alerts"]) == bool(recorded["alerts"])


def test_a_late_alert_shows_in_the_table():
    run = {"case": "a", "shown_at": 5, "alert_at": 45, "alerts": ["x"], "largest_spread": 200.0}
    record = {"failures": ["a"], "healthy": ["b"], "runs": [run, {**run, "alert_at": None}, {**run, "case": "b"}]}
    table = write_table(record)
    assert "| a | 2 | 5 | 1 | 40 |" in table
    assert "| b | 1 | 200 | 1 |" in table
