"""Monitoring training: looks now and then, alerts, clipping; in a loop, on several ranks, in a Trainer."""

import datetime
import json
import warnings

import numpy as np
import pytest
import torch

from ranks import run_ranks
from sqrtdk import SqrtdkError
from sqrtdk.diagnosis.trend_rules import spread_of_scores
from sqrtdk.errors import SqrtdkWarning
from sqrtdk.torch import Monitor, StopTraining, watch
from torch_watched import WIDTH, ByHand, Fused, Stack, hooks_now, make_input

TOKENS = 96
X = make_input(batch=4, tokens=TOKENS, seed=1)


class Looks(list):
    def __call__(self, step, entry):
        self.append((step, entry))

    @property
    def steps(self):
        return [step for step, _ in self]


def make_model():
    torch.manual_seed(0)
    return Stack(ByHand(), Fused())


def train(model, monitor, steps, parts=1, rate=1e-3, loss=None):
    """Adam on a regression; a step has several micro-batches if asked."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        for part in X.chunk(parts):
            (loss or regression)(model, part).backward()
        optimiser.step()
        optimiser.zero_grad()
        monitor.step()


def regression(model, x):
    return (model(x) - x.roll(1, 1)).square().mean()


def test_one_step_in_every_few_is_looked_at_micro_batches_together():
    model, looks = make_model(), Looks()
    with Monitor(model, to=looks, every=3, first_step=7) as monitor:
        train(model, monitor, 6, parts=2)
    assert looks.steps == [9, 12]
    model = make_model()
    with watch(model) as seen:
        for part in X.chunk(2):
            model(part)
    looks = Looks()
    with Monitor(model, to=looks, every=100) as monitor:
        train(model, monitor, 1, parts=2)
    ((step, entry),) = looks
    assert step == 0
    assert list(entry["layers"]) == ["layers.0", "layers.1"]
    for path, summary in seen.layers.items():
        layer = entry["layers"][path]
        np.testing.assert_allclose(layer["max_logit"], summary["max_logit"].largest, rtol=1e-4)
        np.testing.assert_allclose(layer["entropy_ratio"], summary["entropy_ratio"].mean, rtol=1e-4)
        np.testing.assert_allclose(layer["saturation_index"], summary["saturation_index"].mean, rtol=1e-4)
        np.testing.assert_allclose(layer["alignment"], seen.causes[path].alignment, rtol=1e-4)
        assert len(layer["pattern"]) == 4
        assert "not enough data" not in layer["pattern"]
        np.testing.assert_allclose(layer["score_spread"], spread_of_scores(summary), rtol=1e-4)
        assert layer["rows"] == summary.rows_seen.tolist()
        assert layer["sink_weight"] == [0.0] * 4
    assert (entry["alerts"], entry["clipped"], entry["skipped"], entry["restart"]) == ([], None, False, None)


def test_training_is_the_same_to_the_bit_and_nothing_stays_behind():
    plain, watched = make_model(), make_model()
    before = hooks_now()
    with Monitor(watched, to=Looks(), every=2) as monitor:
        train(watched, monitor, 4)
        assert hooks_now() != before
    assert hooks_now() == before
    monitor.close()
    with pytest.raises(SqrtdkError, match="after close"):
        monitor.step()
    with Monitor(plain, to=Looks(), every=1000, first_step=11) as monitor:
        train(plain, monitor, 4)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_calls_of_one_module_are_layers_and_clipped_once():
    torch.manual_seed(0)
    model, looks = Stack(Fused()), Looks()
    with Monitor(model, to=looks, every=1, clip=1.0) as monitor:
        model(X)
        monitor.step()
    ((_, entry),) = looks
    assert list(entry["layers"]) == ["layers.0 (call 0)", "layers.0 (call 1)"]
    one, other = (layer["max_logit"] for layer in entry["layers"].values())
    assert one != other
    clipped = entry["clipped"]
    assert clipped["of_heads"] == 4
    assert {head["layer"] for head in clipped["heads"]} == {"layers.0"}
    assert len({head["head"] for head in clipped["heads"]}) == len(clipped["heads"]) > 0


def test_evaluation_between_steps_is_not_looked_at():
    model, looks = make_model(), Looks()
    with Monitor(model, to=looks, every=1) as monitor:
        model(X)
        model.eval()
        model(10 * X)
        model.train()
        monitor.step()
        model.eval()
        model(10 * X)
        with pytest.warns(SqrtdkWarning, match="no call of the model in training mode with gradients at step 1"):
            monitor.step()
    model.train()
    with watch(model) as seen:
        model(X)
    largest = [summary["max_logit"].largest for summary in seen.layers.values()]
    np.testing.assert_allclose([layer["max_logit"] for layer in looks[0][1]["layers"].values()], largest, rtol=1e-4)


def test_lines_of_json_survive_and_go_on(tmp_path):
    path, model = tmp_path / "heads.jsonl", make_model()
    with Monitor(model, to=path, every=2) as monitor:
        train(model, monitor, 3)
        assert len(path.read_text().splitlines()) == 3  # flushed before it is closed
    with Monitor(model, to=str(path), every=2, first_step=3) as monitor:
        train(model, monitor, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 4]
    assert [line["restart"] for line in lines] == [None, None, None, "resumed"]
    assert [line["run"] == lines[0]["run"] for line in lines] == [True, True, True, False]


def test_early_steps_are_observed_and_one_more_where_a_head_fell():
    model, looks = make_model(), Looks()
    with Monitor(model, to=looks, every=100) as monitor:
        for step in range(102):
            scale = 20.0 if step == 100 else 1.0
            if step in (*range(11), 20, 50, 99, 100, 101):
                model.layers[0].q_proj.weight.data.mul_(scale)
                regression(model, X)
            monitor.step()
    assert looks.steps == [0, 1, 2, 5, 10, 20, 50, 100, 101]
    ratios = [min(entry["layers"]["layers.0"]["entropy_ratio"]) for _, entry in looks]
    assert ratios[-2] < 0.1 < ratios[0]


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


def test_only_calls_with_gradients_that_are_not_paused_belong_to_a_step():
    model, looks = make_model(), Looks()
    with Monitor(model, to=looks, every=1) as monitor:
        model(X)
        with torch.no_grad():
            model(10 * X)  # generation in training mode
        with monitor.paused():
            model(10 * X)
        monitor.step()
        model(X)
        monitor.step(skipped=True)
    rows = [entry["layers"]["layers.0"]["rows"] for _, entry in looks]
    assert rows == [[X.shape[0] * TOKENS] * 4] * 2
    assert [entry["skipped"] for _, entry in looks] == [False, True]


def test_a_forgotten_step_is_warned_of():
    def run(forget):
        model = make_model()
        optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
        with Monitor(model, to=Looks(), every=1) as monitor:
            for at in range(3):
                for part in X.chunk(2):
                    regression(model, part).backward()
                optimiser.step()
                if not forget or at == 2:
                    monitor.step()

    with pytest.warns(SqrtdkWarning, match=r"weights changed between two calls .* in step 0; call monitor.step\(\)"):
        run(forget=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(forget=False)


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


def test_a_rewound_run_is_marked():
    model, looks = make_model(), Looks()
    with Monitor(model, to=looks, every=1) as monitor:
        state = monitor.state_dict()
        for at in range(4):
            if at == 2:
                monitor._next = 1
            model(X)
            monitor.step()
    assert [(step, entry["restart"]) for step, entry in looks] == [(0, None), (1, None), (1, "rewound"), (2, None)]
    assert state["step"] == 0


def test_layers_are_chosen_by_pattern_and_what_was_not_understood_is_named():
    class Sigmoid(Fused):
        def forward(self, x, attention_mask=None):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            return (torch.sigmoid(q @ k.transpose(-1, -2) / 4) @ v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, looks = Stack(Sigmoid(), Fused()), Looks()
    with Monitor(model, to=looks, every=1) as monitor:
        model(X)
        monitor.step()
    with Monitor(model, to=looks, every=1, layers="*.0") as monitor:
        model(X)
        with pytest.warns(SqrtdkWarning, match="saw no attention"):
            monitor.step()
    (_, whole), (_, part) = looks
    assert (list(whole["layers"]), list(part["layers"])) == (["layers.1"], [])
    assert list(whole["unseen"]) == list(part["unseen"]) == ["layers.0"]
    assert "softmax" in whole["unseen"]["layers.0"]


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


def test_what_fails_is_said_once_and_training_goes_on():
    model, called = make_model(), []

    def broken(step, entry):
        called.append(step)
        raise OSError("disk full")

    with Monitor(model, to=broken, every=1) as monitor, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, monitor, 3)
    assert called == [0, 1, 2]
    assert [str(one.message) for one in said] == [
        "the monitor failed at writing to `to` and goes on: OSError: disk full"
    ]


def test_a_clip_that_cannot_be_is_said_once():
    torch.manual_seed(0)

    class Normed(Fused):
        def split(self, x):
            return 20 * torch.nn.functional.rms_norm(super().split(x), (WIDTH // 4,))

    model, looks = Stack(Normed()), Looks()
    said = pytest.warns(SqrtdkWarning, match="clip=1 could not be kept up: nothing was clipped: layers.0: k is norm")
    with Monitor(model, to=looks, every=1, clip=1.0) as monitor, said:
        train(model, monitor, 2)
    assert [entry["clipped"] for _, entry in looks] == [None, None]


def test_bad_arguments_are_named(tmp_path):
    model = make_model()
    for options, message in [
        ({"to": 3}, "to must be a path"),
        ({"every": 0}, "every must be at least 1"),
        ({"every": 1.5}, "every must be an integer"),
        ({"first_step": -1}, "first_step must be at least 0"),
        ({"on_alert": 3}, "on_alert must be a function"),
        ({"clip": 0.0}, "clip must be positive and finite, got 0.0"),
        ({"stop_on": "bad"}, "unknown stop_on 'bad'; known: any, severe"),
    ]:
        with pytest.raises(SqrtdkError, match=message):
            Monitor(model, **{"to": Looks(), **options})
    with pytest.raises(SqrtdkError, match="model must be"):
        Monitor(None, to=Looks())


def monitor_on_rank(rank, world):
    """What a rank of a data-parallel run writes and has afterwards; ranks have other data."""
    model, looks, alerts = torch.nn.parallel.DistributedDataParallel(make_model()), Looks(), []
    torch.manual_seed(rank)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, to=looks, every=1, clip=30.0, on_alert=alerts.append) as monitor:
        for _ in range(2):
            (model((1 + rank) * torch.randn(2, 64, WIDTH)).square().mean()).backward()
            optimiser.step()
            optimiser.zero_grad()
            monitor.step()
        weights = [parameter.detach().numpy().copy() for parameter in model.parameters()]
        model.module.layers[0].q_proj.bias.data[0] = torch.nan if rank == 1 else 0.0
        with torch.enable_grad():
            model.module(torch.randn(2, 64, WIDTH))
        monitor.step()
    return (
        [(step, entry["layers"]["layers.0"]["max_logit"], entry["clipped"]) for step, entry in looks],
        weights,
        alerts,
    )


@pytest.mark.long
def test_ranks_look_together_clip_alike_and_the_first_one_writes(tmp_path):
    (first, weights, alerts), (second, others, its_alerts) = run_ranks(tmp_path, 2, monitor_on_rank)
    assert second == []
    assert [step for step, *_ in first] == [0, 1, 2]
    assert [alert.rule for alert in alerts][-1] == "non-finite-rows"  # of the second rank's weights
    assert repr(alerts) == repr(its_alerts)
    assert first[0][2]["heads"]
    largest = max(head["before"] for head in first[0][2]["heads"] if head["layer"] == "layers.0")
    assert largest == pytest.approx(max(first[0][1]), rel=1e-4)  # of all ranks, as the numbers are
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)


def observe_other_steps(rank, world):
    model = make_model()
    with Monitor(model, to=Looks(), every=1, first_step=3 + rank) as monitor:
        model(X)
        monitor.step()


def observe_on_the_first_rank_alone(rank, world):
    if rank:
        return None
    from sqrtdk.torch.training import monitor

    monitor.WAIT = datetime.timedelta(seconds=3)
    return observe_other_steps(0, world)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "says"),
    [
        (observe_other_steps, "every rank's monitor must observe the same step, got [3, 4] by rank"),
        (observe_on_the_first_rank_alone, "the monitor of rank 0 waited for the other ranks at step 3 in vain"),
    ],
)
def test_ranks_that_do_not_meet_end_in_an_error_that_names_the_monitor(tmp_path, task, says):
    assert says in run_ranks(tmp_path, 2, task)[0]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_a_trainer_of_transformers(tmp_path):
    """A real run: gradient accumulation, evaluation between steps, resumed from a checkpoint."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    tokens = torch.randint(0, 40, (32, 48), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def run(looks, steps, stop_on=None, model_init=None, **options):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=4,
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        monitor = Monitor(model, to=looks, every=2, on_alert=print, stop_on=stop_on)
        made = None if model_init is None else model
        trainer = transformers.Trainer(
            None if model_init else model,
            args,
            train_dataset=data,
            eval_dataset=data[:4],
            callbacks=[monitor.callback()],
            model_init=model_init,
        )
        trainer.train(**options)
        assert made is not trainer.model
        return trainer

    looks = Looks()
    run(looks, 6)
    assert looks.steps == [0, 1, 2, 4]
    assert list(looks[0][1]["layers"]) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert all(len(entry["layers"]["transformer.h.0.attn"]["max_logit"]) == 2 for _, entry in looks)
    looks = Looks()
    run(looks, 8, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert looks.steps == [4, 6]
    assert [entry["restart"] for _, entry in looks] == ["resumed", None]
    state = json.loads((tmp_path / "run" / "checkpoint-8" / "sqrtdk_monitor.json").read_text())
    assert [step for step, _ in state["trend"]["points"]] == [0, 1, 2, 4, 6]
    # A model that the Trainer made itself is observed, and a severe alert stops it.
    looks = Looks()

    def make_broken():
        model = transformers.GPT2LMHeadModel(config)
        model.transformer.h[0].attn.c_attn.bias.data[0] = torch.nan
        return model

    trainer = run(looks, 6, stop_on="severe", model_init=make_broken)
    assert looks.steps == [0]
    assert trainer.state.global_step == 1
