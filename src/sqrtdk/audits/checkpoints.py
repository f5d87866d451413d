"""Search for a model's files: a directory with config.json and safetensors, by path or in an installed package."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.records.files import read_bounded

__all__ = ["find_checkpoint"]

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DEEPEST = 2
"""Depth below a package's directory to which a model is searched for."""
_LONGEST_CONFIG = 16 * 2**20
_COUNTED, _MEASURED = ("layer", "expert", "block", "depth"), ("size", "dim", "length", "width", "capacity", "token")
"""Parts of field names that count modules, and parts that mark a field as a size instead."""
_MOST_MODULES = 10_000


def find_checkpoint(name: str) -> Path:
    """Return the directory of a model: `name` itself, or the one inside the installed package of that name.

    No code of the package is run. The weights must be safetensors, because reading a pickle can run code.

    Raises:
        InvalidValueError: there is no such model, it has no configuration, or its weights are not safetensors.

    >>> find_checkpoint("no-such-model")
    Traceback (most recent call last):
    ...
    sqrtdk.errors.InvalidValueError: MODEL must be a directory or an installed package with config.json and safetensors,
    got 'no-such-model', which is neither
    """
    path = Path(name)
    if name and path.is_dir():
        _require_model(path)
        return path
    expected = "must be a directory or an installed package with config.json and safetensors"
    if path.is_file():
        raise InvalidValueError("MODEL", f"{expected}, got the file {name!r}")
    roots = list(_find_package(name))
    if not roots:
        raise InvalidValueError("MODEL", f"{expected}, got {name!r}, which is neither")
    models = [directory for root in roots for directory in _find_models(root)]
    if len(models) != 1:
        listed = ", ".join(str(model) for model in models) or "no config.json"
        raise InvalidValueError("MODEL", f"{expected}, got the package {name!r}, in which there is {listed}")
    _require_model(models[0])
    return models[0]


def _find_package(name: str) -> Iterator[Path]:
    module = name.replace("-", "_")
    # For a dotted name Python would import, and so run, the parents.
    if re.fullmatch(r"[A-Za-z_]\w*", module) is None:
        return
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a running module that is not a package, such as __main__
        return
    yield from map(Path, (spec.submodule_search_locations or ()) if spec is not None else ())


def _find_models(root: Path, depth: int = 0) -> Iterator[Path]:
    """Yield directories with a config.json, without descending into them."""
    if (root / "config.json").is_file():
        yield root
    elif depth < _DEEPEST:
        for child in sorted(root.iterdir()):
            if child.is_dir() and not child.name.startswith((".", "__")):
                yield from _find_models(child, depth + 1)


def _require_model(path: Path) -> None:
    """Refuse a directory that cannot be loaded as a model, before anything heavy is imported."""
    if (path / "adapter_config.json").is_file():
        raise InvalidValueError(
            "MODEL",
            f"must hold a whole model, got an adapter in {str(path)!r}; "
            "merge it (PEFT's merge_and_unload) and save the result",
        )
    config = path / "config.json"
    if not config.is_file():
        raise InvalidValueError(
            "MODEL", f"must be a directory with config.json and safetensors, got none in {str(path)!r}"
        )
    try:
        content = json.loads(read_bounded(config, _LONGEST_CONFIG).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = "brackets in brackets without end" if isinstance(error, RecursionError) else str(error)
        raise InvalidValueError(f"config.json in {str(path)!r} must be JSON, got {reason}") from None
    if not isinstance(content, dict) or not content.get("model_type"):
        raise InvalidValueError(f"config.json in {str(path)!r} must name a model_type, got none")
    _require_buildable(content, path)
    if not any(path.glob("*.safetensors")):
        pickled = sorted(one.name for pattern in _PICKLED for one in path.glob(pattern))
        if pickled:
            raise InvalidValueError(
                "MODEL",
                f"must have its weights as safetensors, got {pickled[0]}, a pickle, which can run any code when "
                "it is read; where you trust it, load it in Python and save it with save_pretrained",
            )
        raise InvalidValueError("MODEL", f"must have its weights as safetensors, got none in {str(path)!r}")


def _require_buildable(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a configuration with so many modules that building them would never end."""
    counts: dict[str, int] = {}
    for name, value in _walk(config):
        is_counted = any(part in name for part in _COUNTED) and not any(part in name for part in _MEASURED)
        if is_counted and isinstance(value, int):
            counts[name] = max(value, counts.get(name, 0))
    largest = max(counts, key=lambda name: counts[name], default="")
    if largest and counts[largest] > _MOST_MODULES:
        raise InvalidValueError(
            f"config.json in {str(path)!r} must ask for at most {_MOST_MODULES} layers or experts, got "
            f"{largest} = {counts[largest]}"
        )


def _walk(content: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a configuration and of inner configurations."""
    if isinstance(content, dict) and depth < _DEEPEST:
        for name, value in content.items():
            yield str(name), value
            yield from _walk(value, depth + 1)
