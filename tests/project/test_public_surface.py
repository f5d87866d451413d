"""Public surface: the names that `import sqrtdk` offers, what it loads, and what it costs."""

import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sqrtdk

HEAVY = ["torch", "transformers", "plotly", "matplotlib", "ray", "rich", "typer"]

PROBE = """
import json, sys, time
import numpy
start = time.process_time()
import sqrtdk
print(json.dumps({"seconds": time.process_time() - start, "modules": sorted(sys.modules)}))
"""


def probe():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_the_surface_is_pinned():
    assert sqrtdk.__all__ == [
        "Attention",
        "AttentionStatistics",
        "Gradients",
        "HeadSummary",
        "SqrtdkError",
        "__version__",
        "attention",
        "attention_gradients",
        "backends",
        "diagnose",
        "scaled_dot_product_attention",
        "scales",
        "softmax",
        "theory",
    ]
    assert all(getattr(sqrtdk, name).__doc__ for name in sqrtdk.__all__)


SUBMODULES = {
    "audits": {
        *("SHIPPED", "Audit", "AuditedHead", "AuditedRows", "AuditedScale", "Comparison", "compare", "read_audit"),
        "read_shipped",
    },
    "backends": {"REFERENCE", "Backend", "current", "inspect", "list", "threads", "use", "use_threads"},
    "diagnosis": {"Finding", "Threshold", "diagnose", "pattern_of", "patterns"},
    "errors": {
        *("FallbackWarning", "InvalidTypeError", "InvalidValueError", "MissingExtraError", "SqrtdkError"),
        "SqrtdkWarning",
    },
    "report": {
        *("figure", "figure_for", "figure_kinds", "render_report", "require_drawable", "require_page", "save_figure"),
        "write_report",
    },
    "scales": {
        *("LEARNABLE", "Learnable", "Policy", "ScaleContext", "get", "names", "policy_type", "register", "resolve"),
        *("Cosine", "Fixed", "Inverse", "Llama4", "LogN", "Mup", "QKNorm", "Sqrt", "Temperature", "NoScaling", "Yarn"),
    },
    "statistics": {"ROW_FIELDS", "ROW_STATISTICS", "AttentionStatistics", "Sample"},
    "summary": {"BIN_EDGES", "FARTHEST", "SUMMARISED", "HeadSummary", "MaxKeys", "Moments"},
    "theory": {
        *("Condensation", "Crossover", "ExpectedSoftmax", "InitialVariance", "JacobianSize", "SquaredSumTerms"),
        *("condensation", "digamma", "divided_variance", "dot_product_mean", "dot_product_variance"),
        *("entropy_lower_bound", "expected_softmax", "gradient_scale", "initial_variance", "initialisations"),
        *("jacobian_size", "query_gradient_norm", "saturation_index", "softmax_jacobian", "squared_sum_terms"),
        *("ExpectedJacobian", "GradientsWithoutScaling", "alignment", "concentration_crossing", "entropy_expansion"),
        *("expected_jacobian", "expected_rows", "row_variance", "top_gap_density", "crossover_without_scaling"),
        "gradients_without_scaling",
    },
}


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules_say_what_is_public(name):
    module = importlib.import_module(f"sqrtdk.{name}")
    assert len(module.__all__) == len(SUBMODULES[name])
    assert set(module.__all__) == SUBMODULES[name]
    assert all(getattr(module, public).__doc__ for public in module.__all__)


def test_all_policies_are_public():
    ours = (
        kind for kind in map(sqrtdk.scales.policy_type, sqrtdk.scales.names()) if kind.__module__ == "sqrtdk.scales"
    )
    assert {kind.__name__ for kind in ours} <= {*sqrtdk.scales.__all__}


@pytest.mark.tree
def test_the_version_is_that_of_the_package():
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert sqrtdk.__version__ == declared
    assert f"\nversion: {declared}\n" in (root / "CITATION.cff").read_text()
    with pytest.raises(AttributeError, match="module 'sqrtdk' has no attribute 'nonsense'"):
        sqrtdk.nonsense  # noqa: B018


def test_the_version_costs_nothing_until_it_is_asked_for():
    assert "importlib.metadata" not in probe()["modules"]


def test_signatures_are_those_of_the_design():
    features = ["scale", "mask", "causal", "causal_offset", "window", "softcap", "sinks", "alibi"]
    forward = inspect.signature(sqrtdk.attention).parameters
    assert list(forward) == ["q", "k", "v", *features, "statistics", "weights"]
    assert all(forward[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(forward)[3:])
    defaults = {name: forward[name].default for name in list(forward)[3:]}
    changed = {"causal": False, "statistics": True, "weights": False}
    assert defaults == dict.fromkeys(features) | changed
    backward = inspect.signature(sqrtdk.attention_gradients).parameters
    assert list(backward) == ["q", "k", "v", "grad_output", *features]
    assert sqrtdk.Attention._fields == ("output", "statistics", "weights")
    assert sqrtdk.Gradients._fields == ("query", "key", "value", "scale", "sinks", "alibi")
    assert list(inspect.signature(sqrtdk.softmax).parameters) == ["x", "axis"]


def test_importing_loads_numpy_and_nothing_heavier():
    modules = probe()["modules"]
    assert "numpy" in modules
    assert [name for name in HEAVY if name in modules] == []


@pytest.mark.slow
def test_importing_costs_less_than_015_seconds_beyond_numpy():
    assert min(probe()["seconds"] for _ in range(4)) < 0.15


def test_the_surface_of_the_torch_layer_is_pinned():
    import sqrtdk.torch

    assert sqrtdk.torch.__all__ == [
        "Alert",
        "Monitor",
        "StopTraining",
        "TemperaturePressure",
        "all_reduce",
        "attention",
        "audit",
        "counterfactual",
        "measure_heads",
        "nn",
        "qk_clip_",
        "register_huggingface",
        "scaled_dot_product_attention",
        "watch",
    ]
    assert all(getattr(sqrtdk.torch, name).__doc__ for name in sqrtdk.torch.__all__)
    assert list(inspect.signature(sqrtdk.torch.watch).parameters) == ["model", "keep_rows"]
    names = ["KVCache", "LearnedTemperature", "QKNorm", "QueryTemperature", "ScaledAttention", "make_learnable"]
    assert sqrtdk.torch.nn.__all__ == names


def test_tensors_are_taken_with_the_arguments_of_arrays_and_a_few_more():
    import sqrtdk.torch

    arrays = inspect.signature(sqrtdk.attention).parameters
    tensors = inspect.signature(sqrtdk.torch.attention).parameters
    assert list(tensors) == [*arrays, "dropout", "sample_rows", "sample_seed", "pressure"]
    assert all(tensors[name].kind is arrays[name].kind for name in arrays)
    assert all(tensors[name].default == arrays[name].default for name in arrays)


def test_without_torch_the_torch_layer_names_the_extra():
    script = "import sys; sys.modules['torch'] = None\nimport sqrtdk\nimport sqrtdk.torch"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'torch is not installed; it comes with: pip install "sqrtdk[torch]"' in done.stderr


def test_without_torch_its_attribute_names_the_extra():
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import sqrtdk\n"
        "assert not hasattr(sqrtdk, 'torch')\n"
        "try:\n    sqrtdk.torch\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "has no attribute 'torch': torch is not installed; it comes with: pip install" in done.stdout


@pytest.mark.slow
def test_the_torch_layer_is_imported_when_it_is_asked_for():
    script = (
        "import sys, sqrtdk\n"
        "assert 'torch' not in sys.modules\n"
        "print(sqrtdk.torch.attention is sys.modules['sqrtdk.torch'].attention)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.slow
def test_the_torch_layer_loads_no_transformers():
    script = "import sys, sqrtdk.torch; print([x for x in sys.modules if x.startswith(('transformers', 'plotly'))])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
