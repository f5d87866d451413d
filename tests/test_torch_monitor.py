"""Monitoring training: looks now and then, alerts, clipping; in a loop, on several ranks, in a Trainer."""

import json
import warnings

import numpy as np
import pytest
import torch

from sqrtdk import SqrtdkError
from sqrtdk.errors import SqrtdkWarning
from sqrtdk.torch import Monitor, watch
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
    assert (entry["alerts"], entry["clipped"]) == ([], None)


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
    with Monitor(plain, to=Looks(), every=1000, first_step=1) as monitor:
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
        with pytest.warns(SqrtdkWarning, match="no call of the model in training mode at step 1"):
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
        assert len(path.read_text().splitlines()) == 2  # flushed before it is closed
    with Monitor(model, to=str(path), every=2, first_step=3) as monitor:
        train(model, monitor, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]


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
    grown = [alert for alert in alerts if alert.finding.rule == "logit-growth" and alert.finding.layer == "layers.1"]
    assert grown
    for head in {alert.finding.head for alert in grown}:
        raised = [alert.is_raised for alert in grown if alert.finding.head == head]
        assert raised == [at % 2 == 0 for at in range(len(raised))]  # none twice without being cleared between
    assert "the length of q grew most" in grown[0].finding.cause
    assert {finding.rule for finding in standing} >= {"logit-growth"}
    written = [alert for _, entry in looks for alert in entry["alerts"]]
    assert [one["rule"] for one in written] == [alert.finding.rule for alert in alerts]
    looks, _, _, clipped = run(clip=80.0)
    assert largest[-1] > 150
    assert max(clipped[1:]) < 110  # of the weights that a clip left and one step has moved
    assert any(entry["clipped"]["heads"] for _, entry in looks)


def test_alerts_warn_by_default():
    model = make_model()
    model.layers[0].q_proj.bias.data[0] = torch.nan
    with Monitor(model, to=Looks(), every=1) as monitor:
        model(X)
        with pytest.warns(SqrtdkWarning, match="step 0, raised: error: non-finite-rows in layers.0"):
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
        ({"clip": 0.0}, "clip must be a threshold above 0"),
    ]:
        with pytest.raises(SqrtdkError, match=message):
            Monitor(model, **{"to": Looks(), **options})
    with pytest.raises(SqrtdkError, match="model must be"):
        Monitor(None, to=Looks())


def monitor_on_rank(rank, world):
    """What a rank of a data-parallel run writes and has afterwards; ranks have other data."""
    model, looks = torch.nn.parallel.DistributedDataParallel(make_model()), Looks()
    torch.manual_seed(rank)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, to=looks, every=1, clip=30.0) as monitor:
        for _ in range(2):
            (model((1 + rank) * torch.randn(2, 64, WIDTH)).square().mean()).backward()
            optimiser.step()
            optimiser.zero_grad()
            monitor.step()
    return [(step, entry["layers"]["layers.0"]["max_logit"], entry["clipped"]) for step, entry in looks], [
        parameter.detach().numpy() for parameter in model.parameters()
    ]


@pytest.mark.long
def test_ranks_look_together_clip_alike_and_the_first_one_writes(tmp_path):
    from test_torch_distributed import run_ranks

    (first, weights), (second, others) = run_ranks(tmp_path, 2, monitor_on_rank)
    assert second == []
    assert [step for step, *_ in first] == [0, 1]
    assert first[0][2]["heads"]
    largest = max(head["before"] for head in first[0][2]["heads"] if head["layer"] == "layers.0")
    assert largest == pytest.approx(max(first[0][1]), rel=1e-4)  # of all ranks, as the numbers are
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)


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

    def run(looks, steps, **options):
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
        monitor = Monitor(model, to=looks, every=2)
        trainer = transformers.Trainer(
            model, args, train_dataset=data, eval_dataset=data[:4], callbacks=[monitor.callback()]
        )
        trainer.train(**options)

    looks = Looks()
    run(looks, 6)
    assert looks.steps == [0, 2, 4]
    assert list(looks[0][1]["layers"]) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert all(len(entry["layers"]["transformer.h.0.attn"]["max_logit"]) == 2 for _, entry in looks)
    looks = Looks()
    run(looks, 8, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert looks.steps == [4, 6]
