"""Private names of torch and transformers stay in the two modules that are there for them."""

import ast
import re
from pathlib import Path

import pytest

import sqrtdk

ROOT = Path(sqrtdk.__file__).parent
HOMES = {ROOT / "torch" / "internals.py", ROOT / "torch" / "transformers_internals.py"}
FOREIGN = ("torch", "transformers")
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Of named tuples, which document them, and of Python.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_getframe", "_exit"}
LOOKUPS = {"getattr", "hasattr", "setattr", "delattr", "get"}


def define(tree):
    """Every name that a module gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield getattr(node.slice, "value", None)


def is_private(path):
    return any(PRIVATE.fullmatch(part) for part in path.split(".")) or path.startswith("torch.nn.modules")


def find_private(tree, own):
    """Private names in a module that are not sqrtdk's own, and the lines in which they stand."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    foreign = {name for name, path in imported.items() if path.split(".")[0] in FOREIGN}
    for path in imported.values():
        if path.split(".")[0] in FOREIGN and is_private(path):
            yield path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            root = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if node.attr not in own or (isinstance(root, ast.Name) and root.id in foreign):
                yield f"{ast.unparse(node)} (line {node.lineno})"
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", None))
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if name in LOOKUPS:
                yield from (text for text in texts if PRIVATE.fullmatch(text) and text not in own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_path = re.fullmatch(r"[\w.]+", node.value) and node.value.split(".")[0] in FOREIGN
            if is_path and is_private(node.value):
                yield node.value


@pytest.mark.slow
def test_private_names_have_two_homes():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    assert set(trees) >= HOMES
    own = {name for tree in trees.values() for name in define(tree)} | DOCUMENTED
    others = {str(path.relative_to(ROOT)): list(find_private(trees[path], own)) for path in trees if path not in HOMES}
    assert {path: names for path, names in others.items() if names} == {}
    assert all(list(find_private(trees[path], own)) for path in HOMES)


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "from torch.utils import _python_dispatch",
        "from torch.nn.modules import module",
        "import torch\nx = torch.ops.aten._softmax",
        "from torch import nn\nx = nn.Module._own",
        "x = tensor._cdata",
        "x = getattr(model, '_orig_mod', None)",
        "x = model.__dict__.get('_compiled_call_impl')",
        "import transformers\nx = transformers.AutoModel._model_mapping",
        "import sys\nx = 'torch._dynamo' in sys.modules",
    ],
)
def test_a_private_name_is_found(line):
    assert list(find_private(ast.parse(line), {"_own"}))


def test_names_of_our_own_are_none_of_them():
    line = "import torch\nself._own = torch.zeros(1)\nx = self._own._replace(a=torch.nn.Linear)"
    assert list(find_private(ast.parse(line), {"_own"} | DOCUMENTED)) == []
