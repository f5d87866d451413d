"""The build: wheels with the kernel, a pure one where the compiler fails and nobody forbade it, levels kept apart."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEVEL_OBJECTS = sorted(ROOT.glob("build/cp*/CMakeFiles/sqrtdk_level_*.dir/kernel/*/*.o"))


@pytest.mark.skipif(not LEVEL_OBJECTS, reason="no build directory here")
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm here")
def test_levels_share_no_code_that_a_linker_could_merge():
    """A weak symbol compiled with AVX-512 flags and merged into the portable level would stop older machines."""
    for path in LEVEL_OBJECTS:
        listed = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        symbols = [line.split(maxsplit=2) for line in listed.splitlines() if not line.startswith(" ")]
        assert any(kind == "T" for _, kind, _ in symbols)
        weak = [name for _, kind, name in symbols if kind in "WVu" and not name.startswith("DW.ref.")]
        assert weak == [], path.name


@pytest.fixture
def source(tmp_path):
    """A copy of the sources without anything built."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.sqlite*", "*.html")
    return Path(shutil.copytree(ROOT, tmp_path / "source", ignore=ignored))


def build_wheel(source, to, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("SQRTDK_REQUIRE_KERNEL", "CXX")}
    return subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(to), str(source)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=kept | environment,
    )


def run_unpacked(wheel, to, code):
    """What a script prints and says with the wheel's sqrtdk, the one that is installed here left out of the way."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
    packages = sysconfig.get_paths()["platlib"]
    start = f"import sys; sys.path[:0] = [{str(to)!r}]; sys.path.append({packages!r})\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", start + code], capture_output=True, text=True, check=False, timeout=60, cwd=to
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


CALL_TWICE = """
import numpy, sqrtdk
assert sqrtdk.__file__.startswith(sys.path[0])
for _ in range(2):
    output = sqrtdk.attention(*numpy.ones((3, 4, 4), numpy.float32)).output
assert (output == 1).all()
from sqrtdk.commands.cli import main
main(["info"])
"""


@pytest.mark.long
def test_a_broken_compiler_gives_a_pure_wheel_that_says_so(source, tmp_path):
    done = build_wheel(source, tmp_path / "wheels", CXX="/bin/false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WITHOUT its kernel" in done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "sqrtdk/operation/engines/reference.py" in names
    assert not [name for name in names if name.endswith((".so", ".pyd"))]
    out, err = run_unpacked(wheel, tmp_path / "unpacked", CALL_TWICE)
    assert "sqrtdk runs without its kernel (it was not compiled at installation)" in out
    assert "Attention runs on reference" in out
    assert err.count("SqrtdkWarning") == 1


@pytest.mark.long
def test_a_broken_compiler_is_an_error_where_the_kernel_is_required(source, tmp_path):
    done = build_wheel(source, tmp_path / "wheels", CXX="/bin/false", SQRTDK_REQUIRE_KERNEL="1")
    assert done.returncode != 0
    assert not list((tmp_path / "wheels").glob("*.whl"))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_source_distribution_builds_a_wheel_with_the_kernel_and_again_quickly(source, tmp_path):
    script = "from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", "import sys; " + script, str(tmp_path)], cwd=source, check=True, capture_output=True
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.split("/", 1)[1] for name in packed.getnames() if "/" in name}
        packed.extractall(tmp_path / "from_sdist", filter="data")
    assert {
        "CMakeLists.txt",
        "kernel/kernel.h",
        "bindings/module.cpp",
        "tests/project/test_build.py",
        "LICENSE",
    } <= names
    assert not [name for name in names if name.startswith(("build/", ".")) or "__pycache__" in name]
    (unpacked,) = (tmp_path / "from_sdist").iterdir()
    seconds = []
    for _ in range(2):
        start = time.monotonic()
        done = build_wheel(unpacked, tmp_path / "wheels", SQRTDK_REQUIRE_KERNEL="1")
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0, done.stdout + done.stderr
    assert seconds[1] < 0.5 * seconds[0]  # the build directory is kept
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert not wheel.name.endswith("any.whl")
    out, err = run_unpacked(wheel, tmp_path / "unpacked", CALL_TWICE)
    assert "SqrtdkWarning" not in err
    assert "Attention runs on reference" not in out


def plan(target, *options):
    """What `make` would do on a fresh clone, line by line."""
    command = ["make", "--dry-run", "VENV=/nonexistent/venv", *options, target]
    kept = {name: value for name, value in os.environ.items() if name != "SQRTDK_REQUIRE_KERNEL"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60, env=kept).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_run_needs_neither_root_nor_compiler():
    for target in ("run", "setup", "kernel", "lint"):
        assert "apt-get" not in plan(target), target
    for target in ("test", "check", "test-slow", "test-long", "test-oldest", "wheel", "sanitize"):
        lines = plan(target).splitlines()
        (first, *_) = [index for index, line in enumerate(lines) if "apt-get" in line]
        builds = [index for index, line in enumerate(lines) if "-e " in line or "cmake --build" in line]
        assert builds, target
        assert first < builds[0], target


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_the_kernel_is_required_by_what_is_tested_measured_or_shipped(tmp_path):
    probe = tmp_path / "probe.mk"
    targets = {"run": "", "setup": "", "kernel": "", "lint": ""}
    targets |= dict.fromkeys(
        ("test", "check", "test-slow", "test-long", "test-oldest", "sanitize", "wheel", "bench"), "1"
    )
    # A prerequisite sees the variables of its target, and a dry run shows them expanded.
    probe.write_text(
        f"include Makefile\n{' '.join(targets)}: probe\nprobe:\n\techo required=$(SQRTDK_REQUIRE_KERNEL).\n"
    )
    for target, required in targets.items():
        assert f"required={required}." in plan(target, "-f", str(probe)), target


SMALL_TREE = {
    **dict.fromkeys(("kernel/level.h", "kernel/forward/tile.h", "kernel/tests/compare.h", "kernel/pool.cpp"), ""),
    **dict.fromkeys(("bindings/arrays.h", "bindings/module.cpp", "src/sqrtdk/operation/call.py"), ""),
    **dict.fromkeys(("CMakeLists.txt", "pyproject.toml", "constraints.txt"), ""),
    ".venv/bin/python": "#!/bin/sh\n",
    ".venv/bin/pip": "#!/bin/sh\necho called >> .venv/calls\n",
}


@pytest.fixture
def rules(tmp_path):
    """A small tree under the Makefile's rules, and `make kernel` on it, which returns how often pip was called."""
    for name, text in SMALL_TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)

    def make():
        calls = tmp_path / ".venv/calls"
        calls.write_text("")
        done = subprocess.run(["make", "kernel"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
        assert not done.stderr
        return len(calls.read_text().splitlines())

    return tmp_path, make


def settle(tree):
    """Let everything in the tree be of one time that is past: clocks of file systems do not tell two writes apart."""
    for path in [tree, *tree.rglob("*")]:
        os.utime(path, (1e9, 1e9))


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("name", ["bindings/arrays.h", "kernel/level.h", "kernel/forward/tile.h", "kernel/pool.cpp"])
def test_a_change_of_any_source_of_the_kernel_installs_it_again_once(rules, name):
    tree, make = rules
    assert make() > 0
    assert make() == 0
    settle(tree)
    (tree / name).write_text("changed")
    assert (make(), make()) == (1, 0)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (lambda tree: (tree / "kernel/forward/tile.h").rename(tree / "kernel/tile.h"), 1),
        (lambda tree: (tree / "kernel/level.h").unlink(), 1),
        (lambda tree: (tree / "src/sqrtdk/scales.py").touch(), 1),
        (lambda tree: (tree / "kernel/tests/compare.h").write_text("changed"), 0),
    ],
    ids=["moved", "removed", "a new module", "a test of the kernel"],
)
def test_the_list_of_files_is_part_of_the_installation(rules, change, calls):
    tree, make = rules
    for name in ("kernel/forward/tile.h", "kernel/level.h"):
        (tree / name).write_text(name)
    make()
    settle(tree)
    change(tree)
    assert make() == calls


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("allowed", [True, False])
def test_system_packages_are_announced_and_going_without_one_is_said(tmp_path, allowed):
    apt = tmp_path / "apt-get"
    apt.write_text(f"#!/bin/sh\necho apt-get $1 $6 >&2\nexit {0 if allowed else 100}\n")
    apt.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CXX": "no-such-compiler"}
    done = subprocess.run(
        ["make", "-s", "compiler"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    said, *rest = done.stdout.splitlines()
    assert said == "g++ is missing: installing it with apt-get (needs root and a network)"
    if allowed:
        assert [line.split()[:2] for line in rest] == [["apt-get", "update"], ["apt-get", "install"]]
    else:
        assert rest[0].startswith("apt-get update")
        assert rest[1].startswith("g++ could not be installed here: without a C++17 compiler no kernel is built")


def test_ci_runs_its_layers_from_cheap_to_dear_and_no_test_twice():
    script = (ROOT / ".ci" / "run").read_text()
    (layers,) = re.findall(r"^for layer in (.*); do$", script, re.MULTILINE)
    assert layers.split() == ["lint", "check", "site", "test-slow", "test-long", "test-oldest", "wheel", "sanitize"]
    marks = {}
    for layer in layers.split():
        marks[layer] = re.findall(r'pytest.* -m "?([a-z ]+)"?$', plan(layer), re.MULTILINE)
    assert marks.pop("lint") == marks.pop("site") == marks.pop("wheel") == marks.pop("sanitize") == []
    del marks["test-oldest"]  # tests of the long layer, on another release of transformers
    assert list(marks.values()) == [["not slow and not long"], ["slow and not long"], ["long"]]
    assert re.findall(r'pytest.* -m "([a-z ]+)"$', plan("test"), re.MULTILINE) == ["not long"]
