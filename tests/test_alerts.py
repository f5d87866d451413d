"""Alerts with hysteresis, a bounded trend, and the places that a monitor writes to."""

import json

import pytest

from heads_of_models import set_head
from sqrtdk import SqrtdkError, diagnose
from sqrtdk.alerts import LOOKS_TO_CLEAR, MOST_POINTS, Alerts, Trend
from sqrtdk.destinations import open_destination
from sqrtdk.findings import Finding, Threshold


def finding(rule="logit-growth", severity="warning", head=0):
    return Finding(rule, severity, "a", 0, head, {"score": 1.0}, Threshold(1.0, "test"), "It grows.", "Clip.")


def states(alerts):
    return [(alert.step, alert.is_raised, alert.finding.head) for alert in alerts]


def test_an_alert_is_raised_once_and_cleared_after_several_looks_without_it():
    alerts = Alerts()
    seen = []
    present = [0, 1, 1, 0, 1, 0, 0, 0, 0, 1]
    for step, is_there in enumerate(present):
        seen += states(alerts.update(step, [finding()] if is_there else []))
    assert LOOKS_TO_CLEAR == 3
    assert seen == [(1, True, 0), (7, False, 0), (9, True, 0)]
    assert [one.head for one in alerts.standing] == [0]


def test_heads_are_told_apart_and_information_raises_nothing():
    alerts = Alerts()
    first = alerts.update(0, [finding(head=0), finding(head=1), finding("entropy-collapse", "info")])
    assert states(first) == [(0, True, 0), (0, True, 1)]
    assert states(alerts.update(1, [finding(head=1), finding(head=2)])) == [(1, True, 2)]
    entry = first[0].as_json()
    assert (entry["state"], entry["rule"], entry["layer"]) == ("raised", "logit-growth", "a")
    assert repr(first[0]).startswith("step 0, raised: warning: logit-growth in a, head 0")


def test_a_trend_is_bounded_keeps_its_ends_and_tells_what_whole_summaries_tell():
    trend, history = Trend(), []
    for step in range(3 * MOST_POINTS):
        layers = {"a": set_head(score_max=0.4 * step)}
        trend.add(step, layers, {})
        history.append((step, layers))
    assert len(trend.points) <= MOST_POINTS
    steps = [step for step, _ in trend.points]
    assert steps == sorted(steps)
    assert (steps[0], steps[1], steps[-1]) == (0, 1, 3 * MOST_POINTS - 1)
    (short,), (whole,) = (diagnose(layers, history=one) for one in (trend.points, history))
    assert short.rule == whole.rule == "logit-growth"
    assert short.evidence["passes_100_at_step"] == pytest.approx(whole.evidence["passes_100_at_step"])
    trend.add(5, layers, {})  # the run began anew
    assert [step for step, _ in trend.points] == [5]


def test_lines_are_appended_and_an_unfinished_one_is_taken_away(tmp_path):
    path = tmp_path / "heads.jsonl"
    write = open_destination(path)
    assert not path.exists()
    write(0, {"layers": {}, "alerts": []})
    write(1, {"layers": {"a": {"max_logit": [1.0, None]}}, "alerts": []})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    with path.open("a") as file:  # what a kill leaves
        file.write('{"step": 2, "layers": {"a"')
    open_destination(str(path))(2, {"layers": {}, "alerts": []})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_file_of_somebody_else_loses_nothing(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not ours")
    open_destination(path)(0, {"layers": {}, "alerts": []})
    assert path.read_text().splitlines()[0] == "not ours"


def test_scalars_and_functions():
    class Writer:
        def __init__(self):
            self.scalars, self.texts = {}, []

        def add_scalar(self, tag, value, step):
            self.scalars[tag, step] = value

        def add_text(self, tag, text, step):
            self.texts.append((tag, text, step))

    writer = Writer()
    (alert,) = Alerts().update(3, [finding()])
    entry = {"layers": {"a": {"max_logit": [1.5, None], "pattern": ["sink", "broad"]}}, "alerts": [alert.as_json()]}
    open_destination(writer)(3, entry)
    assert writer.scalars == {("sqrtdk/a/max_logit/head 0", 3): 1.5}
    assert writer.texts == [("sqrtdk/logit-growth", "raised in a, head 0: It grows.", 3)]
    assert open_destination(print) is print


def test_what_is_no_destination_is_refused(tmp_path):
    with pytest.raises(SqrtdkError, match="to must be a path, an object with add_scalar"):
        open_destination(3)
    with pytest.raises(SqrtdkError, match="there is no directory"):
        open_destination(tmp_path / "nowhere" / "heads.jsonl")
    with pytest.raises(SqrtdkError, match="it is a directory"):
        open_destination(tmp_path)
