"""Alerts of a monitor: stopping, restarts, clipping."""

import json
import warnings

import pytest
import torch

from monitored import Looks, X, make_model, regression, train
from sqrtdk import SqrtdkError
from sqrtdk.errors import SqrtdkWarning
from sqrtdk.torch import Monitor, StopTraining
from torch_watched import RIGHT, ByHand, Scaled, Stack


def break_model(model):
    model.layers[0].q_proj.bias.data[0] = torch.nan


def test_a_severe_alert_stops_a_loop_after_it_was_written():
    model, looks = make_model(), Looks()
    with Monitor(model, to=looks, every=1, on_alert=print, stop_on="severe") as monitor:
        model(X)
        monitor.step()
        break_model(model)
        model(X)
        with pytest.raises(StopTraining, match="NaN or infinite") as caught:
            monitor.step()
    assert caught.value.alert.rule == "non-finite-rows"
    assert [alert["rule"] for alert in looks[-1][1]["alerts"]] == ["non-finite-rows"]
    assert "1 alert stands\n  layers.0, head 0: " in repr(monitor)


def test_what_on_alert_raises_to_stop_is_not_swallowed():
    def stop(alert):
        raise StopTraining("enough")

    for model, on_alert, expected in [(make_model(), stop, "enough"), (make_model(), lambda alert: 1 / 0, None)]:
        break_model(model)
        with Monitor(model, to=Looks(), every=1, on_alert=on_alert) as monitor:
            model(X)
            if expected is None:
                with pytest.warns(SqrtdkWarning, match="failed at on_alert and goes on: ZeroDivisionError"):
                    monitor.step()
            else:
                with pytest.raises(StopTraining, match=expected):
                    monitor.step()


def test_a_scale_that_was_not_declared_is_alerted_at_the_first_step():
    torch.manual_seed(0)

    model, alerts = Stack(ByHand()), []
    model.layers[0].way = lambda q, k, v: ((q @ k.transpose(-1, -2)).softmax(-1), v)
    with Monitor(model, to=Looks(), every=1, on_alert=alerts.append) as monitor:
        for _ in range(4):
            model(X)
            monitor.step()
    assert [(alert.step, alert.rule) for alert in alerts] == [(0, "scale-undeclared")] * len(alerts)
    assert alerts
    assert "No scale is applied" in repr(alerts[0])


@pytest.mark.slow
def test_a_run_that_restarts_raises_what_an_uninterrupted_one_raises():
    def run(restart):
        model, looks, alerts = make_model(), Looks(), []
        state = None
        for begin in range(0, 24, 4 if restart else 24):
            with Monitor(model, to=looks, every=1, on_alert=alerts.append) as monitor:
                if state is not None:
                    monitor.load_state_dict(json.loads(json.dumps(state)))
                for _ in range(begin, begin + (4 if restart else 24)):
                    model.layers[1].q_proj.weight.data.mul_(1.05)
                    model(X)
                    monitor.step()
                state = monitor.state_dict()
        return looks, alerts

    (looks, alerts), (again, others) = run(False), run(True)
    assert alerts == others != []
    assert again.steps == looks.steps == list(range(24))
    assert len({entry["run"] for _, entry in again}) == 1
    assert [step for step, entry in again if entry["restart"] == "resumed"] == [4, 8, 12, 16, 20]
    with pytest.raises(SqrtdkError, match=r"state must be what state_dict\(\) returned, got KeyError\('trend'\)"):
        Monitor(make_model(), to=Looks()).load_state_dict({"run": "a", "step": 1})


def longer_queries(model, x):
    """A loss that pays for long queries: logits grow."""
    return regression(model, x) - model.layers[1].q_proj(x).square().mean()


@pytest.mark.slow
def test_growing_logits_are_alerted_once_with_their_cause_and_clipping_stops_them():
    def run(**options):
        model, looks, alerts = make_model(), Looks(), []
        with Monitor(model, to=looks, every=1, on_alert=alerts.append, **options) as monitor:
            train(model, monitor, 24, rate=0.05, loss=longer_queries)
            standing = monitor.alerts
        largest = [max(entry["layers"]["layers.1"]["max_logit"]) for _, entry in looks]
        return looks, alerts, standing, largest

    looks, alerts, standing, largest = run()
    grown = [alert for alert in alerts if alert.rule == "logit-growth" and alert.layer == "layers.1"]
    assert [alert.severity for alert in grown] in (["warning"], ["warning", "error"])  # one for all heads
    assert "the length of q grew most" in grown[0].cause
    assert "qk_clip_" in grown[0].remedy
    assert {alert.rule for alert in standing} >= {"logit-growth"}
    assert [one for _, entry in looks for one in entry["alerts"]] == [alert.as_json() for alert in alerts]
    looks, alerts, _, clipped = run(clip=80.0)
    assert not any("qk_clip_" in alert.remedy for alert in alerts)
    assert largest[-1] > 150
    assert max(clipped[1:]) < 110  # of the weights that a clip left and one step has moved
    assert any(entry["clipped"]["heads"] for _, entry in looks)


def test_alerts_warn_by_default():
    model = make_model()
    model.layers[0].q_proj.bias.data[0] = torch.nan
    with Monitor(model, to=Looks(), every=1) as monitor:
        model(X)
        with pytest.warns(SqrtdkWarning, match=r"layers.0, head 0: .* \(step 0, error: non-finite-rows\)"):
            monitor.step()
        model(X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monitor.step()


def test_a_scale_that_moved_while_it_trained_raises_nothing_at_a_restart():
    torch.manual_seed(0)
    model, alerts = Scaled(scale=RIGHT), []
    with Monitor(model, to=Looks(), every=1, on_alert=alerts.append) as monitor:
        for factor in (1.0, 2.0):
            model.scale = factor * RIGHT  # as a learned scale does
            model(X)
            monitor.step()
        state = json.loads(json.dumps(monitor.state_dict()))
    with Monitor(model, to=Looks(), every=1, on_alert=alerts.append) as monitor:
        monitor.load_state_dict(state)
        model(X)
        monitor.step()
    assert alerts == []
