"""Choice of engines: each says whether it takes a call, one function chooses, and a fallback is never silent."""

import numpy as np
import pytest

import sqrtdk
from oracle import draw
from sqrtdk import backends
from sqrtdk.errors import FallbackWarning, InvalidValueError
from sqrtdk.operation.call import Call, GradientRequest, Wanted, flatten, restore
from sqrtdk.operation.engines.choose import choose
from sqrtdk.operation.engines.kernel import KERNEL
from sqrtdk.operation.engines.reference import REFERENCE_ENGINE
from sqrtdk.operation.visibility import Band


class Refusing:
    """An engine that takes nothing."""

    def __init__(self, name, reason="it is closed"):
        self.name, self.reason = name, reason

    def takes(self, call, wanted, plan):
        return self.reason


CALL = Call(*draw(0, (2, 5, 4), (2, 6, 4), 3))
FREE, FORCED = (backends.plan()._replace(is_forced=forced) for forced in (False, True))


class TestChoose:
    def test_the_first_that_takes_the_call(self):
        assert choose((KERNEL, REFERENCE_ENGINE), CALL, Wanted(), FREE) is KERNEL
        assert choose((Refusing("one"), REFERENCE_ENGINE), CALL, Wanted(), FREE) is REFERENCE_ENGINE

    def test_a_replaced_engine_that_was_asked_for_gives_the_reason(self):
        with pytest.warns(FallbackWarning, match=r"was asked for but .* \(it is closed\); the engine 'reference' does"):
            assert choose((Refusing("one"), REFERENCE_ENGINE), CALL, Wanted(), FORCED) is REFERENCE_ENGINE

    def test_without_any_all_reasons_are_given(self):
        with pytest.raises(InvalidValueError, match=r"it rains \(no engine .*: one: it is closed; two: it rains\)"):
            choose((Refusing("one"), Refusing("two", "it rains")), CALL, Wanted(), FREE)


class TestOneResult:
    @pytest.mark.parametrize("name", ["reference", None])
    def test_the_result_names_its_engine_and_is_still_a_triple(self, name):
        with backends.use(name):
            result = sqrtdk.attention(*CALL[:3])
        assert result.engine == ("reference" if name or backends.current() == "reference" else "kernel")
        output, _, weights = result
        assert output.shape == (2, 5, 3)
        assert weights is None
        assert result._replace(output=None).engine == result.engine

    def test_output_and_weights_come_from_one_pass(self, backend):
        q, k, v = draw(1, (2, 4, 70, 16), (2, 2, 130, 16), 8, np.float32)
        call = {"causal": True, "causal_offset": 60, "sinks": np.array([0.5, -1.0, 3.0, 0.0])}
        result = sqrtdk.attention(q, k, v, weights=True, **call)
        mixed = np.einsum("bhls,bhsv->bhlv", result.weights.astype(np.float64), np.repeat(v, 2, axis=1))
        np.testing.assert_allclose(result.output, mixed, rtol=0, atol=2e-6)
        assert np.array_equal(result.output, sqrtdk.attention(q, k, v, **call).output)
        assert result.engine == ("reference" if backend == "reference" else "kernel")

    def test_gradients_of_the_kernel_are_the_references(self, native):
        q, k, v = draw(2, (2, 4, 70, 16), (2, 2, 130, 16), 8)
        grad = np.random.default_rng(3).standard_normal((2, 4, 70, 8))
        ours = sqrtdk.attention_gradients(q, k, v, grad, softcap=3.0)
        with backends.use("reference"):
            theirs = sqrtdk.attention_gradients(q, k, v, grad, softcap=3.0)
        for one, other in zip(ours[:4], theirs[:4], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


class TestCall:
    def test_a_call_survives_flattening(self):
        call = Call(*CALL[:3], factor=0.3, softcap=2.0, dropout=0.1, band=Band(-3, 4, 7))
        again = restore(flatten(call))
        assert again[:-2] == call[:-2]
        assert again.band == Band(-3, 4, 7)

    @pytest.mark.parametrize(
        "band",
        [
            Band(),
            Band(-2, 1),
            Band(last=0),
            Band(first=3),
            Band(5, 2),
            Band(2 - 2**63, 2**63 - 9),
            Band(2**63 - 9, 2 - 2**63),
        ],
    )
    @pytest.mark.parametrize(("queries", "keys"), [(4, 7), (7, 4), (1, 1), (3, 0)])
    def test_a_band_counts_its_visible_keys(self, band, queries, keys):
        rows = np.arange(queries)
        seen = band.sees(rows, np.arange(keys))
        seen = np.ones((queries, keys), bool) if seen is None else seen
        assert (band.count_keys(rows, keys) == seen.sum(-1)).all()
        for start in range(queries):
            part = slice(start, min(start + 2, queries))
            inside = band.keys_of(part, keys)
            assert not seen[part][:, : inside.start].any()
            assert not seen[part][:, inside.stop :].any()

    def test_requests_ask_for_little_by_default(self):
        assert Wanted() == (False, False, False, False)
        assert GradientRequest(1.0)[1:] == (None, True, False, False)
