"""Models of some twenty packages that were not written with sqrtdk in mind, under a watch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torch_others import OTHERS

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PACKAGES = Path(sys.prefix) / "others"
PROGRAM = Path(__file__).parents[2] / "support" / "torch_others.py"


@pytest.fixture(scope="module")
def found():
    assert PACKAGES.is_dir(), f"{PACKAGES} has no packages: `make test-long` installs them from tests/others.txt"
    done = subprocess.run([sys.executable, PROGRAM, PACKAGES], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", OTHERS)
def test_attention_of_other_packages_is_measured_or_listed(found, name):
    other = OTHERS[name]
    assert isinstance(found[name], list), f"{name} did not run (packages are those of tests/others.txt): {found[name]}"
    seen, again = found[name]
    assert again == seen
    assert seen["same"]
    assert seen["heads"] == other.heads
    assert seen["scales"] == [None if scale is None else pytest.approx(scale, rel=1e-5) for scale in other.scales]
    assert seen["missed"] == other.missed
    assert [note.split(" (first in")[0] for note in seen["notes"]] == list(other.notes)
