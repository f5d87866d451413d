"""Monitored runs that write to real loggers, offline; prints as JSON what each logger then has. Run as a program."""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from sqrtdk.torch import Monitor

STEPS = 4


def make_model():
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 2, batch_first=True)


def monitor(to):
    """Observe four steps; the last one has NaN and so an alert. Return the entries that a function got beside `to`."""
    model, entries = make_model(), {}
    with Monitor(model, to=[to, entries.__setitem__], every=1, on_alert=lambda alert: None) as observer:
        for step in range(STEPS):
            if step == STEPS - 1:
                model.in_proj_bias.data[0] = torch.nan
            model(*[torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(step))] * 3)
            observer.step()
    return [max(entry["layers"][""]["score_spread"], key=lambda one: one or 0.0) for entry in entries.values()]


def read_events(folder):
    """Return the scalars and texts of TensorBoard's files by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {name: [[event.step, event.value] for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    texts = {
        name: [event.tensor_proto.string_val[0].decode() for event in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }
    return scalars, texts


def try_tensorboard(folder):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        expected = monitor(writer)
    scalars, texts = read_events(folder)
    return expected, scalars["sqrtdk/model/score_spread/largest"], texts["sqrtdk/non-finite-rows/text_summary"]


def split_log(content, block=1 << 15, header=7):
    """Yield the records of a W&B file: a LevelDB log, whose first block begins with W&B's own header of 7 bytes.

    A part has a checksum (4 bytes), a length (2) and a kind (1): a whole record, or its first, middle or last part.
    """
    parts, at = b"", 0
    while at + header <= len(content):
        rest = block - (at + header) % block
        if rest < header:  # padding at the end of a block
            at += rest
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if kind == 0:
            return
        parts += content[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):
            yield parts
            parts = b""


def try_wandb(folder):
    os.environ["WANDB_SILENT"] = "true"
    import wandb
    from wandb.proto import wandb_internal_pb2

    run = wandb.init(mode="offline", dir=str(folder), project="p", settings=wandb.Settings(console="off"))
    expected = monitor(run)
    run.finish()
    (file,) = folder.rglob("*.wandb")
    values = []
    for content in split_log(file.read_bytes()[7:]):
        record = wandb_internal_pb2.Record.FromString(content)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "sqrtdk/model/score_spread/largest" in items:
            values.append([json.loads(items["_step"]), json.loads(items["sqrtdk/model/score_spread/largest"])])
    return expected, values, None


def try_trackio(folder):
    os.environ["TRACKIO_DIR"] = str(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import sqlite3

    import trackio

    run = trackio.init(project="p", embed=False)
    expected = monitor(run)
    trackio.finish()
    (file,) = folder.rglob("*.db")
    with sqlite3.connect(file) as store:
        rows = store.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    return expected, [[step, json.loads(one)["sqrtdk/model/score_spread/largest"]] for step, one in rows], None


def try_mlflow(folder):
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    mlflow.set_tracking_uri(folder.as_uri())
    mlflow.set_experiment("p")
    with mlflow.start_run() as run:
        expected = monitor(mlflow)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "sqrtdk/model/score_spread/largest")
    return expected, [[one.step, one.value] for one in history], None


def try_trainer(folder):
    """Train with the Trainer of transformers, whose `report_to` decides where numbers go."""
    import transformers

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "events")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    tokens = torch.randint(0, 40, (32, 48), generator=torch.Generator().manual_seed(0))
    args = transformers.TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=6,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), args, train_dataset=data)
    entries = {}
    observer = Monitor(trainer.model, to=[trainer, entries.__setitem__], every=4, rows="labels")
    trainer.add_callback(observer.callback())
    trainer.train()
    scalars, _ = read_events(next((folder / "events").rglob("events*")).parent)
    expected = [max(entry["layers"]["transformer.h.1.attn"]["score_spread"]) for entry in entries.values()]
    return expected, scalars["train/sqrtdk/transformer.h.1.attn/score_spread/largest"], len(scalars["train/loss"])


TRIALS = [try_tensorboard, try_wandb, try_trackio, try_mlflow, try_trainer]


def main():
    """Run all trials with the packages in the folders that are the arguments."""
    sys.path += sys.argv[1:]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for trial in TRIALS:
            place = Path(folder) / trial.__name__
            place.mkdir()
            try:
                expected, logged, other = trial(place)
                results[trial.__name__] = {"expected": expected, "logged": logged, "other": other}
            except Exception as error:
                results[trial.__name__] = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
