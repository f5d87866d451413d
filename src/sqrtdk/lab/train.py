"""Training of one run: a spec becomes a trained model and a record. Divergence is a result."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import warn
from sqrtdk.lab.checkpoints import describe_machine, read_state, seal
from sqrtdk.lab.maps import MapRecorder
from sqrtdk.lab.spec import RunSpec, query_key_factor
from sqrtdk.lab.store import CURVES, LEARNED_CURVES, RunRecord, identify_run
from sqrtdk.lab.tasks import Batch
from sqrtdk.lab.transformer import (
    SeenAttention,
    Transformer,
    describe_attention,
    describe_heads,
    describe_temperature,
    sum_pressure,
)
from sqrtdk.scales import LEARNABLE

_DATA_STREAM = 0
_EPS = 1e-8  # torch's own default
# Pressure and temperature take 0.7 to 1.3 ms, a step of the usual run 4: at every fourth point they cost less than 1%.
_SPARSE = 4

Report = Callable[[int, Mapping[str, list[Any]], Callable[[], bytes], Callable[[], Mapping[str, Any]]], None]


def train(spec: RunSpec, report: Report | None = None, checkpoint: bytes | None = None, maps: bool = True) -> RunRecord:
    """Train one model on one thread and judge it on held-out data.

    The curves have a point every `record_every` steps and one at the last step. A step's number is how many updates
    came before it. Loss and accuracy of a point are means over the training batches since the point before, each
    batch taken before its update; the other values are of the point's own batch. `pressure` is ∂loss/∂log scale for a
    scale that all heads share: below 0 the loss would fall with sharper attention, above 0 with softer. Pressure and
    learned temperatures are taken at every fourth point and at the last, and are None at the others.

    Args:
        spec: what to train.
        report: called after each update with the number of updates done, the curves so far, a function that
            returns a checkpoint, and one that returns the maps so far.
        checkpoint: goes on from here, to the bit as if nothing had been interrupted. A checkpoint of another spec,
            other versions or another CPU level is not used, with a warning.
        maps: record attention maps of one example, see `MapRecorder`. The other numbers are the same without them.

    Returns:
        The record; its status is ``"diverged"`` as soon as a loss is not finite or passes `stop_above`, and
        `diverged_at` says after how many updates.
    """
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        run = _Run(spec, report, maps)
        if checkpoint is not None:
            try:
                run.restore(checkpoint)
            except (ValueError, KeyError, RuntimeError) as error:
                warn(f"the checkpoint of run {spec.key} cannot be used ({error}); the run begins again")
                run = _Run(spec, report, maps)
        outcome = run.execute()
    row = {**identify_run(spec), **outcome, "seconds": round(run.elapsed(), 3)}
    return RunRecord(row=row, curves=run.curves, maps=run.show_maps())


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: sums over threads would make the numbers depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    def __init__(self, spec: RunSpec, report: Report | None, maps: bool = True) -> None:
        self.spec = spec
        self.task = spec.make_task()
        self.held_out = self.task.held_out()
        self.model = Transformer(spec, self.task)
        groups = self.model.parameter_groups(spec.lr, query_key_factor(spec.qk_step, spec.d_k), _EPS)
        self.optimiser = torch.optim.Adam(groups, fused=True)
        self.weights = list(self.model.parameters())
        self.rng = np.random.default_rng([_DATA_STREAM, spec.seed])
        self.learns = not {spec.scale, spec.start_scale}.isdisjoint(LEARNABLE)
        names = (*CURVES, *LEARNED_CURVES) if self.learns else CURVES
        self.curves: dict[str, list[Any]] = {name: [] for name in names}
        self.maps = MapRecorder(self.task, self.held_out, spec.total_steps) if maps else None
        self.report = report
        self.step = 0
        # Of the batches since the last point of the curves.
        self.losses: list[float] = []
        self.accuracies: list[float] = []
        self.outcome: dict[str, Any] = {}
        self.seconds = 0.0  # before the checkpoint that the run went on from
        self.began = time.perf_counter()

    def execute(self) -> dict[str, Any]:
        """Train, with the swap if there is one, and return the status."""
        spec = self.spec
        if spec.start_scale is not None and "start_loss" not in self.outcome:
            self.model.set_scale(spec.start_scale)
            finite = self.advance(spec.start_steps)
            self.outcome["start_loss"], self.outcome["start_accuracy"], _ = self.evaluate()
            self.model.set_scale(spec.scale)
            self.outcome["swapped_loss"], self.outcome["swapped_accuracy"], _ = self.evaluate()
            if not finite:
                return self.diverged()
        if not self.advance(spec.total_steps):
            return self.diverged()
        self.record_map()
        loss, accuracy, seen = self.evaluate()
        if loss is None:
            return self.diverged()
        return {
            **self.outcome,
            "status": "done",
            "final_loss": loss,
            "final_accuracy": accuracy,
            "solved": loss < self.task.threshold,
            "steps_to_threshold": self.steps_to_threshold(),
            **self.describe_end(seen),
        }

    def advance(self, last: int) -> bool:
        """Do the updates up to `last`; False when the loss stopped being finite or passed `stop_above`."""
        while self.step < last:
            step = self.step
            self.record_map()
            is_point = step % self.spec.record_every == 0 or step == last - 1
            is_sparse_point = is_point and (len(self.curves["step"]) % _SPARSE == 0 or step == last - 1)
            batch = self.task.sample(self.rng, self.spec.batch)
            scores, seen, targets = self.ask(batch, statistics=is_point, pressure=is_sparse_point)
            loss = functional.cross_entropy(scores, targets)
            self.losses.append(loss.item())
            if not math.isfinite(self.losses[-1]):
                return False
            self.accuracies.append(_accuracy(scores, targets))
            for weight in self.weights:  # as `zero_grad` does, without the 1% of a step that its profiler hooks take
                weight.grad = None
            loss.backward()  # type: ignore[no-untyped-call]
            if is_point:
                grad_q, grad_k = self.model.query_key_gradient_norms()
                point = {"step": step, "loss": float(np.mean(self.losses)), "accuracy": float(np.mean(self.accuracies))}
                point |= {"grad_q": grad_q, "grad_k": grad_k, **describe_attention(seen)}
                self.record(point | (self.describe_scale(seen) if is_sparse_point else {}))
                self.losses, self.accuracies = [], []
                if self.spec.stop_above is not None and point["loss"] > self.spec.stop_above * self.task.chance_loss:
                    return False
            self.optimiser.step()
            self.step = step + 1
            if self.report is not None:
                self.report(self.step, self.curves, self.checkpoint, self.show_maps)
        return True

    def checkpoint(self) -> bytes:
        """Return all that the rest of the run depends on, between two updates."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, values in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{name}": value for name, value in values.items()}
        tensors["torch"] = torch.get_rng_state()
        state = {
            "key": self.spec.key,
            "machine": describe_machine(),
            "step": self.step,
            "curves": self.curves,
            "maps": self.show_maps(),
            "losses": self.losses,
            "accuracies": self.accuracies,
            "outcome": self.outcome,
            "generator": self.rng.bit_generator.state,
            "seconds": self.elapsed(),
        }
        return seal(safetensors.torch.save(tensors, {"state": json.dumps(state)}))

    def elapsed(self) -> float:
        """Return the seconds of the run, those before the checkpoint it went on from included."""
        return self.seconds + time.perf_counter() - self.began

    def restore(self, checkpoint: bytes) -> None:
        """Continue from a checkpoint.

        Raises:
            ValueError, KeyError, RuntimeError: it cannot be used, see `read_state`.
        """
        state = read_state(checkpoint, self.spec.key)
        tensors = safetensors.torch.load(checkpoint)
        torch.set_rng_state(tensors.pop("torch"))
        self.model.load_state_dict(
            {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        )
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimiser."):
                _, index, of_parameter = name.split(".")
                moments.setdefault(int(index), {})[of_parameter] = value
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": moments, "param_groups": groups})
        self.rng.bit_generator.state = state["generator"]
        for name in ("step", "losses", "accuracies", "outcome", "seconds"):
            setattr(self, name, state[name])
        for name in self.curves:  # a checkpoint of an earlier version lacks some
            self.curves[name] = state["curves"].get(name, [None] * len(state["curves"]["step"]))
        if self.maps is not None:
            self.maps.restore(state.get("maps", {}))

    def record_map(self) -> None:
        """Record the map of the present step if one is due."""
        if self.maps is not None:
            self.maps.record(self.step, self.model)

    def show_maps(self) -> dict[str, Any]:
        """Return the maps so far."""
        return {} if self.maps is None else self.maps.content

    def record(self, point: dict[str, Any]) -> None:
        for name, curve in self.curves.items():
            curve.append(point.get(name))

    def describe_scale(self, seen: list[SeenAttention]) -> dict[str, Any]:
        """Return the temperature pressure of a training step, and the temperatures of a scale that learns."""
        learned = describe_temperature(seen, self.spec.d_k) if self.learns else {}
        return {"pressure": sum_pressure(seen), **learned}

    def ask(
        self, batch: Batch, *, statistics: bool = False, pressure: bool = False
    ) -> tuple[Tensor, list[SeenAttention], Tensor]:
        """Return scores, a row per question, attention statistics if asked for, and the right answers."""
        scores, seen = self.model(torch.from_numpy(batch.tokens), statistics, pressure)
        return scores.flatten(0, 1), seen, torch.from_numpy(batch.targets).flatten()

    def evaluate(self) -> tuple[float | None, float | None, list[SeenAttention]]:
        """Return loss and accuracy on the held-out data with the present scale, and what its attention did.

        Loss and accuracy are None when the loss is not finite.
        """
        with torch.no_grad():
            scores, seen, targets = self.ask(self.held_out, statistics=True)
            loss = functional.cross_entropy(scores, targets).item()
        return (loss, _accuracy(scores, targets), seen) if math.isfinite(loss) else (None, None, seen)

    def describe_end(self, seen: list[SeenAttention]) -> dict[str, Any]:
        """Describe each head on the held-out data, and the final learned temperatures."""
        learned = describe_temperature(seen, self.spec.d_k) if self.spec.scale in LEARNABLE else {}
        return {**learned, "measured_heads": describe_heads(seen)}

    def diverged(self) -> dict[str, Any]:
        """Return the outcome of a run that diverged at the present step."""
        return {
            **self.outcome,
            "status": "diverged",
            "diverged_at": self.step,
            "final_loss": None,
            "final_accuracy": None,
            "solved": False,
            "steps_to_threshold": None,
        }

    def steps_to_threshold(self) -> int | None:
        """Updates, counted from the swap if there is one, before the first point whose loss is below the threshold."""
        for step, loss in zip(self.curves["step"], self.curves["loss"], strict=True):
            if step >= self.spec.start_steps and loss < self.task.threshold:
                return int(step) - self.spec.start_steps
        return None


def _accuracy(scores: Tensor, targets: Tensor) -> float:
    right = np.count_nonzero(scores.detach().numpy().argmax(axis=-1) == targets.numpy())
    return float(np.float32(right / len(targets)))
