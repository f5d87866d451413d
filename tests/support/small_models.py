"""Model zoo: tiny Hugging Face models from config, sharpened, with their inputs and the results to compare."""

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY, BATCH, TOKENS, WINDOW = 61, 3, 17, 6
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
QUERY_OR_KEY = re.compile(r"\b(q|k|q_proj|k_proj|query|key|q_lin|k_lin|c_attn|Wqkv|relative_attention_bias)\.weight$")
VALUE_OR_OUTPUT = re.compile(
    r"(\b(v|v_proj|value|v_lin|o|o_proj|out_proj|out_lin|Wo|c_proj)|attention\.output\.dense)\.weight$"
)
# These weights are enlarged. Otherwise all sounds give the same tokens, and all positions the same token.
AUDIBLE = re.compile(r"encoder\.conv[12]\.weight$|decoder\.embed_positions\.weight$")


@dataclass(frozen=True)
class SmallModel:
    """Model of the zoo: its class and config, its kind of input, and the factor that sharpens q and k."""

    model: str
    config: str
    options: dict[str, Any]
    kind: str = "decoder"
    sharpen: float = 15.0

    def build(self) -> Any:
        import transformers  # imported here, because tests collect this module without transformers too

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**copy.deepcopy(self.options))
        config._experts_implementation = "eager"  # the grouped product of experts has no float64
        model = getattr(transformers, self.model)._from_config(config, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2)
                elif name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.add_(1)  # the norm undoes a factor on its projection
                elif QUERY_OR_KEY.search(name):
                    parameter.mul_(self.sharpen)
                elif VALUE_OR_OUTPUT.search(name):
                    parameter.mul_(6)
                elif AUDIBLE.search(name):
                    parameter.mul_(15)
        return model


ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
VISION = {"image_size": 12, "patch_size": 3, "num_channels": 3}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
ZOO = {
    "gpt2": SmallModel(
        "GPT2LMHeadModel", "GPT2Config", {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    ),
    "llama": SmallModel("LlamaForCausalLM", "LlamaConfig", {**TEXT, **GROUPED}),
    "qwen3": SmallModel("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, **GROUPED, "head_dim": 8}),
    "mistral": SmallModel("MistralForCausalLM", "MistralConfig", {**TEXT, **GROUPED, "sliding_window": WINDOW}),
    "gemma2": SmallModel(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**TEXT, **GROUPED, **ALTERNATING, "head_dim": 8, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": SmallModel(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**TEXT, **GROUPED, **ALTERNATING, "head_dim": 8, "query_pre_attn_scalar": 5},
    ),
    "gpt_oss": SmallModel(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**TEXT, **GROUPED, **ALTERNATING, "head_dim": 8, "num_local_experts": 1, "num_experts_per_tok": 1},
    ),
    # Masks a window without passing it to the attention function.
    "qwen2_moe": SmallModel(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**TEXT, **GROUPED, **ALTERNATING, "use_sliding_window": True, "num_experts": 1, "num_experts_per_tok": 1}
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    ),
    "granite": SmallModel("GraniteForCausalLM", "GraniteConfig", {**TEXT, **GROUPED, "attention_multiplier": 0.7}),
    "opt": SmallModel(
        "OPTForCausalLM",
        "OPTConfig",
        {**TEXT, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
    "bert": SmallModel("BertModel", "BertConfig", {**SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0}, "encoder"),
    "distilbert": SmallModel(
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 0},
        "encoder",
    ),
    "modernbert": SmallModel(
        "ModernBertModel",
        "ModernBertConfig",
        {**SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
        "encoder",
    ),
    "vit": SmallModel("ViTModel", "ViTConfig", {**SIZES, **VISION}, "vision"),
    "clip": SmallModel(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "eos_token_id": 2}
            | {"bos_token_id": 1, "pad_token_id": 0},
            "vision_config": {**SIZES, **VISION},
            "projection_dim": 32,
        },
        "clip",
        sharpen=3.0,
    ),
    "t5": SmallModel(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0, "relative_attention_max_distance": 12},
        "text to text",
        sharpen=3.0,
    ),
    "whisper": SmallModel(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**ENCODER_DECODER, **TEXT, "num_mel_bins": 8, "max_source_positions": 11, "max_target_positions": 48}
        | {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        "speech to text",
    ),
}


def pad(side: str) -> Any:
    """Return the 2-D padding mask of a batch: one full row, one short by one token and one short by five."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    for row, missing in enumerate((0, 1, 5)):
        if side == "left":
            mask[row, :missing] = 0
        elif side == "right":
            mask[row, TOKENS - missing :] = 0
    return mask


def feed(small_model: SmallModel, side: str, dtype: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)

    def tokens(count):
        return torch.randint(3, VOCABULARY, (BATCH, count), generator=generator)

    pixels = torch.randn(BATCH, 3, 12, 12, generator=generator).to(dtype)
    text = {"input_ids": tokens(TOKENS)}
    if side != "none":
        text["attention_mask"] = pad(side)
    match small_model.kind:
        case "vision":
            return {"pixel_values": pixels}
        case "clip":
            return {**text, "pixel_values": pixels}
        case "text to text":
            return {**text, "decoder_input_ids": tokens(9)}
        case "speech to text":
            frames = torch.randn(BATCH, 8, 22, generator=generator).to(dtype)
            return {"input_features": frames, "decoder_input_ids": tokens(9)}
    return text


def run(model: Any, small_model: SmallModel, fed: dict[str, Any]) -> dict[str, Any]:
    """Return the model's results without rows that see no key, whose weights eager attention makes uniform."""
    options = {"use_cache": False} if small_model.kind == "decoder" else {}
    with torch.no_grad():
        result = model(**fed, **options)
    given = fed.get("attention_mask")
    sees = slice(None) if given is None else given.cumsum(-1) > 0
    match small_model.kind:
        case "decoder":
            return {"logits": result.logits[sees]}
        case "clip":
            return {
                "text": result.text_model_output.last_hidden_state[sees],
                "vision": result.vision_model_output.last_hidden_state,
            }
        case "text to text" | "speech to text":
            return {"logits": result.logits, "encoder": result.encoder_last_hidden_state}
    return {"hidden": result.last_hidden_state}


def differences(result: dict[str, Any], expected: dict[str, Any]) -> list[float]:
    return [float((result[name] - wanted).abs().max() / wanted.abs().max()) for name, wanted in expected.items()]
