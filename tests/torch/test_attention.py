"""`sqrtdk.torch.attention` against the NumPy reference on every backend: sizes, masks, scales, strides, dtypes."""

import itertools
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from levels import RUNNING
from sqrtdk import scales
from sqrtdk.torch import attention
from sqrtdk.torch.engines import blocks, choose, tiles
from torch_cases import (
    DTYPES,
    FIELDS,
    assert_as_reference,
    assert_same_bits,
    attend_in_reference,
    draw,
    everything,
    to_array,
    to_tensor,
)

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.filterwarnings("ignore::sqrtdk.errors.FallbackWarning")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys"), [(0, 0), (0, 3), (1, 0), (3, 0), (1, 1), (1, 13), (2, 7), (13, 1), (17, 31)]
)
def test_lengths_that_hit_the_tails(queries, keys, dtype):
    for d_k, d_v in ((1, 3), (3, 1), (4, 0)):
        assert_as_reference(*draw(1, (queries, d_k), (keys, d_k), d_v, dtype))
        q, k, v = draw(2, (2, queries, d_k), (2, keys, d_k), d_v, dtype)
        result = assert_as_reference(q, k, v, causal=True, causal_offset=keys - queries)
        assert result.output.shape == (2, queries, d_v)
        assert result.statistics.shape == (2, queries)
        if keys == 0:
            assert not result.output.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d_k", "d_v"), [(1, 65), (3, 17), (17, 3), (40, 1), (65, 40), (64, 64)])
def test_features_that_are_no_multiple_of_the_lane(d_k, d_v, dtype):
    q, k, v = draw(3, (2, 4, 19, d_k), (2, 2, 23, d_k), d_v, DTYPES[dtype])
    assert_as_reference(q, k, v, causal=True, causal_offset=4)


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [((0, 2, 3, 4), (0, 2, 5, 4)), ((2, 0, 3, 4), (2, 0, 5, 4)), ((2, 0, 3, 4), (2, 2, 5, 4))],
)
def test_nothing_to_do_gives_the_right_shapes(q_shape, k_shape):
    q, k, v = draw(0, q_shape, k_shape, 6)
    result = attention(q, k, v, mask=torch.ones(5, dtype=torch.bool), sinks=torch.zeros(q_shape[-3]), weights=True)
    assert result.output.shape == (*q_shape[:-1], 6)
    assert result.weights.shape == (*q_shape[:-1], 5)
    assert result.statistics.shape == q_shape[:-1]


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (1, 2, 1)], ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)])
def test_ranks_and_grouped_heads(batch, heads, groups):
    q, k, v = draw(3, (*batch, heads, 3, 4), (*batch, groups, 5, 4), 2)
    sinks = torch.linspace(-2, 2, heads, dtype=torch.float64)
    assert_as_reference(q, k, v, sinks=sinks, causal=True, causal_offset=2)


def test_rank_six_and_rank_two():
    q, k, v = draw(4, (2, 1, 2, 4, 3, 4), (2, 1, 2, 2, 5, 4), 2)
    mask = torch.from_numpy(np.random.default_rng(4).random((2, 1, 2, 1, 3, 5)) < 0.6)
    assert_as_reference(q, k, v, mask=mask)
    per_row = torch.linspace(0.5, 2, 3, dtype=torch.float64)
    assert_as_reference(*draw(5, (3, 4), (5, 4), 2), scale=per_row, sinks=per_row[:1])


FULL = (2, 4, 5, 6)
MASK_SHAPES = [shape for rank in range(5) for shape in itertools.product(*[(1, size) for size in FULL[4 - rank :]])]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_every_broadcast_of_a_mask(shape):
    rng = np.random.default_rng(len(shape))
    q, k, v = draw(5, (2, 4, 5, 3), (2, 2, 6, 3), 2)
    boolean = torch.from_numpy(np.asarray(rng.random(shape) < 0.6))
    assert_as_reference(q, k, v, mask=boolean)
    additive = np.where(rng.random(shape) < 0.7, 2.0 * rng.standard_normal(shape), -np.inf)
    assert_as_reference(q, k, v, mask=torch.from_numpy(np.asarray(additive)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_dtype", DTYPES)
def test_additive_masks_of_every_dtype_beside_every_dtype(dtype, mask_dtype):
    q, k, v = draw(6, (2, 2, 3, 4), (2, 2, 4, 4), 2, DTYPES[dtype])
    assert_as_reference(q, k, v, mask=torch.tensor([0.5, -torch.inf, -3.0, 0.0], dtype=DTYPES[mask_dtype]))


def test_a_finite_but_huge_negative_mask_entry_is_a_number_not_a_hole():
    q, k, v = draw(7, (2, 3, 4), (2, 4, 4), 2)
    result = assert_as_reference(q, k, v, mask=torch.tensor([0.0, -1e30, -1e30, 0.0], dtype=torch.float64))
    assert (result.statistics.visible_keys == 4).all()


def test_masks_of_any_strides():
    q, k, v = draw(8, (2, 4, 5, 3), (2, 2, 6, 3), 2)
    base = torch.from_numpy(np.random.default_rng(8).random((2, 4, 7, 13)) < 0.6)
    for mask in (base[:, :, :6, :5].mT, base[:, :1, :5, 1::2].expand(2, 4, 5, 6), base[0, 0, 1, 2:8]):
        assert_as_reference(q, k, v, mask=mask)
        assert_as_reference(q, k, v, mask=torch.where(mask, 0.25, -torch.inf).expand(*mask.shape))


RANGES = [{"causal": True, "causal_offset": offset} for offset in (-7, -2, 0, 1, 9)] + [
    {"window": window, "causal_offset": offset, "causal": causal}
    for window in [(0, 0), (1, None), (None, 0), (2, 1), (None, 2), (9, 9)]
    for offset in (-2, 0, 3)
    for causal in (False, True)
]


@pytest.mark.parametrize("visible", RANGES, ids=str)
def test_causal_ranges_windows_and_their_intersection(visible):
    q, k, v = draw(7, (2, 5, 3), (2, 7, 3), 2)
    assert_as_reference(q, k, v, **visible)
    mask = torch.from_numpy(np.random.default_rng(7).random((5, 7)) < 0.5)
    assert_as_reference(q, k, v, mask=mask, **visible)
    assert_as_reference(q, k, v, mask=torch.where(mask, 0.25, -torch.inf), **visible)


def test_ranges_beyond_any_sequence_are_open():
    q, k, v = draw(9, (2, 5, 3), (2, 5, 3), 2)
    assert_same_bits(attention(q, k, v, window=(sys.maxsize, sys.maxsize)), attention(q, k, v))
    assert_same_bits(attention(q, k, v, causal=True, causal_offset=2**70), attention(q, k, v))
    nothing = attention(q, k, v, causal=True, causal_offset=-(2**70), window=(sys.maxsize, 2**80))
    assert not nothing.output.any()
    assert not nothing.statistics.visible_keys.any()


FEATURES = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([-3.0, 0.0, 2.0, 30.0])},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.7},
    "integer scale": {"scale": 2},
    "NumPy number": {"scale": np.float32(0.75)},
    "scale tensor without axes": {"scale": torch.tensor(0.75)},
    "scale per head": {"scale": torch.tensor([0.1, 0.5, 2.0, -1.0])[:, None]},
    "scale per head, bfloat16": {"scale": torch.tensor([0.1, 0.5, 2.0, -1.0], dtype=torch.bfloat16)[:, None]},
    "scale per row": {"scale": torch.linspace(-1, 3, 20).reshape(4, 5)},
    "scale per row of all heads": {"scale": torch.linspace(-1, 3, 5)[None]},
    "scale per batch, head and row": {"scale": torch.linspace(-1, 3, 40, dtype=torch.float64).reshape(2, 4, 5)},
    "scale per batch": {"scale": torch.tensor([0.3, 1.7])[:, None, None]},
    "everything": everything(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, dtype):
    assert_as_reference(*draw(10, (2, 4, 5, 3), (2, 2, 6, 3), 2, dtype), **FEATURES[feature])


@dataclass(frozen=True)
class OnArrays(scales.Policy):
    """A policy as a user writes one for arrays: positions and counts are given to it as such."""

    name = "on_arrays"

    def factor(self, context):
        assert type(context.positions) is np.ndarray
        return np.sqrt(1.0 + np.abs(context.positions)) * np.log1p(np.asarray(context.visible_keys)) / context.d_k


POLICIES = [
    OnArrays(),
    *(name for name in scales.names() if name != "fixed"),
    "fixed:3",
    scales.Temperature(np.array([0.5, 1.0, 2.0, 4.0])[:, None]),
    scales.LogN(1.5, 0.5),
    scales.Llama4(floor=2.0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_policy(policy, dtype):
    q, k, v = draw(11, (2, 4, 5, 3), (2, 2, 6, 3), 2, dtype)
    mask = torch.from_numpy(np.random.default_rng(11).random((2, 1, 5, 6)) < 0.7)
    assert_as_reference(q, k, v, scale=policy)
    assert_as_reference(q, k, v, scale=policy, mask=mask, causal=True, causal_offset=3)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "mask"),
    [((5, 3), (6, 3), (1, 5, 6)), ((5, 3), (6, 3), (1, 1, 6)), ((5, 3), (0, 3), (5, 0)), ((4, 5, 3), (2, 0, 3), (1,))],
    ids=str,
)
def test_a_policy_counts_keys_under_masks_of_more_axes_than_one_head_has_and_of_none(q_shape, k_shape, mask):
    q, k, v = draw(17, q_shape, k_shape, 2)
    visible = torch.from_numpy(np.random.default_rng(17).random(mask) < 0.7)
    assert_as_reference(q, k, v, mask=visible, scale="log_n")


def test_changing_the_scale_changes_the_output_and_scaling_k_is_scaling_q():
    q, k, v = draw(12, (2, 4, 5, 8), (2, 2, 6, 8), 3)
    plain = attention(q, k, v).output
    assert (attention(q, k, v, scale=1.001 * 8**-0.5).output - plain).abs().max() > 1e-5
    torch.testing.assert_close(attention(q, 2 * k, v).output, attention(2 * q, k, v).output, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(attention(q, k, v, scale=2 * 8**-0.5).output, attention(2 * q, k, v).output)


def misalign(tensor):
    """The same numbers, every element at an odd address."""
    raw = bytearray(b"x" + to_array(tensor).tobytes())
    return torch.frombuffer(raw, dtype=tensor.dtype, offset=1).reshape(tensor.shape)


LAYOUTS = {
    "[B, L, H, D]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "features outermost": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second feature": lambda x: torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2],
    "a slice with an offset": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4))[..., 1:-4, 3:-2],
    "negated lazily": lambda x: torch.complex(x, -x).conj().imag,
    "misaligned": misalign,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_matter(layout, dtype):
    q, k, v = draw(13, (2, 4, 19, 8), (2, 2, 23, 8), 5, dtype)
    turned = [LAYOUTS[layout](x) for x in (q, k, v)]
    for one, other in zip((q, k, v), turned, strict=True):
        torch.testing.assert_close(one, other.clone(), rtol=0, atol=0)
    result = attention(*turned, causal=True, causal_offset=4)
    plain = attention(q, k, v, causal=True, causal_offset=4)
    torch.testing.assert_close(result.output, plain.output, rtol=0, atol=1e-15 if dtype == torch.float64 else 1e-6)
    assert_as_reference(*turned, causal=True, causal_offset=4)


def test_lazily_negated_scale_sinks_and_mask():
    q, k, v = draw(13, (2, 4, 5, 3), (2, 2, 6, 3), 2)
    call = {name: value for name, value in everything(13).items() if name in ("scale", "sinks", "mask")}
    negated = {name: torch._neg_view(-value) for name, value in call.items()}
    assert all(value.is_neg() for value in negated.values())
    assert_same_bits(attention(q, k, v, weights=True, **negated), attention(q, k, v, weights=True, **call))


def test_expanded_and_overlapping_inputs():
    q, k, v = draw(14, (1, 4, 7, 8), (1, 1, 9, 8), 5)
    wide = (q.expand(3, 4, 7, 8), k.expand(3, 2, 9, 8), v[..., :1].expand(3, 2, 9, 5))
    result = assert_as_reference(*wide)
    torch.testing.assert_close(result.output[0], result.output[2], rtol=0, atol=0)
    line = draw(15, (1, 60), (1, 60), 60)[0].flatten()
    overlapping = [line.as_strided((2, 7, 8), (5, 3, 1), start) for start in (0, 9, 20)]
    assert_as_reference(*overlapping)


def test_the_same_tensor_three_times():
    x = draw(16, (2, 3, 7, 8), (2, 3, 7, 8), 8)[0]
    assert_as_reference(x, x, x, causal=True)


# Blocks compute every call here, so the level is not on the path.
@pytest.mark.slow
@pytest.mark.parametrize("backend", RUNNING[:1], indirect=True, scope="module")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("block", [1, 7, 40, 97])
def test_blocks_of_any_size_give_the_same(block, dtype, monkeypatch):
    q, k, v = draw(17, (3, 4, 5, 3), (3, 2, 6, 3), 2, dtype)
    calls = [{}, everything(17), {"mask": torch.from_numpy(np.random.default_rng(17).random((3, 1, 5, 6)) < 0.6)}]
    calls += [{"scale": policy} for policy in ("log_n", "cosine", "qk_norm", "llama4")]
    monkeypatch.setattr(choose, "_WITH_KERNEL", (blocks.BLOCKS,))
    monkeypatch.setattr(choose, "_WITH_REFERENCE", (blocks.BLOCKS,))
    for call in calls:
        whole = attention(q, k, v, weights=True, **call)
        assert whole.engine == "blocks"
        with monkeypatch.context() as small:
            cut = []
            small.setattr(tiles, "BLOCK_ELEMENTS", block)
            small.setattr(blocks, "cut_tiles", lambda *args, cut=cut: cut.extend(tiles.cut_tiles(*args)) or cut)
            split = assert_as_reference(q, k, v, **call)
        assert len(cut) > 3
        torch.testing.assert_close(split.output, whole.output)
        torch.testing.assert_close(split.statistics.entropy, whole.statistics.entropy)


def test_tiles_within_the_groups_of_heads_give_the_same(monkeypatch):
    q, k, v = draw(17, (3, 4, 5, 3), (3, 2, 6, 3), 2)
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", 7)
    for name in ("_WITH_KERNEL", "_WITH_REFERENCE"):
        monkeypatch.setattr(choose, name, (blocks.BLOCKS,))
    assert_as_reference(q, k, v)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_masked_keys_have_no_influence_to_the_bit(poison, dtype):
    q, k, v = draw(18, (2, 4, 5, 8), (2, 2, 21, 8), 3, dtype)
    mask = torch.ones(5, 21, dtype=torch.bool)
    mask[:, 4] = mask[:, 17:] = mask[2] = False
    dirty = [x.clone() for x in (q, k, v)]
    dirty[0][..., 2, :] = poison
    dirty[1][..., 4, 0] = dirty[1][..., 18, :] = dirty[2][..., 4, :] = dirty[2][..., 17, 1] = poison
    for form in (mask, torch.where(mask, 0.5, -torch.inf)):
        for extra in ({}, {"softcap": 2.0}, {"sinks": torch.zeros(4)}, {"scale": "qk_norm"}):
            clean = attention(q, k, v, mask=form, weights=True, **extra)
            assert_same_bits(attention(*dirty, mask=form, weights=True, **extra), clean)
            assert torch.isfinite(clean.output).all()
            assert not clean.output[..., 2, :].any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_an_additive_mask_beyond_the_causal_range_has_no_influence(poison):
    q, k, v = draw(18, (2, 4, 5, 3), (2, 2, 6, 3), 2, torch.float32)
    bias = draw(19, (5, 6), (1, 6), 1, torch.float32)[0]
    dirty = bias.masked_fill(torch.ones(5, 6, dtype=torch.bool).triu(1), poison)
    result, clean = (attention(q, k, v, mask=x, causal=True, causal_offset=0, weights=True) for x in (dirty, bias))
    assert_same_bits(result, clean)
    gradients = []
    for mask in (dirty, bias):
        leaf = mask.clone().requires_grad_()
        output = attention(q, k, v, mask=leaf, causal=True, causal_offset=0).output
        gradients += torch.autograd.grad(output.square().sum(), leaf)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_masked_nan_in_some_rows_only_reaches_the_others():
    q, k, v = draw(19, (2, 5, 3), (2, 5, 3), 2)
    k[1, 3, 0] = torch.nan
    v[0, 4, 1] = torch.inf
    result = attention(q, k, v, causal=True)
    assert torch.isfinite(result.output[1, :3]).all()
    assert torch.isnan(result.output[1, 3:]).all()
    assert torch.isfinite(result.output[0, :4]).all()
    assert torch.isfinite(result.output[0, 4, 0])
    assert result.output[0, 4, 1] == torch.inf


@pytest.mark.parametrize("policy", ["cosine", "qk_norm"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_visible_nan_never_becomes_a_number_by_normalising(policy, poison):
    q, k, v = draw(19, (2, 5, 3), (2, 5, 3), 2)
    q[0, 1, 0] = k[1, 3, 2] = poison
    result = attention(q, k, v, scale=policy, causal=True)
    expected = attend_in_reference(q, k, v, scale=policy, causal=True)
    for one, other in ((result.output, expected.output), (result.statistics.entropy, expected.statistics.entropy)):
        torch.testing.assert_close(one, to_tensor(other), rtol=1e-9, atol=1e-12, equal_nan=True)
    assert torch.isnan(result.output).sum() == 6


def test_large_finite_products_do_not_overflow():
    q, k, v = draw(20, (2, 4, 5, 3), (2, 2, 6, 3), 2, torch.float32)
    assert_as_reference(q * 1e30, k * 1e30, v, scale=1e-60)
    half = draw(20, (2, 4, 5, 3), (2, 2, 6, 3), 2, torch.float16)
    assert_as_reference(half[0] * 200, half[1] * 200, half[2], scale=1e-4)


def test_only_what_is_asked_for_and_the_rest_keeps_its_bits():
    q, k, v = draw(21, (2, 4, 19, 8), (2, 2, 23, 8), 5, torch.float32)
    full = attention(q, k, v, weights=True)
    for statistics, weights in itertools.product((True, False), repeat=2):
        result = attention(q, k, v, statistics=statistics, weights=weights)
        assert (result.statistics is not None) == statistics
        assert (result.weights is not None) == weights
        assert_same_bits(result, full)


def test_batch_entries_do_not_change_each_other():
    q, k, v = draw(22, (3, 4, 19, 8), (3, 2, 23, 8), 5, torch.float64)
    whole = attention(q, k, v)
    alone = attention(q[1:2], k[1:2], v[1:2])
    torch.testing.assert_close(whole.output[1:2], alone.output, rtol=1e-13, atol=1e-14)


def test_weights_add_up_to_what_the_sinks_leave():
    q, k, v = draw(23, (2, 4, 5, 3), (2, 2, 6, 3), 2)
    result = attention(q, k, v, sinks=torch.tensor([-1.0, 0.0, 1.0, 5.0]), weights=True)
    torch.testing.assert_close(result.weights.sum(-1), 1.0 - result.statistics.sink_weight)
    assert 1e-6 < result.statistics.sink_weight.min() < 0.1 < result.statistics.sink_weight.max()


@pytest.mark.parametrize("rows", [1, 3, 18, 19, 400])
@pytest.mark.parametrize("scale", [None, "per head", "per row", "llama4", "cosine"])
def test_sampled_rows_are_rows_of_the_whole(rows, scale):
    q, k, v = draw(24, (2, 4, 19, 8), (2, 2, 23, 8), 5)
    mask = torch.from_numpy(np.random.default_rng(24).random((2, 1, 19, 23)) < 0.8)
    call = everything(24, queries=19, keys=23) | {"mask": mask, "causal_offset": 4}
    per_row = call["scale"]
    call["scale"] = {"per head": per_row[:, :1], "per row": per_row, "llama4": scales.Llama4(2.0)}.get(scale, scale)
    whole = attention(q, k, v, **call)
    result = attention(q, k, v, sample_rows=rows, sample_seed=3, **call)
    positions = result.statistics.sample.positions
    assert result.statistics.sample.rows == 19
    assert result.statistics.shape == (2, 4, min(rows, 19))
    torch.testing.assert_close(result.output, whole.output, rtol=0, atol=0)
    for name in FIELDS:
        expected = getattr(whole.statistics, name)[..., positions]
        torch.testing.assert_close(getattr(result.statistics, name), expected, rtol=1e-9, atol=1e-11, equal_nan=True)


def test_a_result_of_tensors_reads_like_the_one_of_arrays():
    q, k, v = draw(25, (2, 4, 5, 3), (2, 2, 6, 3), 2)
    result, expected = attention(q, k, v), attend_in_reference(q, k, v)
    assert type(result) is type(expected)
    assert type(result.statistics) is type(expected.statistics)
    assert result._fields == ("output", "statistics", "weights")
    torch.testing.assert_close(result.output, to_tensor(expected.output))
