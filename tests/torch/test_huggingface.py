import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import sqrtdk.torch  # noqa: E402
from sqrtdk.errors import InvalidTypeError, InvalidValueError, MissingExtraError  # noqa: E402
from sqrtdk.torch.huggingface import attend, make_mask, register_huggingface  # noqa: E402

CAUSAL, OPEN, SILENT = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False), SimpleNamespace()


def tensors(queries=7, keys=7, heads=4, groups=2, dtype=torch.float64, d_v=5):
    generator = torch.Generator().manual_seed(11)
    shapes = (2, heads, queries, 8), (2, groups, keys, 8), (2, groups, keys, d_v)
    return [2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def seen(queries, keys, left=None, right=0):
    """Visible pairs when the last query lies on the last key."""
    distance = torch.arange(keys)[None, :] - (torch.arange(queries)[:, None] + keys - queries)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def expect(q, k, v, **options):
    return sqrtdk.torch.attention(q, k, v, statistics=False, **options).output.transpose(1, 2)


def assert_same(result, expected):
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-13)


class TestAttend:
    def test_layout_scale_and_key_value_heads(self):
        q, k, v = tensors()
        output, weights = attend(OPEN, q, k, v, None)
        assert output.shape == (2, 7, 4, 5)
        assert output.is_contiguous()
        assert weights is None
        assert_same(output, expect(q, k, v))
        scaled, _ = attend(OPEN, q, k, v, None, scaling=0.7)
        assert_same(scaled, expect(q, k, v, scale=0.7))
        assert (scaled - output).abs().max() > 1e-2

    @pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 7), (3, 7), (1, 1)])
    @pytest.mark.parametrize("module", [CAUSAL, SILENT], ids=["says so", "says nothing"])
    def test_without_a_mask_a_causal_layer_has_its_ends_aligned(self, queries, keys, module):
        q, k, v = tensors(queries, keys)
        output, _ = attend(module, q, k, v, None)
        assert_same(output, expect(q, k, v, mask=seen(queries, keys)))

    @pytest.mark.parametrize(("module", "is_causal"), [(CAUSAL, False), (OPEN, True)])
    def test_the_argument_is_stronger_than_the_module(self, module, is_causal):
        q, k, v = tensors()
        output, _ = attend(module, q, k, v, None, is_causal=is_causal)
        assert_same(output, expect(q, k, v, mask=seen(7, 7, right=0 if is_causal else None)))

    @pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9)])
    @pytest.mark.parametrize("width", [1, 3, 8, 9, 20])
    def test_a_window_of_w_is_the_query_and_the_w_minus_1_keys_before(self, queries, keys, width):
        q, k, v = tensors(queries, keys)
        output, _ = attend(CAUSAL, q, k, v, None, sliding_window=width)
        assert_same(output, expect(q, k, v, mask=seen(queries, keys, left=width - 1)))
        both, _ = attend(OPEN, q, k, v, None, sliding_window=width)
        assert_same(both, expect(q, k, v, mask=seen(queries, keys, left=width - 1, right=width - 1)))

    def test_a_mask_says_everything(self):
        q, k, v = tensors()
        mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.6
        output, _ = attend(CAUSAL, q, k, v, mask, sliding_window=2, is_causal=True)
        assert_same(output, expect(q, k, v, mask=mask))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_a_finite_minus_infinity_is_invisible(self, dtype):
        q, k, v = tensors(dtype=dtype)
        visible = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.6
        visible[:, :, 3] = False  # eager would make this row uniform
        k, v = k.clone(), v.clone()
        k[:, :, 5], v[:, :, 5], visible[..., 5] = math.nan, math.inf, False
        expected, _ = attend(OPEN, q, k, v, visible)
        for lowest in (torch.finfo(dtype).min, -1e4, -3e4, -math.inf):
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, lowest)
            output, _ = attend(OPEN, q, k, v, mask)
            assert torch.equal(output, expected)
        assert torch.equal(expected[:, 3], torch.zeros_like(expected[:, 3]))

    def test_minus_infinity_of_the_query_in_a_wider_mask(self):
        q, k, v = tensors(dtype=torch.float16)
        visible = seen(7, 7).expand(2, 1, 7, 7).clone()
        visible[:, :, 0] = False
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float16).min)
        assert torch.equal(attend(OPEN, q, k, v, mask)[0], attend(OPEN, q, k, v, visible)[0])

    def test_other_values_of_a_mask_are_added(self):
        q, k, v = tensors()
        mask = torch.randn(2, 4, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        mask[:, :, :, 2] = -1000.0
        assert_same(attend(OPEN, q, k, v, mask)[0], expect(q, k, v, mask=mask))

    @pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
    def test_position_bias_is_added_and_learns(self, kind):
        q, k, v = tensors()
        bias = torch.randn(
            1, 4, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
        )
        mask = None
        if kind != "none":
            mask = seen(7, 7)[None, None]
        if kind == "additive":
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
        output, _ = attend(CAUSAL, q, k, v, mask, scaling=1.0, position_bias=bias)
        closed = bias.masked_fill(~seen(7, 7), -math.inf)
        expected = expect(q, k, v, scale=1.0, mask=closed)
        assert_same(output, expected)
        (wanted,) = torch.autograd.grad(expected.square().sum(), bias)
        (result,) = torch.autograd.grad(output.square().sum(), bias)
        assert_same(result, wanted)
        assert result.abs().max() > 1e-3

    def test_sinks_and_soft_cap(self):
        q, k, v = tensors()
        sinks = torch.tensor([0.0, 1.0, -2.0, 3.0], dtype=torch.float64)
        output, _ = attend(CAUSAL, q, k, v, None, s_aux=sinks, softcap=1.5)
        assert_same(output, expect(q, k, v, causal=True, sinks=sinks, softcap=1.5))
        assert_same(attend(OPEN, q, k, v, None, softcap=0.0)[0], expect(q, k, v))

    def test_weights_where_asked_for(self):
        q, k, v = tensors()
        output, weights = attend(CAUSAL, q, k, v, None, output_attentions=True)
        assert weights.shape == (2, 4, 7, 7)
        shared = v.repeat_interleave(2, dim=1)
        assert_same(output, (weights @ shared).transpose(1, 2))

    def test_dropout(self):
        q, k, v = tensors()
        torch.manual_seed(0)
        first, _ = attend(OPEN, q, k, v, None, dropout=0.5)
        torch.manual_seed(0)
        again, _ = attend(OPEN, q, k, v, None, dropout=0.5)
        assert torch.equal(first, again)
        assert not torch.allclose(first, attend(OPEN, q, k, v, None)[0])


class TestRefusals:
    @pytest.mark.parametrize("argument", ["cache", "indices", "block_indices"])
    def test_arguments_in_place_of_a_mask_are_not_ignored(self, argument):
        with pytest.raises(InvalidValueError, match=f'{argument}: .*attn_implementation="sdpa"'):
            attend(CAUSAL, *tensors(), None, **{argument: object()})

    def test_more_queries_than_keys_without_a_mask(self):
        q, k, v = tensors(7, 3)
        with pytest.raises(InvalidValueError, match=r"attention_mask must be given .* queries \(7\) than keys \(3\)"):
            attend(CAUSAL, q, k, v, None)
        assert_same(attend(OPEN, q, k, v, None)[0], expect(q, k, v))

    @pytest.mark.parametrize(
        ("mask", "error", "text"),
        [
            (torch.ones(2, 7, dtype=torch.bool), InvalidValueError, r"attention_mask must have shape .* got \(2, 7\)"),
            (
                torch.ones(2, 1, 7, 7, dtype=torch.int64),
                InvalidTypeError,
                "attention_mask must be .* got torch.int64",
            ),
            ("padding", InvalidTypeError, "attention_mask must be None or .* got str"),
        ],
    )
    def test_masks(self, mask, error, text):
        with pytest.raises(error, match=text):
            attend(CAUSAL, *tensors(), mask)

    def test_transformers_absent(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingExtraError, match=r'transformers is not installed; .*"sqrtdk\[hf\]"'):
            register_huggingface()

    def test_transformers_without_mask_interface(self, monkeypatch):
        old = ModuleType("transformers")
        old.__version__ = "4.48.0"
        monkeypatch.setitem(sys.modules, "transformers", old)
        with pytest.raises(MissingExtraError, match=r'transformers 4\.48\.0 .*--upgrade "sqrtdk\[hf\]"'):
            register_huggingface()

    @pytest.mark.parametrize("name", ["", "sdpa", "eager", "my_flash", "paged|mine", "somebody/kernel"])
    def test_names_that_mean_something_else(self, name):
        with pytest.raises(InvalidValueError, match=f"name must consist of .*{name!r}".replace("|", r"\|")):
            register_huggingface(name)

    def test_names_are_strings(self):
        with pytest.raises(InvalidTypeError, match="name must be a str, got int"):
            register_huggingface(3)


@pytest.mark.long
class TestRegistration:
    @pytest.fixture(autouse=True)
    def transformers(self):
        return pytest.importorskip("transformers")

    def test_registers_both_functions_and_only_once(self, transformers):
        for _ in range(2):
            register_huggingface()
            register_huggingface("another-name")
        for name in ("sqrtdk", "another-name"):
            assert transformers.AttentionInterface()[name] is attend
            assert transformers.AttentionMaskInterface()[name] is make_mask

    @pytest.mark.parametrize("interface", ["AttentionInterface", "AttentionMaskInterface"])
    def test_takes_no_name_from_anybody(self, transformers, monkeypatch, interface):
        registry = getattr(transformers, interface)
        monkeypatch.setitem(registry._global_mapping, "taken", print)
        with pytest.raises(InvalidValueError, match="'taken' is taken"):
            register_huggingface("taken")
        assert registry()["taken"] is print


@pytest.mark.long
class TestMakeMask:
    @pytest.fixture(autouse=True)
    def masking(self):
        pytest.importorskip("transformers")
        from transformers import masking_utils

        return masking_utils

    @pytest.mark.parametrize(
        ("queries", "keys", "q_offset", "kv_offset", "skipped"),
        [
            (7, 7, 0, 0, True),  # training, prefill
            (1, 7, 6, 0, True),  # one step with a cache that grows
            (3, 7, 4, 0, True),  # several
            (3, 5, 9, 7, True),  # the cache of a window has dropped the first seven keys
            (3, 7, 0, 0, False),  # a cache of fixed size
            (1, 7, 3, 0, False),
            (1, 7, torch.tensor(6), 0, False),
        ],
    )
    @pytest.mark.parametrize("padding", [None, "none", "left", "right", "short"])
    def test_none_means_causal_with_ends_aligned(self, masking, queries, keys, q_offset, kv_offset, skipped, padding):
        padded = None
        if padding is not None:
            padded = torch.ones(2, kv_offset + keys - (padding == "short"), dtype=torch.bool)
            if padding in ("left", "right"):
                padded[1, kv_offset if padding == "left" else -1] = False
        given = {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": padded}
        mask = make_mask(2, queries, keys, **given)
        whole = masking.sdpa_mask(2, queries, keys, **given, allow_is_causal_skip=False)
        assert (mask is None) == (skipped and padding in (None, "none"))
        assert torch.equal(seen(queries, keys).expand(2, 1, -1, -1) if mask is None else mask, whole)

    def test_a_window_that_hides_something_is_in_the_mask(self, masking):
        def window(width):
            return make_mask(
                1, 7, 7, mask_function=masking.sliding_window_causal_mask_function(width), local_size=width
            )

        assert torch.equal(window(3)[0, 0], seen(7, 7, left=2))
        assert window(8) is None

    def test_other_patterns_are_written_out(self, masking):
        mask = make_mask(
            1,
            7,
            7,
            mask_function=masking.packed_sequence_mask_function(torch.tensor([[0] * 4 + [1] * 3])),
            allow_is_causal_skip=False,
        )
        assert mask[0, 0, 0].tolist() == [True] * 4 + [False] * 3

    def test_bidirectional_masks(self, masking):
        options = {
            "mask_function": masking.bidirectional_mask_function,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": True,
        }
        padding = torch.ones(2, 7, dtype=torch.bool)
        assert make_mask(2, 7, 7, attention_mask=padding, **options) is None
        padding[1, 5:] = False
        mask = make_mask(2, 7, 7, attention_mask=padding, **options)
        assert torch.equal(mask, padding[:, None, None].expand(2, 1, 7, 7))
