"""Models of transformers under a watch: through the registry, and in code of their own."""

import copy

import numpy as np
import pytest
import torch

from sqrtdk.torch import register_huggingface, watch
from sqrtdk.torch.declared import declared_scale
from torch_specimens import BATCH, GROUPED, SIZES, TEXT, TOKENS, VOCABULARY, ZOO, Specimen, feed, pad, run
from torch_watched import entropy_per_head

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]
pytest.importorskip("transformers")

RIGHT = 8**-0.5
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OWN_CODE = {
    "bloom": Specimen("BloomForCausalLM", "BloomConfig", {**TEXT, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": Specimen(
        "FalconForCausalLM",
        "FalconConfig",
        {**TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "gptj": Specimen("GPTJForCausalLM", "GPTJConfig", {**TEXT, **SMALL, "rotary_dim": 4}),
    "gpt_neo": Specimen(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {**TEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
        | {"window_size": 6, "max_position_embeddings": 64},
    ),
    "mpt": Specimen("MptForCausalLM", "MptConfig", {**TEXT, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "codegen": Specimen("CodeGenForCausalLM", "CodeGenConfig", {**TEXT, **SMALL, "rotary_dim": 4}),
    "deberta": Specimen(
        "DebertaModel",
        "DebertaConfig",
        {**SIZES, "vocab_size": VOCABULARY, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "encoder",
    ),
    "xlm": Specimen(
        "XLMModel", "XLMConfig", {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4}, "encoder"
    ),
    "mpnet": Specimen("MPNetModel", "MPNetConfig", {**SIZES, "vocab_size": VOCABULARY}, "encoder"),
    "roformer": Specimen("RoFormerModel", "RoFormerConfig", {**SIZES, "vocab_size": VOCABULARY}, "encoder"),
}
EVERY = {**ZOO, **OWN_CODE}
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
    specimen = EVERY[name]
    model = specimen.build()
    fed = feed(specimen, side, torch.float32)
    options = {"use_cache": False} if specimen.kind == "decoder" else {}
    with torch.no_grad():
        for implementation in implementations(model):
            model.set_attn_implementation(implementation)
            expected = model(**fed, **options)
            with watch(model) as seen:
                output = model(**fed, **options)
            for key, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value.nan_to_num(), output[key].nan_to_num())
            assert not seen.unattributed
            assert seen.layers
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
    specimen = EVERY[name]
    model = specimen.build()
    fed = feed(specimen, side, torch.float32)
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


def test_cross_attention_and_encoder_are_told_apart():
    specimen = ZOO["t5"]
    model = specimen.build()
    with torch.no_grad(), watch(model) as seen:
        model(**feed(specimen, "right", torch.float32))
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
    specimen = ZOO[name]
    model = specimen.build()
    model.set_attn_implementation(implementation)
    fed = feed(specimen, "left", torch.float32)
    expected = run(model, specimen, fed)
    with watch(model, fuse=True) as seen:
        output = run(model, specimen, fed)
    for key, value in expected.items():
        assert torch.allclose(output[key], value, atol=1e-3, rtol=1e-3)
    assert seen.notes == []
    assert seen.layers


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "whisper"])
def test_another_scale_is_another_model(name, implementation):
    """Twice the scale under the watch is the same as query projections twice as large without it."""
    specimen = ZOO[name]
    model = specimen.build()
    model.set_attn_implementation(implementation)
    fed = feed(specimen, "none", torch.float32)
    with watch(model, fuse=True, scale=2 * RIGHT):
        output = run(model, specimen, fed)
    twice = copy.deepcopy(model)
    with torch.no_grad():
        for path, parameter in twice.named_parameters():
            if "c_attn" in path:
                parameter[..., :32].mul_(2)
            elif "q_proj" in path:
                parameter.mul_(2)
    expected = run(twice, specimen, fed)
    for key, value in expected.items():
        assert torch.allclose(output[key], value, atol=2e-3, rtol=1e-3)


def test_latent_attention_of_deepseek():
    specimen = Specimen(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**TEXT, **SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 2},
    )
    model = specimen.build()
    with torch.no_grad(), watch(model) as seen:
        model(**feed(specimen, "left", torch.float32))
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
    model = Specimen("LlamaForCausalLM", "LlamaConfig", {**TEXT, **GROUPED}).build()
    with torch.no_grad(), watch(model) as seen:
        model(**feed(ZOO["llama"], "none", torch.float32))
    assert {summary.heads for summary in seen.layers.values()} == {4}


@pytest.mark.parametrize(("name", "before"), [("llama", 1.0), ("opt", RIGHT)])
def test_low_rank_adapters_of_peft_are_part_of_the_projection(name, before):
    """LoRA beside q_proj: the scale is that of what comes out of both, and paths are those of the wrapped model."""
    peft = pytest.importorskip("peft")
    specimen = ZOO[name]
    adapters = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(specimen.build(), adapters).eval()
    fed = feed(specimen, "none", torch.float32)
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
