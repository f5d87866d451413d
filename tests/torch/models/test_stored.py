"""Auditing stored models of transformers: what they are fed, fresh ones raise nothing, planted faults, refusals."""

import json
import pickle
import shutil
import socket
from pathlib import Path

import pytest
import torch

from small_models import GROUPED, SIZES
from sqrtdk import SqrtdkError
from sqrtdk.torch import audit
from sqrtdk.torch.models.stored import audit_stored

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip("transformers")

WORDS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPOKEN = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
SPOKEN |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SEEN = {**SIZES, "image_size": 48, "patch_size": 8}
# Class, configuration, and what the input is called.
FRESH = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4}, "512 random tokens"),
    "bert": ("BertForMaskedLM", "BertConfig", {**WORDS, **SIZES}, "512 random tokens"),
    "roberta": (
        "RobertaModel",
        "RobertaConfig",
        {**WORDS, **SIZES, "pad_token_id": 1, "max_position_embeddings": 300},
        "596 random tokens in 2 sequences",
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**WORDS, **GROUPED}, "512 random tokens"),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**WORDS, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4},
        "for encoder and decoder",
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**WORDS, **SPOKEN, "num_mel_bins": 8, "max_source_positions": 300, "max_target_positions": 300}
        | {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
        "noise in place of a sound; 300 random tokens",
    ),
    "vit": ("ViTModel", "ViTConfig", SEEN, "noise in place of 8 images of 48 × 48"),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**WORDS, **SIZES}, "vision_config": SEEN, "projection_dim": 16},
        "539 random tokens in 7 sequences, of a vocabulary of 97 (there is no tokenizer); noise in place of 7 images",
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {**SIZES, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        "noise in place of a sound",
    ),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Freshly initialised models by name, saved once."""
    root = tmp_path_factory.mktemp("models")

    def save(name):
        path = root / name
        if not path.exists():
            kind, config, options, _ = FRESH[name]
            torch.manual_seed(0)
            getattr(transformers, kind)(getattr(transformers, config)(**options)).save_pretrained(path)
        return path

    return save


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("a model from a directory needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("name", FRESH)
def test_fresh_models_raise_nothing(store, name):
    audited = audit_stored(str(store(name)))
    assert [one for one in audited.findings if one.severity != "info"] == []
    assert FRESH[name][3] in audited.about["input"]
    assert audited.heads
    assert audited.unattributed == 0
    assert len({scale.layer_index for scale in audited.scale}) == len(audited.scale)
    assert all(scale.measured is not None for scale in audited.scale)


def planted(store, fault):
    model = transformers.AutoModel.from_pretrained(store("llama"))
    fault(model)
    ids = torch.randint(3, 97, (1, 300), generator=torch.Generator().manual_seed(0))
    return audit(model, {"input_ids": ids})


def omit(model):
    for layer in model.layers:
        layer.self_attn.scaling = 1.0


def apply_twice(model):
    model.layers[1].self_attn.scaling **= 2


def break_weight(model):
    model.layers[1].self_attn.k_proj.weight.data[0, 0] = torch.nan


@pytest.mark.parametrize(
    ("fault", "rule", "layers"),
    [(omit, "scale", {0, 1}), (apply_twice, "scale", {1}), (break_weight, "non-finite", {1})],
)
def test_a_planted_fault_is_found_where_it_is(store, fault, rule, layers):
    audited = planted(store, fault)
    severe = [one for one in audited.findings if one.severity != "info"]
    assert severe
    assert all(rule in one.rule for one in severe)
    assert {one.layer_index for one in severe} == layers
    assert planted(store, lambda model: None).findings == ()


def test_missing_weights_are_reported(store, tmp_path):
    audited = audit_stored(str(store("bert")))  # stored without a pooler
    assert any("2 tensors of" in note and "pooler" in note for note in audited.about["notes"])
    other = tmp_path / "other"
    transformers.GPT2Model(transformers.GPT2Config(**FRESH["gpt2"][2])).save_pretrained(other)
    (other / "config.json").write_text((store("bert") / "config.json").read_text())
    with pytest.raises(SqrtdkError, match=r"must be those of its config\.json, got none that fit"):
        audit_stored(str(other))


@pytest.mark.parametrize("field", ["vocab_size", "intermediate_size"])
def test_a_configuration_for_far_more_than_is_stored_is_refused_at_once(store, tmp_path, field):
    other = tmp_path / "huge"
    shutil.copytree(store("bert"), other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, field: 10**10}))
    with pytest.raises(SqrtdkError, match=r"config\.json in .*huge' must be that of its weights, got one for \d.*·10"):
        audit_stored(str(other))


def test_a_text_needs_a_tokenizer_and_a_model_that_reads(store):
    with pytest.raises(SqrtdkError, match="has no tokenizer that could read a text"):
        audit_stored(str(store("gpt2")), "some words")
    with pytest.raises(SqrtdkError, match="has no tokenizer that could read a text"):
        audit_stored(str(store("vit")), "some words")


def test_a_tokenizer_of_amino_acids_reads_a_protein(tmp_path):
    letters = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(letters))
    transformers.EsmTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = transformers.EsmConfig(
        **SIZES, vocab_size=len(letters), pad_token_id=1, mask_token_id=32, position_embedding_type="rotary"
    )
    transformers.EsmModel(config).save_pretrained(tmp_path)
    read = audit_stored(str(tmp_path), "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ" * 10)
    assert read.about["input"] == "the text, 332 tokens"  # with one before and one after
    made_up = audit_stored(str(tmp_path))
    assert (
        "random tokens, of a vocabulary of 33 (the tokenizer does not know the built-in text)" in made_up.about["input"]
    )
    with pytest.raises(SqrtdkError, match="in the text there is nothing that the model's tokenizer knows"):
        audit_stored(str(tmp_path), "the quick brown fox")


def test_code_that_comes_with_a_model_is_not_run(store, tmp_path):
    path = tmp_path / "remote"
    path.mkdir()
    marker = tmp_path / "was_run"
    (path / "modeling.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Own: pass\n")
    own = {"AutoConfig": "modeling.Own", "AutoModel": "modeling.Own", "AutoTokenizer": ["modeling.Own", None]}
    (path / "config.json").write_text(json.dumps({"model_type": "own_code", "auto_map": own}))
    (path / "tokenizer_config.json").write_text(json.dumps({"auto_map": own}))
    (path / "model.safetensors").write_bytes((store("gpt2") / "model.safetensors").read_bytes())
    with pytest.raises(SqrtdkError, match="MODEL could not be loaded"):
        audit_stored(str(path))
    known = json.loads((store("gpt2") / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**known, "auto_map": own}))
    assert audit_stored(str(path)).heads
    assert not marker.exists()


class _Attack:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_a_pickle_beside_the_weights_is_not_read(store, tmp_path):
    path = tmp_path / "both"
    path.mkdir()
    for file in store("gpt2").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    for name in ("pytorch_model.bin", "training_args.bin"):
        (path / name).write_bytes(pickle.dumps(_Attack(tmp_path / "was_run")))
    assert audit_stored(str(path)).heads
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, None])
def test_damaged_weights_are_one_line(store, tmp_path, damage):
    path = tmp_path / "damaged"
    path.mkdir()
    (path / "config.json").write_text((store("gpt2") / "config.json").read_text())
    whole = (store("gpt2") / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with pytest.raises(SqrtdkError, match="MODEL could not be loaded") as caught:
        audit_stored(str(path))
    assert "\n" not in str(caught.value)


def test_a_model_that_takes_something_else_says_what(tmp_path):
    config = transformers.PatchTSTConfig(d_model=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16)
    transformers.PatchTSTModel(config).save_pretrained(tmp_path / "series")
    message = r"can make up texts, images and sounds, but PatchTSTModel takes past_values; in Python, sqrtdk\.torch"
    with pytest.raises(SqrtdkError, match=message):
        audit_stored(str(tmp_path / "series"))


def test_a_model_that_does_not_take_what_is_made_up_says_why(tmp_path):
    options = {**WORDS, **SIZES, "languages": ["en_XX"], "max_position_embeddings": 66}
    transformers.XmodModel(transformers.XmodConfig(**options)).save_pretrained(tmp_path / "xmod")
    message = (
        r"cannot be run on 520 random tokens in 8 sequences.*: XmodModel raised ValueError: Input language unknown"
    )
    with pytest.raises(SqrtdkError, match=message):
        audit_stored(str(tmp_path / "xmod"))


def test_a_model_without_attention_is_named(tmp_path):
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    with pytest.raises(SqrtdkError, match="must compute attention, got ResNetModel, in which none was recognised"):
        audit_stored(str(tmp_path / "resnet"))
