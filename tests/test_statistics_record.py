"""Row statistics as a record: means that leave out undefined rows, copies that keep everything, equality."""

import copy
import dataclasses
import pickle
from contextlib import nullcontext

import numpy as np
import pytest

from rows_of_noise import blocks_of, statistics_of_noise, take
from sqrtdk import AttentionStatistics, SqrtdkError, attention, backends
from sqrtdk.statistics import ROW_FIELDS, ROW_STATISTICS, Sample


def built_both_ways(rows):
    """The same rows as views of two blocks and from their fields."""
    marks = {"sample": rows.sample, "first_position": rows.first_position}
    from_fields = AttentionStatistics(**{name: getattr(rows, name) for name in ROW_FIELDS}, **marks)
    return AttentionStatistics.from_blocks(*blocks_of(rows), **marks), from_fields


def blind_rows():
    """Rows `[2, 3, 6]`: row 0 sees one key, row 2 nothing."""
    mask = np.ones((6, 6), bool)
    mask[2] = False
    return statistics_of_noise(1, 2, 6, mask=mask)


def test_a_mean_leaves_out_the_rows_that_have_no_such_number():
    rows = blind_rows()
    assert np.isnan(rows.entropy_ratio.mean())
    defined = rows.entropy_ratio[..., [1, 3, 4, 5]]
    assert rows.mean("entropy_ratio") == pytest.approx(defined.mean(), rel=1e-14)
    # Nothing but zeros and minus infinities in the rows that see nothing: they are no rows of attention.
    assert rows.mean("entropy") == pytest.approx(np.delete(rows.entropy, 2, axis=-1).mean(), rel=1e-14)
    assert rows.mean("max_logit") == pytest.approx(np.delete(rows.max_logit, 2, axis=-1).mean(), rel=1e-14)
    assert rows.mean("visible_keys") == np.mean([1, 2, 0, 4, 5, 6])
    assert isinstance(rows.mean("entropy_ratio"), np.float64)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3, (0, 2), (-1, 0), (0, 1, 2), ()])
def test_axes_are_numpys(axis):
    rows = blind_rows()
    expected = np.nanmean(np.where(rows.visible_keys > 1, rows.saturation_index, np.nan)[..., [1, 3, 4, 5]], axis=axis)
    result = rows.mean("saturation_index", axis=axis)
    if axis in (2, -1, (0, 2), (-1, 0), (0, 1, 2)):
        np.testing.assert_allclose(result, expected, rtol=1e-14)
    else:  # the rows that are undefined for every head and entry stay so
        np.testing.assert_allclose(result[..., [1, 3, 4, 5]], expected, rtol=1e-14)
        assert np.isnan(result[..., [0, 2]]).all()


def test_the_mean_of_no_row_is_nan():
    q = np.zeros((2, 3, 1, 4))
    rows = attention(q, q, q).statistics
    assert np.isnan(rows.mean("entropy_ratio"))
    assert np.isnan(rows.mean("entropy_ratio", axis=-1)).tolist() == [[True] * 3] * 2
    assert rows.mean("max_weight") == 1.0
    nothing = np.zeros((2, 0, 4))
    assert np.isnan(attention(nothing, nothing, nothing).statistics.mean("entropy"))


def test_every_row_statistic_has_a_mean():
    rows = statistics_of_noise(0, 2, 5)
    for name in ROW_STATISTICS:
        values = np.asarray(getattr(rows, name), dtype=np.float64)
        assert rows.mean(name) == pytest.approx(values[np.isfinite(values)].mean(), rel=1e-14, abs=1e-300), name
    derived = {
        name for name, item in vars(AttentionStatistics).items() if isinstance(item, property) and name[0] != "_"
    }
    assert set(ROW_STATISTICS) == {*ROW_FIELDS, *derived} - {"shape", "positions"}


def test_a_wrong_mean_says_what_is_meant():
    rows = statistics_of_noise(0, 2, 5)
    with pytest.raises(SqrtdkError, match=r"unknown row statistic 'entropy_ration'; .*did you mean 'entropy_ratio'\?"):
        rows.mean("entropy_ration")
    with pytest.raises(SqrtdkError, match=r"unknown row statistic 'shape'; known: effective_keys, "):
        rows.mean("shape")
    for axis in (3, -4, (0, 5), (0, 0), (1, -2)):
        with pytest.raises(SqrtdkError, match=r"axis must name different axes from -3 to 2, got "):
            rows.mean("entropy", axis=axis)
    for axis in ("rows", 1.0, True, [0]):
        with pytest.raises(SqrtdkError, match=r"axis must be an integer, a tuple of integers or None, got "):
            rows.mean("entropy", axis=axis)


@pytest.mark.parametrize("way", [0, 1], ids=["blocks", "fields"])
def test_copies_keep_everything(way):
    rows = built_both_ways(take(blind_rows(), [0, 2, 5]))[way]
    for other in (
        dataclasses.replace(rows),
        copy.copy(rows),
        copy.deepcopy(rows),
        pickle.loads(pickle.dumps(rows)),
        AttentionStatistics(**dataclasses.asdict(rows)),
        rows.numpy(),
    ):
        assert other == rows
        assert other.sample.positions.tolist() == [0, 2, 5]
        assert other.sample.rows == 6
        assert other.first_position == 0
        assert other.mean("entropy") == pytest.approx(rows.mean("entropy"), rel=1e-14)
    softer = dataclasses.replace(rows, entropy=rows.entropy + 1)
    assert softer.sample is rows.sample
    np.testing.assert_array_equal(softer.entropy, rows.entropy + 1)
    assert not hasattr(rows, "entropie")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.entropy = None


def test_rows_are_equal_if_all_their_bits_are():
    rows = blind_rows()
    blocks, from_fields = built_both_ways(rows)
    assert np.isnan(rows.logit_mean).any()
    assert rows == blocks == from_fields == rows
    assert rows != statistics_of_noise(1, 2, 6)
    assert rows != 3
    for name in ROW_FIELDS:
        changed = getattr(rows, name).copy()
        changed[1, 2, 3] = np.nextafter(changed[1, 2, 3], 99) if changed.dtype.kind == "f" else 99
        assert dataclasses.replace(rows, **{name: changed}) != rows, name
    assert dataclasses.replace(rows, sink_weight=-rows.sink_weight) != rows  # −0
    assert dataclasses.replace(rows, entropy=rows.entropy.astype(np.float32)) != rows
    assert dataclasses.replace(rows, entropy=rows.entropy[:1]) != rows
    assert dataclasses.replace(rows, first_position=1) != rows
    assert AttentionStatistics.from_blocks(*(block[..., :0] for block in blocks_of(rows))) != rows
    with pytest.raises(TypeError, match="unhashable"):
        hash(rows)


def test_equal_rows_are_the_same_sample():
    rows = statistics_of_noise(0, 2, 8)
    some = take(rows, [1, 4, 6])
    assert some == take(rows, [1, 4, 6])
    for sample in (None, Sample(np.array([1, 4, 7]), 8), Sample(np.array([1, 4, 6]), 9)):
        assert dataclasses.replace(some, sample=sample) != some


def test_a_sample_has_its_positions_and_the_number_of_all_rows():
    rows = statistics_of_noise(0, 2, 8)
    assert rows.sample is None
    some = take(rows, [1, 4, 6])
    assert some.sample.positions.tolist() == [1, 4, 6]
    assert some.sample.rows == 8
    np.testing.assert_array_equal(some.entropy_ratio, rows.entropy_ratio[..., [1, 4, 6]])
    assert rows.numpy() is rows


@pytest.mark.parametrize("backend", [backends.REFERENCE, None])
def test_rows_know_their_positions_where_queries_and_keys_share_them(backend):
    q, k = np.ones((2, 3, 4)), np.ones((2, 7, 4))

    def first_position(queries, **options):
        return attention(queries, k, k, **options).statistics.first_position

    with backends.use(backend) if backend else nullcontext():
        assert first_position(k) == first_position(k, causal=True) == 0
        assert first_position(q, causal=True, causal_offset=4) == 4
        assert first_position(q, window=(1, 1), causal_offset=-2) == -2
        assert first_position(q) is first_position(q, mask=np.ones((3, 7), bool)) is None
        assert first_position(np.ones((2, 0, 4)), causal=True, causal_offset=5) == 5


def test_positions_are_those_of_the_rows():
    rows = dataclasses.replace(statistics_of_noise(0, 2, 5), first_position=-3)
    assert rows.positions.tolist() == [-3, -2, -1, 0, 1]
    assert rows.positions.dtype == np.int64
    assert take(rows, [1, 4]).positions.tolist() == [-2, 1]
    assert dataclasses.replace(rows, first_position=None).positions is None
