"""Alerts with hysteresis, and a bounded trend."""

import json
from dataclasses import fields

from heads_of_models import set_head
from sqrtdk import diagnose
from sqrtdk.diagnosis.alerts import MOST_POINTS, OBSERVATIONS_TO_CLEAR, Alert, Alerts, Trend
from sqrtdk.diagnosis.findings import Finding, Threshold
from sqrtdk.diagnosis.score_size import CauseSplit


def finding(rule="logit-growth", severity="warning", head=0, score=1.0):
    return Finding(
        rule, severity, "a", 0, head, {"score_max_above_mean": score}, Threshold(1.0, "test"), "It grows.", "Clip."
    )


def states(alerts):
    return [(alert.step, alert.is_raised, alert.heads) for alert in alerts]


def test_an_alert_is_raised_once_and_cleared_after_several_looks_without_it():
    alerts = Alerts()
    seen = []
    present = [0, 1, 1, 0, 1, 0, 0, 0, 0, 1]
    for step, is_there in enumerate(present):
        seen += states(alerts.update(step, [finding()] if is_there else [], ["a"]))
    assert OBSERVATIONS_TO_CLEAR == 3
    assert seen == [(1, True, (0,)), (7, False, (0,)), (9, True, (0,))]
    assert [one.head for one in alerts.standing] == [0]


def test_heads_of_a_layer_share_an_alert_that_the_worst_speaks_for():
    alerts = Alerts()
    findings = [finding(head=0), finding(head=1, score=9.0), finding("entropy-collapse", "info")]
    (first,) = alerts.update(0, findings, ["a"])
    assert (first.heads, first.head, first.step) == ((0, 1), 1, 0)
    assert alerts.update(1, [finding(head=1), finding(head=2)], ["a"]) == []
    (standing,) = alerts.standing
    assert (standing.heads, standing.step) == ((1, 2), 0)
    assert repr(first) == "a, heads 0–1: It grows. Clip. (step 0, warning: logit-growth)"
    entry = first.as_json()
    assert [entry[name] for name in ("state", "rule", "layer", "head", "heads")] == [
        "raised",
        "logit-growth",
        "a",
        1,
        [0, 1],
    ]
    assert Alert.from_json(json.loads(json.dumps(entry))) == first
    assert list(entry) == [item.name for item in fields(Alert)]


def test_what_becomes_severe_is_raised_once_more():
    alerts = Alerts()
    levels = ["warning", "warning", "error", "error", "warning", "error"]
    raised = [alerts.update(step, [finding(severity=level)], ["a"]) for step, level in enumerate(levels)]
    assert [[alert.severity for alert in one] for one in raised] == [["warning"], [], ["error"], [], [], ["error"]]


def test_information_and_layers_that_were_not_observed_clear_nothing():
    alerts = Alerts()
    alerts.update(0, [finding()], ["a"])
    assert [alerts.update(step, [], ["b"]) for step in range(1, 9)] == [[]] * 8
    for step in range(9, 15):
        assert alerts.update(step, [finding(severity="info")] if step % 3 == 0 else [], ["a"]) == []
    assert len(alerts.standing) == 1
    assert len(alerts.update(15, [], ["a"])) == 1


def test_a_rewound_run_forgets_what_came_after():
    alerts = Alerts()
    alerts.update(3, [finding()], ["a"])
    alerts.rewind(4)
    assert len(alerts.standing) == 1
    alerts.rewind(3)
    assert states(alerts.update(3, [finding()], ["a"])) == [(3, True, (0,))]


def test_trend_and_alerts_go_on_after_a_restart():
    kept, restarted = (Trend(), Alerts()), (Trend(), Alerts())
    said = []
    for step in range(12):
        restarted_now = Trend(), Alerts()
        for one, other in zip(restarted_now, restarted, strict=True):
            one.load_state_dict(json.loads(json.dumps(other.state_dict())))
        restarted = restarted_now
        layers = {"a": set_head(score_max=10.0 + 10.0 * step)}
        causes = {"a": CauseSplit.of([1.0 + step], [1.0], [1.0], [1.0 + step])}
        for trend, alerts in (kept, restarted):
            trend.add(step, layers, causes)
            findings = diagnose(layers, history=trend.points, causes=trend.causes)
            said.append(alerts.update(step, findings, layers))
    assert said[::2] == said[1::2]
    assert sum(map(len, said)) == 2


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
    assert short.evidence["score_max_above_mean"] == whole.evidence["score_max_above_mean"]
    trend.add(5, layers, {})  # the run was rewound
    assert [step for step, _ in trend.points] == [step for step in steps if step < 5] + [5]
    trend.add(0, layers, {})  # the run began anew
    assert [step for step, _ in trend.points] == [0]
