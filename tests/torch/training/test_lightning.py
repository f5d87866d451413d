"""A monitor under Lightning's own Trainer: accumulation, validation, checkpoints, exceptions, stopping."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sqrtdk.errors import InvalidValueError

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]
torch = pytest.importorskip("torch")

PACKAGES = Path(sys.prefix) / "others"
PROGRAM = Path(__file__).parents[2] / "support" / "lightning_run.py"


def test_lightning_tells_steps_saves_the_state_and_stops():
    assert PACKAGES.is_dir(), f"{PACKAGES} has no packages: `make test-long` installs them from tests/others.txt"
    done = subprocess.run([sys.executable, PROGRAM, PACKAGES], stdout=subprocess.PIPE, check=True)
    runs = json.loads(done.stdout.splitlines()[-1])
    assert all(run["closed"] for run in runs.values())
    # Two batches make a step; validation in between is none.
    assert runs["healthy"]["steps"] == [[0, 0], [1, 0], [2, 0], [4, 0], [8, 0], [11, 0]]
    assert (runs["healthy"]["failure"], runs["healthy"]["end"]) == (None, 12)
    assert runs["stopped"]["steps"][0][1] > 0
    assert runs["stopped"]["end"] < 12
    assert runs["failed"]["failure"] == "the loss is wrong"
    assert [step for step, _ in runs["resumed"]["steps"]] == [8, 11]


def test_another_library_is_refused():
    from sqrtdk.torch import Monitor

    monitor = Monitor(torch.nn.Linear(1, 1), to=lambda step, entry: None)
    monitor.close()
    with pytest.raises(InvalidValueError, match="unknown library 'fairseq'; known: lightning, transformers"):
        monitor.callback("fairseq")
