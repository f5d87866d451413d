"""Models of transformers, tiny and from config, give with attn_implementation="sqrtdk" what they give with "eager".

In a random tiny model the weights are nearly uniform and a scale 1.5 times too large passes. So the projections are
sharpened, and each comparison proves itself: with every scale 0.1% too large it fails.
"""

import copy
import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from small_models import (  # noqa: E402
    BATCH,
    QUERY_OR_KEY,
    SIZES,
    TEXT,
    TOKENS,
    TOLERANCE,
    VISION,
    VOCABULARY,
    ZOO,
    SmallModel,
    differences,
    feed,
    run,
)
from sqrtdk.errors import InvalidValueError  # noqa: E402
from sqrtdk.torch import huggingface  # noqa: E402

pytestmark = pytest.mark.long

DECODERS = [name for name, small_model in ZOO.items() if small_model.kind == "decoder"]
PADDED = [
    (name, side)
    for name in ZOO
    for side in ("none", "left", "right")
    if side == "none" or name not in ("vit", "whisper")
]


@pytest.fixture(autouse=True)
def registered():
    huggingface.register_huggingface()


@pytest.fixture(autouse=True)
def wide_softmax(monkeypatch):
    """Eager models take their softmax in float32, even in float64: here they do not."""
    narrow = torch.nn.functional.softmax

    def softmax(input, dim=None, _stacklevel=3, dtype=None):
        return narrow(input, dim=dim, dtype=None if input.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


@pytest.fixture
def calls(monkeypatch):
    """The calls that reach the operation; `factor` spoils every scale."""
    seen = Calls()
    monkeypatch.setattr(huggingface, "compute", seen)
    return seen


class Calls:
    def __init__(self):
        self.operation, self.factor, self.arguments = huggingface.compute, 1.0, []

    def __call__(self, query, key, value, *, scale=None, **options):
        self.arguments.append(options)
        if self.factor != 1.0:
            scale = self.factor * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        return self.operation(query, key, value, scale=scale, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("name", "side"), PADDED)
def test_equals_eager_and_would_notice_a_scale_off_by_a_thousandth(name, side, dtype, calls):
    small_model = ZOO[name]
    model = small_model.build().to(dtype)
    fed = feed(small_model, side, dtype)
    expected = run(model, small_model, fed)
    assert not calls.arguments
    model.set_attn_implementation("sqrtdk")
    found = run(model, small_model, fed)
    assert calls.arguments
    assert max(differences(found, expected)) < TOLERANCE[dtype]
    calls.factor = 1.001
    assert min(differences(run(model, small_model, fed), expected)) > 5 * TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "side"), [item for item in PADDED if item[1] != "none"])
def test_padding_is_honoured(name, side, calls):
    small_model = ZOO[name]
    model = small_model.build()
    model.set_attn_implementation("sqrtdk")
    fed = feed(small_model, side, torch.float32)
    other = {**fed, "input_ids": torch.where(fed["attention_mask"] == 1, fed["input_ids"], 7)}
    real = fed["attention_mask"].bool()
    with torch.no_grad():
        first, second = (model(**each, output_hidden_states=True) for each in (fed, other))
    if small_model.kind == "clip":
        first, second = first.text_model_output, second.text_model_output
    hidden = "encoder_hidden_states" if small_model.kind == "text to text" else "hidden_states"
    for one, two in zip(first[hidden], second[hidden], strict=True):
        assert torch.equal(one[real], two[real])  # what is masked has no influence, to the bit
    assert any(options["mask"] is not None for options in calls.arguments)


@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
def test_greedy_generation_with_cache_gives_the_tokens_of_eager(name, calls):
    small_model = ZOO[name]
    model = small_model.build()
    fed = feed(small_model, "right" if name == "t5" else "left", torch.float32)
    fed.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    generate = transformers.GenerationMixin.generate  # Whisper's own cuts long audio into pieces, there is none here
    expected = generate(model, **fed, **options)
    model.set_attn_implementation("sqrtdk")
    assert not calls.arguments
    found = generate(model, **fed, **options)
    assert len(calls.arguments) >= 2 * 12
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.sequences[:, -12:].unique()) > 3
    for one, two in zip(found.logits, expected.logits, strict=True):
        assert differences({"logits": one}, {"logits": two})[0] < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", DECODERS)
def test_steps_with_a_cache_give_what_the_whole_sequence_gives(name, calls):
    model = ZOO[name].build().double()
    tokens = feed(ZOO[name], "none", torch.float64)["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        model.set_attn_implementation("sqrtdk")
        cache, parts = None, []
        for part in tokens.split([7, 1, 5, 1, 3], dim=1):
            result = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache, parts = result.past_key_values, [*parts, result.logits]
    assert differences({"": torch.cat(parts, dim=1)}, {"": expected})[0] < TOLERANCE[torch.float64]
    if name == "llama":  # nothing but causal: the arguments of the operation say it, no mask is made
        assert all(options["mask"] is None for options in calls.arguments)
        # A single query at the end sees every key, and the plain operation is asked for.
        assert {options.get("causal_offset") for options in calls.arguments} == {0, None, 8, 14}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_of_fixed_size_has_keys_behind_the_last_query(name):
    model = ZOO[name].build().double()
    tokens = feed(ZOO[name], "none", torch.float64)["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        model.set_attn_implementation("sqrtdk")
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        parts = [model(input_ids=part, past_key_values=cache).logits for part in tokens.split([7, 1, 5, 1, 3], dim=1)]
    assert differences({"": torch.cat(parts, dim=1)}, {"": expected})[0] < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_packed_sequences_do_not_see_each_other(name):
    model = ZOO[name].build().double()
    tokens = feed(ZOO[name], "none", torch.float64)["input_ids"]
    positions = torch.cat([torch.arange(11), torch.arange(6)]).expand(BATCH, -1)
    with torch.no_grad():
        expected = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        model.set_attn_implementation("sqrtdk")
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=tokens[:, 11:], use_cache=False).logits
    assert differences({"": packed}, {"": expected})[0] < TOLERANCE[torch.float64]
    assert differences({"": packed[:, 11:]}, {"": alone})[0] < TOLERANCE[torch.float64]


@pytest.mark.parametrize("minus_infinity", [None, -math.inf, torch.finfo(torch.float64).min])
def test_masks_of_four_dimensions_are_taken_as_they_are(minus_infinity):
    model = ZOO["llama"].build().double()
    tokens = feed(ZOO["llama"], "none", torch.float64)["input_ids"]
    generator = torch.Generator().manual_seed(5)
    visible = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=generator) < 0.5
    visible |= torch.eye(TOKENS, dtype=torch.bool)
    additive = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=additive, use_cache=False).logits
        model.set_attn_implementation("sqrtdk")
        given = visible if minus_infinity is None else additive.masked_fill(~visible, minus_infinity)
        found = model(input_ids=tokens, attention_mask=given, use_cache=False).logits
    assert differences({"": found}, {"": expected})[0] < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss", "mistral", "modernbert", "t5", "clip"])
def test_gradients_of_the_parameters_equal_eager(name):
    small_model = ZOO[name]
    model = small_model.build().double()
    fed = feed(small_model, "right", torch.float64)

    def gradients():
        model.zero_grad()
        result = model(**fed)
        output = result.logits_per_text if name == "clip" else result[0]
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
        (output * weights).sum().backward()
        return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}

    expected = gradients()
    model.set_attn_implementation("sqrtdk")
    found = gradients()
    assert found.keys() == expected.keys()
    learned = [key for key in expected if QUERY_OR_KEY.search(key) or key.endswith("sinks")]
    assert all(expected[key].abs().max() > 0 for key in learned)
    assert len(learned) >= 2
    largest = max(float(value.abs().max()) for value in expected.values())
    for key, wanted in expected.items():
        scale = max(float(wanted.abs().max()), 1e-6 * largest)
        assert float((found[key] - wanted).abs().max()) < 1e-9 * scale, key


@pytest.mark.parametrize("name", ZOO)
def test_weights_are_returned_where_they_are_asked_for(name):
    small_model = ZOO[name]
    model = small_model.build().double()
    fed = feed(small_model, "none", torch.float64)
    with torch.no_grad():
        expected = model(**fed, output_attentions=True)
        model.set_attn_implementation("sqrtdk")
        found, quiet = model(**fed, output_attentions=True), model(**fed)
    parts = ("text_model_output", "vision_model_output") if small_model.kind == "clip" else (None,)
    compared = 0
    for part in parts:
        one, two, none = (each if part is None else each[part] for each in (found, expected, quiet))
        for key in [key for key in two if "attentions" in key and two[key]]:
            assert not none.get(key)
            for layer, wanted in zip(one[key], two[key], strict=True):
                assert torch.allclose(layer, wanted, rtol=0, atol=1e-12)
                compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", ZOO)
def test_bfloat16_errs_no_more_than_eager(name):
    small_model = ZOO[name]
    model = small_model.build().to(torch.bfloat16)
    fed = feed(small_model, "none", torch.bfloat16)
    found = {}
    for implementation in ("eager", "sqrtdk"):
        model.set_attn_implementation(implementation)
        found[implementation] = run(model, small_model, fed)
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("eager")
    exact = run(
        wide, small_model, {key: value.double() if value.is_floating_point() else value for key, value in fed.items()}
    )
    errors = {
        key: [float((value[name].double() - exact[name]).square().mean().sqrt()) for name in exact]
        for key, value in found.items()
    }
    for ours, theirs in zip(errors["sqrtdk"], errors["eager"], strict=True):
        assert ours < 1.5 * theirs


def test_implementations_switch_back_and_forth(calls):
    small_model = ZOO["gemma3"]
    model = small_model.build()
    fed = feed(small_model, "left", torch.float32)
    outputs = []
    for implementation in ("eager", "sqrtdk", "eager", "sqrtdk"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        outputs.append(run(model, small_model, fed)["logits"])
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert len(calls.arguments) == 4


def test_models_are_loaded_with_it(tmp_path, calls):
    small_model = ZOO["gpt2"]
    model = small_model.build()
    expected = run(model, small_model, feed(small_model, "left", torch.float32))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sqrtdk").eval()
    found = run(loaded, small_model, feed(small_model, "left", torch.float32))
    assert differences(found, expected)[0] < TOLERANCE[torch.float32]
    assert calls.arguments
    built = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="sqrtdk")
    assert built.config._attn_implementation == "sqrtdk"


def test_dropout_is_applied_in_training(calls):
    small_model = ZOO["llama"]
    model = small_model.build()
    model.set_attn_implementation("sqrtdk")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    fed = feed(small_model, "none", torch.float32)
    still = run(model, small_model, fed)["logits"]
    assert {options["dropout"] for options in calls.arguments} == {0.0}
    model.train()
    torch.manual_seed(0)
    first, second = run(model, small_model, fed)["logits"], run(model, small_model, fed)["logits"]
    torch.manual_seed(0)
    again = run(model, small_model, fed)["logits"]
    assert not torch.equal(first, still)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_the_causal_model_that_is_told_not_to_be(calls):
    small_model = ZOO["llama"]
    model = small_model.build().double()
    fed = {**feed(small_model, "right", torch.float64), "is_causal": False}
    expected = run(model, small_model, fed)
    model.set_attn_implementation("sqrtdk")
    assert differences(run(model, small_model, fed), expected)[0] < TOLERANCE[torch.float64]
    assert calls.arguments


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "t5"])
def test_models_are_traced_in_one_graph(name, side):
    small_model = ZOO[name]
    model = small_model.build()
    model.set_attn_implementation("sqrtdk")
    fed = feed(small_model, side, torch.float32)
    expected = run(model, small_model, fed)
    torch._dynamo.reset()
    traced = torch.compile(model, backend="eager", fullgraph=True)
    assert max(differences(run(traced, small_model, fed), expected)) < TOLERANCE[torch.float32]


class TestLayersThatDoNotAsk:
    """They get no mask that they would misread: models without any other layer are refused, mixed ones are right."""

    CONFIGS = ("BloomConfig", "XGLMConfig", "CodeGenConfig", "MptConfig")

    @pytest.mark.parametrize("config", CONFIGS)
    def test_a_model_of_such_layers_alone_is_refused(self, config):
        tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
        made = getattr(transformers, config)(**tiny, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        if config == "CodeGenConfig":
            made.rotary_dim = 4
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sqrtdk")
        with pytest.raises(InvalidValueError, match=f"the model of {config} computes attention in code of its own"):
            model(torch.ones(1, 5, dtype=torch.long))

    @pytest.mark.parametrize("side", ["none", "left", "right"])
    def test_a_mixed_model_equals_eager(self, side, calls):
        small_model = SmallModel(
            "GitForCausalLM",
            "GitConfig",
            {**TEXT, **SIZES, "vision_config": {**SIZES, **VISION}, "max_position_embeddings": 64},
        )
        model = small_model.build()
        fed = feed(small_model, side, torch.float32)
        fed["pixel_values"] = torch.randn(BATCH, 3, 12, 12, generator=torch.Generator().manual_seed(4))
        rows = slice(None) if side == "none" else fed["attention_mask"].cumsum(-1) > 0

        def logits():
            with torch.no_grad():
                return {"": model(**fed, use_cache=False).logits[:, -TOKENS:][rows]}

        expected = logits()
        model.set_attn_implementation("sqrtdk")
        assert differences(logits(), expected)[0] < TOLERANCE[torch.float32]
        assert calls.arguments
