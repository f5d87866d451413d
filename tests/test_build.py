"""The build: wheels with the kernel, a pure one where the compiler fails and nobody forbade it, levels kept apart."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVEL_OBJECTS = sorted(ROOT.glob("build/cp*/CMakeFiles/sqrtdk_level_*.dir/kernel/*.o"))


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
from sqrtdk.cli import main
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
    assert "sqrtdk/engines/reference.py" in names
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
    assert {"CMakeLists.txt", "kernel/kernel.h", "bindings/module.cpp", "tests/test_build.py", "LICENSE"} <= names
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
    for target in ("test", "check", "test-long", "sanitize"):
        lines = plan(target).splitlines()
        (first, *_) = [index for index, line in enumerate(lines) if "apt-get" in line]
        builds = [index for index, line in enumerate(lines) if "-e " in line or "cmake --build" in line]
        assert builds, target
        assert first < builds[0], target


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_the_kernel_is_required_by_what_is_tested_measured_or_shipped(tmp_path):
    probe = tmp_path / "probe.mk"
    targets = {"run": "", "setup": "", "kernel": "", "lint": ""}
    targets |= dict.fromkeys(("test", "check", "test-long", "sanitize", "wheel", "bench"), "1")
    # A prerequisite sees the variables of its target, and a dry run shows them expanded.
    probe.write_text(
        f"include Makefile\n{' '.join(targets)}: probe\nprobe:\n\techo required=$(SQRTDK_REQUIRE_KERNEL).\n"
    )
    for target, required in targets.items():
        assert f"required={required}." in plan(target, "-f", str(probe)), target
