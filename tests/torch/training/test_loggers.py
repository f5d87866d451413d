"""Destinations with the real loggers, offline: what a monitor writes can be read back from their files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("torch")

PACKAGES = Path(sys.prefix) / "loggers"
PROGRAM = Path(__file__).parents[2] / "support" / "loggers_run.py"


@pytest.fixture(scope="module")
def trials():
    assert PACKAGES.is_dir(), f"{PACKAGES} has no packages: `make test-long` installs them from tests/loggers.txt"
    done = subprocess.run([sys.executable, PROGRAM, PACKAGES], stdout=subprocess.PIPE, check=True, env={**os.environ})
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("logger", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_logger_has_the_numbers_of_every_step(trials, logger):
    trial = trials[f"try_{logger}"]
    assert "failed" not in trial, trial
    assert trial["logged"] == [[step, pytest.approx(value)] for step, value in enumerate(trial["expected"])]
    assert len(trial["expected"]) == 4


def test_tensorboard_has_the_text_of_an_alert(trials):
    (text,) = trials["try_tensorboard"]["other"]
    assert text.startswith("(the model), head 0: Scores of these rows are NaN or infinite.")


def test_the_loggers_of_a_trainer_get_the_numbers_at_its_own_steps(trials):
    """The Trainer counts finished steps, so that step 0 is its 1; its losses are not disturbed."""
    trial = trials["try_trainer"]
    assert "failed" not in trial, trial
    steps = [0, 1, 2, 4, 5]
    assert trial["logged"] == [
        [step + 1, pytest.approx(value)] for step, value in zip(steps, trial["expected"], strict=True)
    ]
    assert trial["other"] == 6
