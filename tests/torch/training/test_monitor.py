"""Monitoring training: observed steps and calls, what is written, and what fails."""

import json
import re
import types
import warnings

import numpy as np
import pytest
import torch

from monitored import TOKENS, Looks, X, make_model, regression, train
from sqrtdk import SqrtdkError
from sqrtdk.diagnosis.trend_rules import spread_of_scores
from sqrtdk.errors import SqrtdkWarning
from sqrtdk.torch import Monitor, watch
from torch_watched import WIDTH, ByHand, Fused, Stack, hooks_now


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_only_calls_with_gradients_that_are_not_paused_belong_to_a_step():
    model, looks = make_model(), Looks()
    with Monitor(model, to=looks, every=1) as monitor:
        model(X)
        with torch.no_grad():
            model(10 * X)  # generation in training mode
        with monitor.paused():
            with monitor.paused():
                model(10 * X)
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
        ({"steps": 3}, r"steps must be a pair \(first, last\), either of them None, got 3"),
        ({"steps": (5, 4)}, "last of steps must be at least 5, got 4"),
        ({"rows": "label"}, "unknown rows 'label'; known: labels"),
        ({"rows": 3}, "rows must be None, .* got int"),
        ({"optimiser": 3}, "optimiser must have param_groups"),
    ]:
        with pytest.raises(SqrtdkError, match=message):
            Monitor(model, **{"to": Looks(), **options})
    with pytest.raises(SqrtdkError, match="model must be"):
        Monitor(None, to=Looks())


def test_only_steps_in_the_range_are_observed_both_ends_included():
    model, looks = make_model(), Looks()
    with Monitor(model, to=looks, every=4, steps=(1, 10)) as monitor:
        for _ in range(14):
            model(X)
            monitor.step()
    assert looks.steps == [1, 2, 4, 8, 10]


def test_a_closed_monitor_stays_closed_in_a_trainers_run():
    model, looks, before = make_model(), Looks(), hooks_now()
    monitor = Monitor(model, to=looks, every=1)
    monitor.close()
    monitor._begin_run(model)
    monitor._begin()
    assert hooks_now() == before
    other = Monitor(model, to=looks, every=1)
    other._end_run()
    other._begin_run(model)  # the Trainer runs again
    other._begin()
    assert hooks_now() != before
    other.close()


class Labelled(Stack):
    """Model with the arguments of a language model."""

    def forward(self, inputs, labels=None, attention_mask=None):
        return super().forward(inputs, attention_mask)


def count_rows(rows, *args, wrap=lambda model: model, **options):
    """Return the rows of a head in each layer, and what was said."""
    torch.manual_seed(0)
    model, looks = Labelled(Fused(), ByHand()), Looks()
    with warnings.catch_warnings(record=True) as said, Monitor(wrap(model), to=looks, every=1, rows=rows) as monitor:
        warnings.simplefilter("always")
        wrap(model)(*args, **options)
        monitor.step()
    (entry,) = (entry for _, entry in looks)
    return [layer["rows"][0] for layer in entry["layers"].values()], [str(one.message) for one in said]


def test_rows_are_chosen_by_labels_or_by_a_function_within_the_attention_mask():
    labels = torch.zeros(X.shape[:2], dtype=torch.long)
    labels[0, :40] = -100  # a prompt
    labels[1] = -100
    mask = torch.ones_like(labels)
    mask[2, 90:] = 0
    number = labels.numel()
    assert count_rows(None, X, labels, mask) == ([number - 6] * 2, [])
    assert count_rows("labels", X, labels, mask) == ([number - TOKENS - 40 - 6] * 2, [])
    assert count_rows("labels", X, labels=labels) == ([number - TOKENS - 40] * 2, [])
    assert count_rows(lambda given: given["labels"] == 0, X, labels) == ([number - TOKENS - 40] * 2, [])
    assert count_rows(lambda given: None, X) == ([number] * 2, [])
    # A function that does not fit is named once, and training goes on with all rows.
    for rows, error in [
        (
            "labels",
            r"InvalidTypeError: the model must be called with labels \[B, L\], got NoneType; give rows= a function",
        ),
        (lambda given: given["targets"], "rows= has no effect: KeyError: 'targets'"),
        (lambda given: given["inputs"], r"must give a boolean mask \[B, L\], got torch.float32 \[4, 96, 16\]"),
    ]:
        counted, said = count_rows(rows, X)
        assert counted == [number] * 2
        assert re.search(error, *said)


def test_rows_are_chosen_for_a_wrapped_model():
    labels = torch.zeros(X.shape[:2], dtype=torch.long)
    labels[1] = -100

    class Wrapper(torch.nn.parallel.DataParallel):
        """Passes arguments on without their names, as data-parallel wrappers do."""

        def forward(self, *inputs, **options):
            return self.module(*inputs, **options)

    assert count_rows("labels", X, labels, wrap=Wrapper) == ([labels.numel() - TOKENS] * 2, [])


def test_labels_of_an_encoder_decoder_model_choose_rows_of_its_decoder():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Fused(), Fused()
            self.config = types.SimpleNamespace(is_encoder_decoder=True)

        def forward(self, inputs, labels):
            return self.decoder(self.encoder(inputs))

    labels = torch.zeros(X.shape[:2], dtype=torch.long)
    labels[:, 50:] = -100
    model, looks = Both(), Looks()
    with Monitor(model, to=looks, every=1, rows="labels") as monitor:
        model(X, labels)
        monitor.step()
    rows = {path: layer["rows"][0] for path, layer in looks[0][1]["layers"].items()}
    assert rows == {"encoder": 4 * TOKENS, "decoder": 4 * 50}


def test_packed_sequences_are_counted_and_measured_as_single_ones():
    class Packed(Fused):
        def forward(self, x, owner):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            places = torch.arange(x.shape[1])
            visible = (owner[:, None, :, None] == owner[:, None, None, :]) & (places[:, None] >= places)
            output = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible)
            return output.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, looks = Packed(), Looks()
    lengths = (50, 30, 16)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    with Monitor(model, to=looks, every=1) as monitor:
        model(X[:1], owner)
        monitor.step()
        for part in X[:1].split(lengths, dim=1):
            model(part, torch.zeros(part.shape[:2]))
        monitor.step()
    packed, single = (entry["layers"][""] for _, entry in looks)
    assert packed["rows"] == single["rows"] == [sum(lengths)] * 4
    for name in ("max_logit", "entropy_ratio", "saturation_index"):
        np.testing.assert_allclose(packed[name], single[name], rtol=1e-3)


FLEXIBLE = {
    "nothing": (None, True),
    "a soft cap": (lambda score, b, h, i, j: 20 * torch.tanh(score / 20), True),
    "a position bias": (lambda score, b, h, i, j: score - 0.1 * (h + 1) * (i - j), True),
    "a square": (lambda score, b, h, i, j: score * score, False),
    "a factor per position": (lambda score, b, h, i, j: score * torch.log(i + 2.0), False),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", FLEXIBLE)
def test_a_flex_layer_beside_another_is_measured_or_named(name, is_compiled):
    from torch.nn.attention.flex_attention import flex_attention

    score, is_known = FLEXIBLE[name]
    attend = torch.compile(flex_attention, backend="eager") if is_compiled else flex_attention

    class Flexible(Fused):
        def forward(self, x, attention_mask=None):
            q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
            return attend(q, k, v, score_mod=score).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    # torch has no gradients of flex_attention on CPUs, so that layer is frozen.
    model, looks = Stack(Flexible().requires_grad_(False), Fused()), Looks()
    with Monitor(model, to=looks, every=1) as monitor:
        regression(model, X).backward()
        monitor.step()
    ((_, entry),) = looks
    reason = {"layers.0": "the score function of flex_attention is more than a factor, a soft cap and a bias"}
    assert list(entry["layers"]) == ["layers.0", "layers.1"][not is_known :]
    assert entry["unseen"] == ({} if is_known else reason)
    assert all(layer["rows"] == [4 * TOKENS] * 4 for layer in entry["layers"].values())
