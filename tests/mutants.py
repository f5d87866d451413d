"""Seeded faults: does the suite find each? `python tests/mutants.py` plants one after another in a copy and runs tests.

A mutant that survives is a hole in the tests. The working tree is never touched; the kernel is compiled in the copy.
The same tests run once without a fault first: on a copy that is broken anyway everything would be found.
Each names the fast tests that should find it, so that all of them take minutes and not hours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from sqrtdk import _kernel

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 3


class Mutant(NamedTuple):
    """One fault: what stands in the file, what is put there instead, and the tests to ask."""

    name: str
    file: str
    original: str
    fault: str
    tests: tuple[str, ...]


MUTANTS = [
    Mutant(
        "a window that reaches one key too few",
        "src/sqrtdk/operation/visibility.py",
        "return (apart >= self.first) & (apart <= self.last)",
        "return (apart > self.first) & (apart <= self.last)",
        (
            "tests/operation/engines/test_reference.py",
            "tests/operation/test_attention.py",
            "tests/torch/test_attention.py",
        ),
    ),
    Mutant(
        "visible keys of rows that see nothing counted below zero",
        "src/sqrtdk/operation/visibility.py",
        "return (most - least + 1).clip(0, None)",
        "return most - least + 1",
        (
            "tests/operation/test_attention.py",
            "tests/test_scales.py",
            "tests/operation/engines/test_choose.py",
            "tests/torch/test_attention.py",
        ),
    ),
    Mutant(
        "entropy without the part of the tail",
        "src/sqrtdk/operation/engines/row_statistics.py",
        "xp.where(tail > 0, tail * below, 0.0).sum(-1) / total",
        "0.0",
        ("tests/test_statistics.py", "tests/torch/test_statistics.py"),
    ),
    Mutant(
        "one gradient for the scales of all heads",
        "src/sqrtdk/torch/autograd.py",
        "return per_row.sum_to_size(field.shape).to(field.dtype)",
        "return (per_row.mean() * torch.ones_like(field)).to(field.dtype)",
        ("tests/torch/test_gradients.py", "tests/torch/test_pressure.py"),
    ),
    Mutant(
        "log n in place of a power of it",
        "src/sqrtdk/scales.py",
        "self.s * log_n**self.power / math.sqrt(context.d_k)",
        "self.s * log_n / math.sqrt(context.d_k)",
        ("tests/test_scales.py",),
    ),
    Mutant(
        "heads of a group mixed up in pure torch",
        "src/sqrtdk/torch/engines/blocks.py",
        "h = slice(g.start * shared, g.stop * shared)\n            for part",
        "h = slice(g.start, g.start + (g.stop - g.start) * shared)\n            for part",
        ("tests/torch/test_attention.py", "tests/torch/engines/test_choose.py"),
    ),
    Mutant(
        "merged variance without the distance of the means",
        "src/sqrtdk/summary/moments.py",
        "m2=self.m2 + other.m2 + apart * apart * (self.count * (other.count / some))",
        "m2=self.m2 + other.m2",
        ("tests/test_summary.py",),
    ),
    Mutant(
        "a sweep trains what the store has",
        "src/sqrtdk/lab/sweep.py",
        "deque(spec for spec in self.specs.values() if not self.reuse(spec))",
        "deque(self.specs.values())",
        ("tests/lab/test_sweep.py",),
    ),
    Mutant(
        "factors in q and k before the call are forgotten",
        "src/sqrtdk/torch/watch/layer_scale.py",
        "at_the_call * factor",
        "at_the_call",
        ("tests/torch/watch/test_scales.py",),
    ),
    Mutant(
        "sharp heads raise an alarm without a cause",
        "src/sqrtdk/diagnosis/row_rules.py",
        "if names[head] == OTHER:",
        "if True:",
        ("tests/diagnosis/test_diagnosis.py",),
    ),
    Mutant(
        "the kernel's soft cap without its derivative in the gradient",
        "kernel/backward/logit_gradients.h",
        "if (adjusted) grad = S::mul(grad, cap_gradient);",
        "",
        ("tests/operation/engines/test_kernel_backward.py",),
    ),
    Mutant(
        "the kernel's cubes of weights shrink as squares when the maximum grows",
        "kernel/forward/row_state.h",
        "row.tail3[i] = f * f * f * (row.tail3[i] + joins)",
        "row.tail3[i] = f * f * (row.tail3[i] + joins)",
        (
            "tests/operation/engines/test_kernel_edges.py",
            "tests/test_statistics.py",
            "tests/operation/test_attention.py",
        ),
    ),
    Mutant(
        "the kernel's parts of a long row are added without their common maximum",
        "kernel/forward/row_state.h",
        "take[i] = theirs == top ? 1.0 : std::exp(theirs - top);",
        "take[i] = 1.0;",
        ("tests/operation/engines/test_kernel.py", "tests/operation/engines/test_kernel_edges.py"),
    ),
    Mutant(
        "the kernel takes a block for visible whose last key is hidden",
        "kernel/rows/visibility.h",
        "return most_lo <= begin && least_hi >= end - 1;",
        "return most_lo <= begin && least_hi >= end - 2;",
        ("tests/operation/engines/test_kernel_edges.py",),
    ),
    Mutant(
        "the kernel's gradient of values from weights that were dropped",
        "kernel/backward/tile.h",
        "if (drops) rows.template drop<true>(weights, block.begin, span);",
        "",
        ("tests/operation/engines/test_kernel_dropout.py",),
    ),
    Mutant(
        "the kernel draws by the key of a block in place of that of the call",
        "kernel/forward/few_rows.h",
        "place.number(call), begin, count",
        "place.number(call), 0, count",
        ("tests/operation/engines/test_kernel_dropout.py",),
    ),
    Mutant(
        "clipping a head with a key of its own takes its factor twice",
        "src/sqrtdk/torch/training/qk_clip.py",
        "own = gamma if is_shared else math.sqrt(gamma)",
        "own = gamma",
        ("tests/torch/training/test_qk_clip.py",),
    ),
    Mutant(
        "clipping forgets the biases",
        "src/sqrtdk/torch/training/qk_clip.py",
        "for stored in (columns.projection.weight, columns.projection.bias):",
        "for stored in (columns.projection.weight,):",
        ("tests/torch/training/test_qk_clip.py",),
    ),
    Mutant(
        "the monitor observes the step after the one that is due",
        "src/sqrtdk/torch/training/schedule.py",
        "or step % self.every == 0",
        "or step % self.every == 1 % self.every",
        ("tests/torch/training/test_monitor.py",),
    ),
    Mutant(
        "the monitor writes the mean of the logits' maxima as their maximum",
        "src/sqrtdk/torch/training/monitor.py",
        'summary["max_logit"].largest',
        'summary["max_logit"].mean',
        ("tests/torch/training/test_monitor.py",),
    ),
    Mutant(
        "an alert clears one observation too late",
        "src/sqrtdk/diagnosis/alerts.py",
        "if absent + 1 < OBSERVATIONS_TO_CLEAR:",
        "if absent < OBSERVATIONS_TO_CLEAR:",
        ("tests/diagnosis/test_alerts.py",),
    ),
    Mutant(
        "an audit leaves the model in evaluation mode",
        "src/sqrtdk/torch/models/evaluation.py",
        "module.training = mode",
        "module.training = False",
        ("tests/torch/models/test_audit.py",),
    ),
    Mutant(
        "an audit reads GPT-2's division by the layer's number from the first layer on",
        "src/sqrtdk/torch/models/declared.py",
        "Declaration(value / (index + 1), ",
        "Declaration(value / max(index, 1), ",
        ("tests/torch/models/test_declared.py",),
    ),
    Mutant(
        "two scales are the same within twice what rounding explains",
        "src/sqrtdk/diagnosis/scale_rules.py",
        "return abs(one - two) <= tolerance * abs(two)",
        "return abs(one - two) <= 2 * tolerance * abs(two)",
        ("tests/diagnosis/test_scale_rules.py",),
    ),
    Mutant(
        "the store takes a failed run for a finished one",
        "src/sqrtdk/lab/store.py",
        'if row["status"] != "failed":',
        "if row:",
        ("tests/lab/test_store.py",),
    ),
    Mutant(
        "the store reads rows whose checksum does not fit",
        "src/sqrtdk/lab/store_file.py",
        "if checksum is not None and checksum != seal(values).encode():",
        "if checksum is None:",
        ("tests/lab/test_store.py",),
    ),
    Mutant(
        "the server answers pages of other sites",
        "src/sqrtdk/web/gate.py",
        'if origin and origin not in ([f"http://{host}"], [f"https://{host}"]):',
        "if len(origin) > 1:",
        ("tests/web/test_gate.py",),
    ),
    Mutant(
        "the server takes the beginning of its token for the token",
        "src/sqrtdk/web/gate.py",
        "return hmac.compare_digest(given.encode(), self._token.encode())",
        "return self._token.startswith(given)",
        ("tests/web/test_gate.py",),
    ),
    Mutant(
        "the server's cookie can be read by scripts",
        "src/sqrtdk/web/gate.py",
        "; Path=/; HttpOnly; SameSite=Strict",
        "; Path=/; SameSite=Strict",
        ("tests/web/test_gate.py",),
    ),
    Mutant(
        "a script of the pages writes markup",
        "src/sqrtdk/web/static/audit.js",
        '$("head-says").textContent =',
        '$("head-says").innerHTML =',
        ("tests/web/test_app.py",),
    ),
    Mutant(
        "the script beside the numbers draws with another seed",
        "src/sqrtdk/web/vectors.py",
        "default_rng({asked.seed})",
        "default_rng({asked.seed + 1})",
        ("tests/web/test_app.py",),
    ),
    Mutant(
        "gradients of sinks summed over the heads",
        "src/sqrtdk/operation/attention.py",
        "if axis != per_row.ndim - 2)",
        "if axis != per_row.ndim - 1)",
        ("tests/operation/test_gradients.py",),
    ),
    Mutant(
        "slopes count from the first key whatever the offset",
        "src/sqrtdk/torch/engines/tiles.py",
        "distances = call.band.distances(rows, keys).to(dtype)",
        "distances = (keys - rows[:, None]).to(dtype)",
        ("tests/torch/test_alibi.py",),
    ),
    Mutant(
        "an offset is not asked for with slopes",
        "src/sqrtdk/operation/arguments.py",
        "per_head is not None and has_positions(per_head)",
        "False",
        ("tests/operation/test_alibi.py",),
    ),
    Mutant(
        "numbers per row of one batch entry for all in the kernel",
        "bindings/arrays.h",
        "problem.name.n = inner.strides[at_##name];",
        "problem.name.n = 0;",
        ("tests/operation/test_alibi.py", "tests/operation/test_attention.py"),
    ),
]

# The installed package is found by a hook of its own, before any path: the copy must come first.
RUN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, "src")
import pytest
import sqrtdk
assert sqrtdk.__file__.startswith(sys.argv[1]), sqrtdk.__file__
sys.exit(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def plant(copy: Path, mutant: Mutant) -> None:
    """Write the fault into the copy."""
    path = copy / mutant.file
    text = path.read_text()
    if text.count(mutant.original) != 1:
        sys.exit(f"{mutant.name}: {mutant.file} has {text.count(mutant.original)} places that read {mutant.original!r}")
    path.write_text(text.replace(mutant.original, mutant.fault))


def compile_kernel(copy: Path) -> None:
    """Compile the copy's kernel, in one build directory for all of them, and put it into its package."""
    build, tools = copy / "build", Path(sys.executable).parent
    if not build.exists():
        nanobind = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True).strip()
        configure = [f"-Dnanobind_DIR={nanobind}", f"-DPython_EXECUTABLE={sys.executable}", "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
        subprocess.run([tools / "cmake", "-S", copy, "-B", build, *configure], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([tools / "cmake", "--build", build, "-t", "_kernel"], check=True, stdout=subprocess.DEVNULL)
    (compiled,) = build.glob("_kernel*.so")
    shutil.copy(compiled, copy / "src/sqrtdk" / compiled.name)


def run_tests(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The fast tests of these files, on the copy."""
    command = [sys.executable, "-c", RUN, str(copy), "-m", "not slow and not long", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def try_mutant(copy: Path, mutant: Mutant) -> bool:
    """Whether the tests find the fault; the copy is as before after it."""
    path = copy / mutant.file
    before = path.read_text()
    is_compiled = mutant.file.startswith(("kernel/", "bindings/"))
    plant(copy, mutant)
    try:
        if is_compiled:
            compile_kernel(copy)
        done = run_tests(copy, mutant.tests)
    finally:
        path.write_text(before)
        if is_compiled:
            shutil.copy(_kernel.__file__, copy / "src/sqrtdk")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1):
        sys.exit(f"{mutant.name}: the tests did not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{'found   ' if failed else 'SURVIVES'}  {mutant.name}", flush=True)
    for line in failed[:SHOWN]:
        print(f"          {line.split(' - ')[0]}", flush=True)
    return bool(failed)


def main() -> None:
    """Plant every fault; exit code 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORDS", default="", help="only faults whose name contains these words")
    parser.add_argument("--first", metavar="N", type=int, default=1, help="begin with the N-th fault of the list")
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS[max(asked.first - 1, 0) :] if asked.only in mutant.name]
    if not chosen:
        parser.error(f"--only must be part of a name from --first on: {', '.join(mutant.name for mutant in MUTANTS)}")
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory).resolve() / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", "*.sqlite*")
        shutil.copytree(ROOT, copy, ignore=ignored)
        shutil.copy(_kernel.__file__, copy / "src/sqrtdk")
        control = run_tests(copy, tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests)))
        if control.returncode != 0:
            sys.exit(f"without any fault the tests must pass, got\n{control.stdout[-2000:]}{control.stderr[-2000:]}")
        survivors = [mutant.name for mutant in chosen if not try_mutant(copy, mutant)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults found")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
