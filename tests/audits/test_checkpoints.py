"""Finding a model's files: directories and packages, and a reason for everything that is no model."""

import json
import random
import subprocess
import sys

import pytest

from sqrtdk import SqrtdkError
from sqrtdk.audits.checkpoints import find_checkpoint


def make_model(path, *, config='{"model_type": "gpt2"}', weights="model.safetensors"):
    path.mkdir(parents=True)
    if config is not None:
        (path / "config.json").write_text(config)
    if weights is not None:
        (path / weights).write_bytes(b"")
    return path


def test_a_directory_is_taken_as_it_is(tmp_path):
    assert find_checkpoint(str(make_model(tmp_path / "model"))) == tmp_path / "model"
    sharded = make_model(tmp_path / "sharded", weights="model-00001-of-00002.safetensors")
    (sharded / "pytorch_model.bin").write_bytes(b"")
    assert find_checkpoint(str(sharded)) == sharded


def test_long_contexts_are_no_layers(tmp_path):
    config = (
        '{"model_type": "gpt2", "block_size": 131072, "num_layers": 96, "layer_norm_eps": 1e-5, "hidden_dim": 20000}'
    )
    assert find_checkpoint(str(make_model(tmp_path / "model", config=config)))


@pytest.mark.parametrize("name", ["a_small_model", "a-small-model"])
def test_a_package_is_found_without_running_it(tmp_path, monkeypatch, name):
    model = make_model(tmp_path / "a_small_model" / "inner" / "model")
    make_model(model / "pooling", config="{}")
    (tmp_path / "a_small_model" / "__init__.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_checkpoint(name) == model


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"config": None}, "directory with config.json and safetensors, got none in"),
        ({"weights": None}, "weights as safetensors, got none in"),
        ({"weights": "pytorch_model.bin"}, r"got pytorch_model\.bin, a pickle, which can run any code"),
        ({"config": "{"}, "must be JSON, got"),
        ({"config": "{}"}, "must name a model_type, got none"),
        ({"config": "[]"}, "must name a model_type, got none"),
        ({"config": "[" * 100_000}, "must be JSON, got brackets in brackets without end"),
        ({"config": '{"model_type": "a", "num_hidden_layers": 1000000000}'}, "got num_hidden_layers = 1000000000"),
        ({"config": '{"model_type": "a", "text_config": {"n_experts": 99999}}'}, "got n_experts = 99999"),
    ],
)
def test_a_directory_without_a_model_says_what_is_missing(tmp_path, made, message):
    with pytest.raises(SqrtdkError, match=message):
        find_checkpoint(str(make_model(tmp_path / "model", **made)))


def test_an_adapter_is_no_whole_model(tmp_path):
    path = make_model(tmp_path / "lora")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(SqrtdkError, match="must hold a whole model, got an adapter"):
        find_checkpoint(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", "got 'no-such-model', which is neither"),
        ("", "got '', which is neither"),
        ("openai/gpt2", "got 'openai/gpt2', which is neither"),
        ("numpy.linalg", "got 'numpy.linalg', which is neither"),
        ("__main__", "got '__main__', which is neither"),
        ("json", "got the package 'json', in which there is no config.json"),
        (__file__, "got the file"),
    ],
)
def test_what_is_neither_directory_nor_package_is_refused(name, message):
    with pytest.raises(SqrtdkError, match=message):
        find_checkpoint(name)


VALUES = [10**9, -1, 0, 1e308, None, True, "x" * 1000, [], {}, [[[]]], {"num_layers": 10**30}, float("nan"), "../.."]


def test_configurations_at_random_are_taken_or_refused_in_words(tmp_path):
    """Values of every kind in every place, and single bytes changed: never anything but a SqrtdkError."""
    rng = random.Random(0)
    base = {"model_type": "bert", "num_hidden_layers": 2, "vision_config": {"depth": 3, "experts": [1]}, "dtype": None}
    path = make_model(tmp_path / "model")
    refused = 0
    for _ in range(400):
        config = {name: rng.choice(VALUES) if rng.random() < 0.3 else value for name, value in base.items()}
        content = bytearray(json.dumps(config).encode())
        if rng.random() < 0.5:
            content[rng.randrange(len(content))] = rng.randrange(256)
        (path / "config.json").write_bytes(content)
        try:
            find_checkpoint(str(path))
        except SqrtdkError:
            refused += 1
    assert 50 < refused < 400


def test_a_package_with_two_models_names_both(tmp_path, monkeypatch):
    for name in ("one", "two"):
        make_model(tmp_path / "several_models" / name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SqrtdkError, match=r"in which there is .*one, .*two"):
        find_checkpoint("several_models")


@pytest.mark.slow
def test_finding_needs_neither_torch_nor_transformers():
    script = "import sys, sqrtdk.audits.checkpoints; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
