"""Callbacks that tell a monitor when the steps of a training library begin and end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqrtdk.diagnosis.alerts import Alert
from sqrtdk.errors import SqrtdkError, missing_extra

if TYPE_CHECKING:
    from sqrtdk.torch.training.monitor import Monitor

STATE_FILE = "sqrtdk_monitor.json"
"""Name of the file in a checkpoint folder that holds the state of the monitor."""


class StopTraining(SqrtdkError):  # noqa: N818 - as StopIteration
    """Ends a training run. `Monitor.step` raises it for `stop_on`, and passes it on if `on_alert` raises it.

    With a Trainer, `should_training_stop` is set instead. `alert` is the alert that was the reason, or None.
    """

    def __init__(self, alert: Alert | str) -> None:
        super().__init__(str(alert))
        self.alert = alert if isinstance(alert, Alert) else None


def make_lightning_callback(monitor: Monitor) -> Any:
    """Return the Lightning callback of a monitor. The state of the monitor is saved in Lightning's checkpoints."""
    try:
        from lightning.pytorch import Callback  # type: ignore[import-not-found]
    except ImportError:
        raise SqrtdkError("monitor.callback('lightning') needs lightning; run pip install lightning") from None

    class MonitorCallback(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            steps = trainer.estimated_stepping_batches  # infinite if the run has no known end
            monitor._begin_run(last=int(steps) - 1 if math.isfinite(steps) else None)
            monitor._take_optimiser(trainer.optimizers)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            monitor._next = int(trainer.global_step)
            monitor._begin()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step > monitor._next:  # otherwise the step accumulates more batches
                try:
                    monitor._end(False)
                except StopTraining:
                    trainer.should_stop = True

        def state_dict(self) -> dict[str, Any]:
            return monitor.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            monitor.load_state_dict(state_dict)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            monitor.close()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            monitor._end_run()

    return MonitorCallback()


def make_trainer_callback(monitor: Monitor) -> Any:
    """Return the `transformers.TrainerCallback` of a monitor."""
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise missing_extra("transformers", "hf") from None

    class MonitorCallback(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE_FILE
            if state.global_step:
                monitor._restart = "resumed"
                if file.is_file():
                    monitor.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
            monitor._begin_run(kwargs["model"], state.max_steps - 1)
            monitor._take_optimiser(kwargs.get("optimizer"))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor._next = int(state.global_step)
            monitor._begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            try:
                monitor._end(bool(getattr(kwargs.get("optimizer"), "step_was_skipped", False)))
            except StopTraining:
                control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if state.is_world_process_zero and folder.is_dir():
                (folder / STATE_FILE).write_text(json.dumps(monitor.state_dict()), encoding="utf-8")

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor._leave_watch()  # an observed step is open only if an exception ended the training

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor._end_run()

    return MonitorCallback()
