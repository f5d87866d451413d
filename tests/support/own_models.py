"""Small Hugging Face models, including those whose attention is their own code."""

from small_models import SIZES, TEXT, VOCABULARY, ZOO, SmallModel

SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OWN_CODE = {
    "bloom": SmallModel("BloomForCausalLM", "BloomConfig", {**TEXT, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": SmallModel(
        "FalconForCausalLM",
        "FalconConfig",
        {**TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "gptj": SmallModel("GPTJForCausalLM", "GPTJConfig", {**TEXT, **SMALL, "rotary_dim": 4}),
    "gpt_neo": SmallModel(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {**TEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
        | {"window_size": 6, "max_position_embeddings": 64},
    ),
    "mpt": SmallModel("MptForCausalLM", "MptConfig", {**TEXT, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "codegen": SmallModel("CodeGenForCausalLM", "CodeGenConfig", {**TEXT, **SMALL, "rotary_dim": 4}),
    "deberta": SmallModel(
        "DebertaModel",
        "DebertaConfig",
        {**SIZES, "vocab_size": VOCABULARY, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "encoder",
    ),
    "xlm": SmallModel(
        "XLMModel", "XLMConfig", {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4}, "encoder"
    ),
    "mpnet": SmallModel("MPNetModel", "MPNetConfig", {**SIZES, "vocab_size": VOCABULARY}, "encoder"),
    "roformer": SmallModel("RoFormerModel", "RoFormerConfig", {**SIZES, "vocab_size": VOCABULARY}, "encoder"),
}
EVERY = {**ZOO, **OWN_CODE}
