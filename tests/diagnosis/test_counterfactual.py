"""Heads at other temperatures, lengths and soft caps, against attention that is really computed so."""

import copy
import json

import numpy as np
import pytest

from sqrtdk import HeadSummary, SqrtdkError, attention, theory
from sqrtdk.diagnosis.counterfactual import ScoreRow, counterfactual

NUMBERS = ("entropy", "entropy_ratio", "saturation_index", "jacobian_trace", "jacobian_norm")


def rows_and_vectors(length=40, heads=2, d_k=8, sharpness=3.0, seed=0):
    q, k, v = np.random.default_rng(seed).standard_normal((3, heads, length, d_k))
    q *= sharpness
    scores = np.einsum("hld,hsd->lhs", q, k) / np.sqrt(d_k)
    rows = [ScoreRow(scores[at, :, : at + 1], place=at) for at in range(length)]  # causal
    return rows, (q, k, v)


def assert_as_computed(result, summary, change, value=None, rtol=1e-9):
    for head in range(summary.heads):
        one = result.of("a", head, change, value)
        assert not one.is_predicted
        for name in NUMBERS:
            assert getattr(one, name) == pytest.approx(summary[name].mean[head], rel=rtol), name


def test_other_temperatures_and_soft_caps_are_those_of_attention_with_them():
    rows, (q, k, v) = rows_and_vectors()
    result = counterfactual({"a": rows}, temperatures=[0.25, 4.0], softcaps=[2.0, None])
    scale = 8**-0.5
    for change, value, options in [
        ("none", None, {}),
        ("temperature", 0.25, {"scale": 4 * scale}),
        ("temperature", 4.0, {"scale": scale / 4}),
        ("softcap", 2.0, {"softcap": 2.0}),
        ("softcap", None, {}),
    ]:
        summary = HeadSummary.of(attention(q, k, v, causal=True, **options).statistics)
        assert_as_computed(result, summary, change, value)


def test_a_shorter_length_is_a_window_of_the_nearest_keys():
    rows, (q, k, v) = rows_and_vectors()
    result = counterfactual({"a": rows}, lengths=[8])
    statistics = attention(q[:, 7:], k, v, causal=True, causal_offset=7, window=(7, None)).statistics
    assert_as_computed(result, HeadSummary.of(statistics), "length", 8.0)
    assert result.of("a", 0, "length", 8.0).rows == 33  # those that see as many


def test_a_longer_length_is_predicted_and_says_so():
    rows, _ = rows_and_vectors(sharpness=1.0)
    result = counterfactual({"a": rows}, lengths=[1000])
    one = result.of("a", 1, "length", 1000.0)
    deviations = [row.scores[1].std() for row in rows if row.scores.shape[1] > 1]
    law = theory.expected_softmax(float(np.sqrt(np.mean(np.square(deviations)))), 1000)
    assert one.is_predicted
    assert one.entropy_ratio == pytest.approx(law.entropy_ratio)
    assert one.jacobian_trace == pytest.approx(1 - law.sum_p2)
    assert one.jacobian_norm is None
    assert "keys 1000 (predicted)" in repr(result)
    assert "2 of them predicted" in repr(result)
    json.dumps(result.as_json(), allow_nan=False)


def test_masks_that_add_and_keys_that_one_head_does_not_see():
    scores, added = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]), np.array([[0.0, -1.0, 0.5]] * 2)
    visible = np.array([[True, True, True], [True, True, False]])
    result = counterfactual({"a": [ScoreRow(scores, added, visible)]}, temperatures=[2.0])
    for head, logits in ((0, [0.5, 0.0, 2.0]), (1, [0.5, 0.0])):
        weights = np.exp(logits) / np.exp(logits).sum()
        assert result.of("a", head, "temperature", 2.0).entropy == pytest.approx(-(weights * np.log(weights)).sum())


def test_a_sharp_row_keeps_its_digits():
    one = counterfactual({"a": [ScoreRow(np.array([[60.0, 0.0, 0.0]]))]}).of("a", 0)
    assert one.jacobian_trace == pytest.approx(4 * np.exp(-60.0), rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": [0.0]}, "each of temperatures must be positive and finite"),
        ({"temperatures": ["warm"]}, "each of temperatures must be a number, got 'warm'"),
        ({"softcaps": [-1.0]}, "each of softcaps must be positive and finite"),
        ({"lengths": [1]}, "lengths must be at least 2"),
        ({"lengths": [2.5]}, "each of lengths must be an integer"),
    ],
)
def test_changes_that_are_none_are_refused(options, message):
    with pytest.raises(SqrtdkError, match=message):
        counterfactual({"a": [ScoreRow(np.zeros((1, 3)))]}, **options)


def test_without_rows_the_way_to_get_them_is_said():
    with pytest.raises(SqrtdkError, match="watch with keep_rows=64"):
        counterfactual({})
    with pytest.raises(SqrtdkError, match="seen must be what watch"):
        counterfactual(3)
    with pytest.raises(SqrtdkError, match="was asked for"):
        counterfactual({"a": [ScoreRow(np.zeros((1, 3)))]}).of("a", 0, "temperature", 2.0)


# From a watched model


def test_a_model_that_runs_at_another_scale_does_what_was_said():
    torch = pytest.importorskip("torch")
    from sqrtdk.torch import watch
    from torch_watched import Fused, make_input

    torch.manual_seed(0)
    model, x = Fused(), make_input()
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    mask[0, 4:] = 0
    with torch.no_grad():
        with watch(model, keep_rows=1000) as seen:
            model(x, attention_mask=mask)
        for factor in (0.5, 3.0):
            softer = copy.deepcopy(model)
            for parameter in softer.q_proj.parameters():
                parameter /= factor
            with watch(softer) as rerun:
                softer(x, attention_mask=mask)
            result = counterfactual(seen, temperatures=[factor])
            for head in range(4):
                one = result.of("", head, "temperature", factor)
                assert one.rows == int(mask.sum())
                for name in NUMBERS:
                    assert getattr(one, name) == pytest.approx(rerun.layers[""][name].mean[head], rel=2e-5), name


@pytest.mark.parametrize("way", ["grouped", "baddbmm", "capped"])
def test_rows_of_attention_by_hand(way):
    torch = pytest.importorskip("torch")
    from sqrtdk.torch import watch
    from torch_watched import ByHand, make_input

    torch.manual_seed(0)
    model = ByHand(way)
    with torch.no_grad(), watch(model, keep_rows=1000) as seen:
        model(make_input())
    result = counterfactual(seen)
    for head in range(4):
        for name in NUMBERS:
            expected = seen.layers[""][name].mean[head]
            assert getattr(result.of("", head), name) == pytest.approx(expected, rel=2e-5), name


@pytest.mark.slow
def test_a_bounded_sample_of_all_calls_is_kept_and_no_random_stream_is_used():
    torch = pytest.importorskip("torch")
    from sqrtdk.torch import watch
    from torch_watched import Fused, Stack, make_input

    model = Stack(Fused(), Fused())
    state = torch.random.get_rng_state()
    with torch.no_grad(), watch(model, keep_rows=16) as seen:
        for seed in range(12):
            model(make_input(seed=seed, tokens=8 + seed))
    assert torch.equal(state, torch.random.get_rng_state())
    assert {path: len(rows) for path, rows in seen.rows.items()} == {"layers.0": 16, "layers.1": 16}
    assert max(row.scores.shape[1] for row in seen.rows["layers.0"]) > 8
    with torch.no_grad(), watch(model) as nothing:
        model(make_input())
    assert nothing.rows == {}
    with pytest.raises(SqrtdkError, match="keep_rows must be at least 1"):
        watch(model, keep_rows=0)
