"""Row statistics as tensors: the same numbers as in NumPy, where the tensors are, without a copy to the host."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sqrtdk.torch  # noqa: E402
from sqrtdk import AttentionStatistics, HeadSummary, SqrtdkError, attention, theory  # noqa: E402
from sqrtdk.statistics import ROW_FIELDS, ROW_STATISTICS, Sample  # noqa: E402

FIELDS = ROW_FIELDS
DERIVED = sorted({*ROW_STATISTICS} - set(FIELDS))


def rows_in_numpy(seed=0, sharpness=3.0):
    """Rows of 3 heads, sharp and flat, among them rows that see one key or nothing."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, 2, 3, 9, 4))
    mask = np.ones((9, 9), bool)
    mask[3] = False
    return attention(sharpness * q, k, v, causal=True, mask=mask, sinks=[0.0, -1.0, 2.0]).statistics


def blocks_of(rows, device="cpu", dtype=torch.float64):
    counts = torch.tensor(np.stack([getattr(rows, name) for name in FIELDS[:2]]), device=device)
    numbers = torch.tensor(np.stack([getattr(rows, name) for name in FIELDS[2:]]), device=device, dtype=dtype)
    return counts, numbers


def as_tensors(rows, **options):
    return AttentionStatistics.from_blocks(*blocks_of(rows), **options)


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 30.0])
def test_derived_numbers_are_those_of_numpy(name, sharpness):
    rows = rows_in_numpy(sharpness=sharpness)
    result = getattr(as_tensors(rows), name)
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.float64
    # An ulp: the two libraries round cubes and logarithms differently.
    np.testing.assert_allclose(result.numpy(), getattr(rows, name), rtol=5e-16, atol=0.0)


def test_one_hot_rows_keep_their_small_numbers():
    k = np.array([[300.0], [0.0], [0.0]])
    rows = as_tensors(attention(np.ones((1, 1)), k, np.zeros((3, 1)), scale=1.0).statistics)
    assert 0 < float(rows.jacobian_trace) < 1e-129


def test_fields_are_views_of_the_blocks():
    counts, numbers = blocks_of(rows_in_numpy())
    rows = AttentionStatistics.from_blocks(counts, numbers)
    for at, name in enumerate(FIELDS):
        block = counts[at] if at < 2 else numbers[at - 2]
        assert getattr(rows, name).data_ptr() == block.data_ptr(), name
    assert rows.shape == (2, 3, 9)


def test_numbers_stay_on_their_device_and_in_their_precision():
    counts, numbers = blocks_of(rows_in_numpy(), device="meta", dtype=torch.float32)  # MPS has no float64
    rows = AttentionStatistics.from_blocks(counts, numbers)
    for name in (*DERIVED, *FIELDS[2:]):
        result = getattr(rows, name)
        assert (result.device.type, result.dtype, result.shape) == ("meta", torch.float32, (2, 3, 9)), name


@pytest.mark.slow
def test_derived_numbers_are_traced_without_a_break():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def derive(counts, numbers, positions):
        rows = AttentionStatistics.from_blocks(counts, numbers, sample=Sample(positions, counts.shape[-1]))
        return rows, [getattr(rows, name) for name in DERIVED]

    rows = rows_in_numpy()
    traced, derived = derive(*blocks_of(rows), torch.arange(9))
    assert isinstance(traced, AttentionStatistics)
    assert traced.sample.rows == 9
    for name, result in zip(DERIVED, derived, strict=True):
        torch.testing.assert_close(result, getattr(as_tensors(rows), name), rtol=1e-15, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("lazily", [True, False])
def test_tensors_come_to_numpy_whole(lazily):
    rows = rows_in_numpy()
    sample = Sample(torch.arange(9), 40)
    tensors = as_tensors(rows, sample=sample, first_position=3)
    if not lazily:
        tensors = dataclasses.replace(tensors)
        assert "_blocks" not in vars(tensors)
    result = tensors.numpy()
    for name in FIELDS:
        assert isinstance(getattr(result, name), np.ndarray)
        assert getattr(result, name).dtype == (np.int64 if name in FIELDS[:2] else np.float64)
        np.testing.assert_array_equal(getattr(result, name), getattr(rows, name), err_msg=name)
    assert isinstance(result.sample.positions, np.ndarray)
    assert (result.sample.positions.tolist(), result.sample.rows, result.first_position) == (list(range(9)), 40, 3)


def test_numpy_detaches():
    counts, numbers = blocks_of(rows_in_numpy())
    result = AttentionStatistics.from_blocks(counts, numbers.requires_grad_()).numpy()
    np.testing.assert_array_equal(result.entropy, rows_in_numpy().entropy)


def test_the_summary_of_tensors_is_that_of_numpy():
    rows = rows_in_numpy()
    assert HeadSummary.of(as_tensors(rows, first_position=0)) == HeadSummary.of(rows)
    some = HeadSummary.of(as_tensors(rows, sample=Sample(torch.arange(9), 40)))
    assert (some.rows_seen.tolist(), some.rows_in_all.tolist(), some.is_sample) == ([18] * 3, [80] * 3, True)


@pytest.mark.parametrize("axis", [None, -1, 1, (0, 2), ()])
@pytest.mark.parametrize("name", ROW_STATISTICS)
def test_means_are_those_of_numpy(name, axis):
    rows = rows_in_numpy()
    result = as_tensors(rows).mean(name, axis=axis)
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result.numpy(), rows.mean(name, axis=axis), rtol=1e-14)


@pytest.mark.slow
def test_means_stay_on_their_device_and_are_traced():
    counts, numbers = blocks_of(rows_in_numpy(), device="meta", dtype=torch.float32)
    result = AttentionStatistics.from_blocks(counts, numbers).mean("entropy_ratio", axis=-1)
    assert (result.device.type, result.dtype, result.shape) == ("meta", torch.float32, (2, 3))

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def average(counts, numbers):
        return AttentionStatistics.from_blocks(counts, numbers).mean("entropy_ratio", axis=(0, -1))

    rows = rows_in_numpy()
    expected = as_tensors(rows).mean("entropy_ratio", axis=(0, -1))
    torch.testing.assert_close(average(*blocks_of(rows)), expected, rtol=1e-15, atol=0.0)
    with pytest.raises(SqrtdkError, match=r"axis must name different axes from -3 to 2, got 7"):
        as_tensors(rows).mean("entropy", axis=7)


@pytest.mark.parametrize("lazily", [True, False])
def test_tensors_travel_and_compare(lazily):
    rows = as_tensors(rows_in_numpy(), sample=Sample(torch.arange(9), 40))
    if not lazily:
        rows = AttentionStatistics(**{name: getattr(rows, name) for name in FIELDS}, sample=rows.sample)
    for other in (
        dataclasses.replace(rows),
        copy.copy(rows),
        copy.deepcopy(rows),
        pickle.loads(pickle.dumps(rows)),
        AttentionStatistics(**dataclasses.asdict(rows)),
    ):
        assert other == rows
        assert other.sample.rows == 40
        assert torch.equal(other.max_key, rows.max_key)
    assert rows != rows.numpy()
    assert rows != dataclasses.replace(rows, sample=Sample(torch.arange(9) + 1, 40))
    assert rows != dataclasses.replace(rows, entropy=rows.entropy + 1e-9)
    assert rows != dataclasses.replace(rows, entropy=rows.entropy.to("meta"))


def test_the_saturation_index_of_tensors():
    sigma = torch.tensor([8.0, 1.0, 2.0], dtype=torch.float64)
    result = theory.saturation_index(sigma, torch.tensor([1024, 1, 0]))
    assert float(result[0]) == pytest.approx(float(theory.saturation_index(8.0, 1024)), rel=1e-15)
    assert result[1:].isnan().all()
    assert theory.saturation_index(sigma.float(), 1024).dtype == torch.float32


def test_numpy_statistics_do_not_load_torch():
    code = (
        "import sys, numpy as np, sqrtdk\n"
        "rows = sqrtdk.attention(*np.ones((3, 2, 4, 8))).statistics\n"
        "sqrtdk.HeadSummary.of(rows)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_positions_are_on_the_device_of_the_rows():
    rows = as_tensors(rows_in_numpy(), first_position=4)
    assert rows.positions.tolist() == list(range(4, 13))
    counts, numbers = blocks_of(rows_in_numpy(), device="meta")
    positions = AttentionStatistics.from_blocks(counts, numbers, first_position=4).positions
    assert (positions.device.type, positions.dtype, positions.shape) == ("meta", torch.int64, (9,))
    some = as_tensors(rows_in_numpy(), sample=Sample(torch.arange(9) * 2, 40), first_position=4)
    assert some.positions.tolist() == list(range(4, 22, 2))


def test_tensors_show_the_numbers_of_numpy():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 9, 4))
    arrays = attention(q, k, v, causal=True)
    tensors = sqrtdk.torch.attention(*map(torch.from_numpy, (q, k, v)), causal=True)
    assert repr(tensors) == repr(arrays).replace("[2, 3, 9]\n", "[2, 3, 9], tensors on cpu\n")
    assert "tensors on cpu" in tensors._repr_html_()


def test_tensors_without_numbers_show_their_shapes():
    counts, numbers = blocks_of(rows_in_numpy(), device="meta")
    shown = repr(AttentionStatistics.from_blocks(counts, numbers))
    assert shown == "AttentionStatistics of rows [2, 3, 9], tensors on meta, without numbers"
    seen = []

    def look(q):
        result = sqrtdk.torch.attention(q, q, q)
        seen.append(repr(result))
        return result.output

    torch.func.vmap(look)(torch.ones(5, 3, 9, 4))
    assert "AttentionStatistics of rows [3, 9], tensors on cpu, without numbers" in seen[0]
