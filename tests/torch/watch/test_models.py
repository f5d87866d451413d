"""Models of transformers under a watch: through the registry, and in code of their own."""

import numpy as np
import pytest
import torch

from own_models import EVERY
from small_models import BATCH, GROUPED, SIZES, TEXT, TOKENS, VOCABULARY, ZOO, SmallModel, feed, pad, run
from sqrtdk.torch import register_huggingface, watch
from sqrtdk.torch.models.declared import declared_scale
from sqrtdk.torch.watch.replace import FusedWatch
from torch_watched import entropy_per_head

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]
pytest.importorskip("transformers")

RIGHT = 8**-0.5
# The scale of a layer where it is not 1/√dₖ, and what is known of its vectors.
SCALES = {
    "gpt_neo": 1.0,
    "t5": 1.0,
    "gemma2": 5**-0.5,
    "gemma3": 5**-0.5,
    "granite": 0.7,
    "deberta": 24**-0.5,
    "gpt_oss": RIGHT * (0.1 * np.log(32) + 1) ** 2,  # its rotation multiplies q and k by YaRN's factor
}
NORMALISED = {"qwen3", "gemma3"}
ON_THE_QUERY = {"opt", "whisper", "xlm"}


def implementations(model):
    yield "eager"
    if model._supports_sdpa:
        yield "sdpa"


@pytest.mark.parametrize("side", ["left", "none"])
@pytest.mark.parametrize("name", EVERY)
def test_bits_weights_and_scale_of_every_family(name, side):
    small_model = EVERY[name]
    model = small_model.build()
    fed = feed(small_model, side, torch.float32)
    options = {"use_cache": False} if small_model.kind == "decoder" else {}
    with torch.no_grad():
        for implementation in implementations(model):
            model.set_attn_implementation(implementation)
            expected = model(**fed, **options)
            with watch(model) as seen:
                output = model(**fed, **options)
            for key, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value.nan_to_num(), output[key].nan_to_num())
            with watch(model) as again:  # the first call of a model is followed fully, the second is not
                model(**fed, **options)
            assert not seen.unattributed
            assert seen.layers
            assert (again.scales, again.notes, repr(again)) == (seen.scales, seen.notes, repr(seen))
            for record in seen.scales:
                assert record.effective == pytest.approx(SCALES.get(name, RIGHT), rel=1e-3), record
                assert record.normalised == (name in NORMALISED)
                assert declared_scale(model, record).value == pytest.approx(record.effective, rel=1e-3)
                assert (record.at_the_call == 1.0) == (name in ON_THE_QUERY or name in ("gpt_neo", "t5", "deberta"))


def read_attentions(output):
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        yield from output.get(name) or ()


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("name", [name for name in EVERY if EVERY[name].kind in ("decoder", "encoder")])
def test_entropies_are_those_of_the_models_own_weights(name, side):
    small_model = EVERY[name]
    model = small_model.build()
    fed = feed(small_model, side, torch.float32)
    with torch.no_grad():
        weights = model(**fed, output_attentions=True).attentions
        with watch(model) as seen:
            model(**fed)
    rows = pad(side)
    # DeBERTa makes a mask of ones where it is given none.
    assert seen.padding == ("unknown" if side == "none" and name != "deberta" else "attention mask")
    assert len(seen.layers) == len(weights)
    for own, summary in zip(weights, seen.layers.values(), strict=True):
        np.testing.assert_array_equal(summary.rows_seen, int(rows.sum()))
        if name == "gpt_oss":  # its weights leave out the sink; the statistics are of the keys alone
            own = own / own.sum(-1, keepdim=True)
        np.testing.assert_allclose(summary["entropy"].mean, entropy_per_head(own, rows), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "cache"),
    [("gpt2", "dynamic"), ("gpt2", "static"), ("llama", "dynamic"), ("llama", "static"), ("bloom", "dynamic")],
)
def test_generate_with_a_cache(name, cache):
    model = EVERY[name].build()
    ids = feed(EVERY[name], "left", torch.float32)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if cache == "static":
        options["cache_implementation"] = "static"
    expected = model.generate(**ids, **options)
    with watch(model) as seen:
        output = model.generate(**ids, **options)
    assert torch.equal(output, expected)
    assert seen.calls == 6
    assert not seen.unattributed
    rows = int(pad("left").sum()) + 5 * BATCH
    for summary in seen.layers.values():
        np.testing.assert_array_equal(summary.rows_seen, rows)
        assert summary["visible_keys"].largest.max() <= TOKENS + 5
        assert int(summary.max_keys.offsets[:, 66:].sum()) == 0  # no query looks ahead
    assert {round(record.effective, 4) for record in seen.scales} == {round(RIGHT, 4)}


def test_cross_attention_and_encoder_are_distinguishable():
    small_model = ZOO["t5"]
    model = small_model.build()
    with torch.no_grad(), watch(model) as seen:
        model(**feed(small_model, "right", torch.float32))
    rows = {path: int(summary.rows_seen[0]) for path, summary in seen.layers.items()}
    assert len(rows) == 6
    for path, count in rows.items():
        assert count == (int(pad("right").sum()) if path.startswith("encoder") else BATCH * 9)
    crossed = [path for path in rows if "EncDecAttention" in path]
    assert len(crossed) == 2
    assert all(seen.layers[path].max_keys.rows.sum() == 0 for path in crossed)


# torch's operation has no soft cap and no sinks.
ONLY_EAGER = ("gemma2", "gpt_oss")
FUSED = [
    (name, implementation)
    for name in (*ONLY_EAGER, "gpt2", "llama", "bert", "vit", "t5", "whisper", "qwen3")
    for implementation in ("eager", "sdpa", "sqrtdk")
    if implementation != "sdpa" or name not in ONLY_EAGER
]


@pytest.mark.parametrize(("name", "implementation"), FUSED)
def test_fused_models_give_the_same(name, implementation):
    register_huggingface()
    small_model = ZOO[name]
    model = small_model.build()
    model.set_attn_implementation(implementation)
    fed = feed(small_model, "left", torch.float32)
    expected = run(model, small_model, fed)
    with FusedWatch(model) as seen:
        output = run(model, small_model, fed)
    for key, value in expected.items():
        assert torch.allclose(output[key], value, atol=1e-3, rtol=1e-3)
    assert seen.notes == []
    assert seen.layers


def test_latent_attention_of_deepseek():
    small_model = SmallModel(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**TEXT, **SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 2},
    )
    model = small_model.build()
    with torch.no_grad(), watch(model) as seen:
        model(**feed(small_model, "left", torch.float32))
    assert not seen.unattributed
    assert [(record.d_k, round(record.effective, 5)) for record in seen.scales] == [(12, round(12**-0.5, 5))] * 2


def test_packed_sequences():
    """Two sequences in one row: the mask keeps them apart, and so do the counts of visible keys."""
    model = ZOO["llama"].build()
    ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    with torch.no_grad(), watch(model) as seen:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    summary = next(iter(seen.layers.values()))
    np.testing.assert_allclose(summary["visible_keys"].mean, (sum(range(1, 8)) + sum(range(1, 6))) / 12)


def test_grouped_queries():
    model = SmallModel("LlamaForCausalLM", "LlamaConfig", {**TEXT, **GROUPED}).build()
    with torch.no_grad(), watch(model) as seen:
        model(**feed(ZOO["llama"], "none", torch.float32))
    assert {summary.heads for summary in seen.layers.values()} == {4}


@pytest.mark.parametrize(("name", "before"), [("llama", 1.0), ("opt", RIGHT)])
def test_low_rank_adapters_of_peft_are_part_of_the_projection(name, before):
    """LoRA beside q_proj: the scale is that of what comes out of both, and paths are those of the wrapped model."""
    peft = pytest.importorskip("peft")
    small_model = ZOO[name]
    adapters = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(small_model.build(), adapters).eval()
    fed = feed(small_model, "none", torch.float32)
    with torch.no_grad():
        expected = model(**fed).logits
        with watch(model) as seen:
            output = model(**fed).logits
    assert torch.equal(output, expected)
    assert not seen.unattributed
    assert len(seen.scales) == 2
    for record in seen.scales:
        assert record.layer.startswith("base_model.model.model.")
        assert record.before_the_call == pytest.approx(before, rel=1e-4)
        assert record.effective == pytest.approx(RIGHT, rel=1e-4)
        assert declared_scale(model, record).value == pytest.approx(RIGHT)


@pytest.mark.parametrize("name", EVERY)
def test_slopes_of_alibi_are_named_where_they_are(name):
    model = EVERY[name].build()
    with watch(model) as seen, torch.no_grad():
        run(model, EVERY[name], feed(EVERY[name], "left", torch.float32))
    told = [note for note in seen.notes if "ALiBi" in note]
    heads = next(iter(seen.layers.values())).heads
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)  # Press et al. 2022, for powers of two
    expected = f"an ALiBi bias is added to the logits, with slopes from {slopes[-1]:.4g} to {slopes[0]:.4g} (first in"
    assert len(told) == (name in ("bloom", "mpt"))
    assert all(note.startswith(expected) for note in told)
