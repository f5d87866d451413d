"""Rescues of a missing scale: the table and the sentences of the documentation."""

import json
from pathlib import Path

from benchmarks.monitor_alerts import SEEDS
from benchmarks.rescue import LEARNT, RATES, WAYS, write_table

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "rescue.json").read_text(encoding="utf-8"))


def losses_of(way, rate):
    return sorted(run["loss"] for run in RECORD["runs"] if (run["way"], run["rate"]) == (way, rate))


def test_the_page_has_the_table_of_the_record():
    assert {len(losses_of(way, rate)) for way in WAYS for rate in RATES} == {len(SEEDS)}
    assert write_table(RECORD) in (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")


def test_the_page_says_what_the_losses_say():
    no_scaling, clip, by_spread, lower, norm, scaled = WAYS
    slow = {way: losses_of(way, 1e-2) for way in WAYS}
    assert all(losses[-1] < LEARNT for losses in slow.values())
    assert max(slow[scaled][-1], slow[lower][-1]) < min(slow[way][2] for way in (no_scaling, clip, by_spread, norm))
    fast = {way: losses_of(way, 3e-2) for way in WAYS}
    assert all(fast[way][0] > LEARNT for way in (no_scaling, clip, by_spread, lower, norm))
    assert min(fast[clip][0], fast[by_spread][0]) > 2.6
    assert max(fast[lower][2], fast[norm][2]) < 2.5 < fast[no_scaling][0]
    assert sum(loss < LEARNT for loss in fast[scaled]) == 4


def test_a_run_that_did_not_learn_is_not_counted():
    runs = [{"way": way, "rate": rate, "loss": loss} for way in WAYS for rate in RATES for loss in (0.5, 1.5, 2.0)]
    assert "| scale 1 | 1.50 (0.50 to 2.00) | 1 of 3 | 1.50 (0.50 to 2.00) | 1 of 3 |" in write_table({"runs": runs})
