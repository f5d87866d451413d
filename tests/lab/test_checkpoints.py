"""Checkpoints: a run that goes on has the bits of an uninterrupted one, and a damaged file is never believed."""

import errno
import json
import os
import random

import pytest
import torch
from safetensors.torch import load

from sqrtdk.errors import SqrtdkWarning
from sqrtdk.lab import RunSpec
from sqrtdk.lab.checkpoints import Checkpoints, read_state, seal
from sqrtdk.lab.store import LEARNED_CURVES
from sqrtdk.lab.train import train

SMALL = {"d_model": 16, "d_k": 8, "steps": 12, "batch": 4, "record_every": 5}


def numbers(record):
    return {name: value for name, value in record.row.items() if name != "seconds"}, record.curves, record.maps


def train_with_checkpoints(spec):
    """Return the record of a run, and a checkpoint of each of its steps."""
    made = {}
    record = train(spec, lambda step, curves, make, maps: made.update({step: make()}))
    return record, made


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scale": "qk_norm", "heads": 2, "feedforward": 8},
        {"scale": "learned", "start_scale": "sqrt", "start_steps": 6},
        {"task": "text", "task_parameters": {"context": 16}},
    ],
    ids=["plain", "learned gain", "swap", "text"],
)
def test_a_run_goes_on_from_every_step_with_the_same_bits(changes):
    spec = RunSpec(**SMALL, **changes)
    record, made = train_with_checkpoints(spec)
    assert list(made) == list(range(1, spec.total_steps + 1))
    for step, checkpoint in made.items():
        steps = []
        rest = train(spec, lambda done, *_, steps=steps: steps.append(done), checkpoint)
        assert steps == list(range(step + 1, spec.total_steps + 1))
        assert numbers(rest) == numbers(record)


def test_a_checkpoint_from_before_a_curve_was_recorded_goes_on_without_its_first_points():
    spec = RunSpec(**SMALL, scale="learned")
    record, made = train_with_checkpoints(spec)
    added = ("pressure", *LEARNED_CURVES)
    old = rewrite(made[7], lambda state: [state["curves"].pop(name) for name in added])
    rest = train(spec, None, old)
    assert rest.row["final_loss"] == record.row["final_loss"]
    assert rest.curves["loss"] == record.curves["loss"]
    for name in added:
        assert rest.curves[name] == [None, None, *record.curves[name][2:]]


def test_the_seconds_before_the_checkpoint_count():
    spec = RunSpec(**SMALL)
    _, made = train_with_checkpoints(spec)
    assert train(spec, None, made[12]).row["seconds"] >= round(read_state(made[12], spec.key)["seconds"], 3) > 0.0


def test_the_global_generator_of_torch_is_left_alone():
    spec = RunSpec(**SMALL)
    _, made = train_with_checkpoints(spec)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(spec, None, made[3])
    assert torch.equal(torch.get_rng_state(), before)
    assert "torch" in load(made[3])


def test_a_diverging_run_says_at_which_step_also_after_a_checkpoint():
    spec = RunSpec(**SMALL, lr=1e30)
    record, made = train_with_checkpoints(spec)
    assert record.row["status"] == "diverged"
    assert record.row["diverged_at"] == max(made) < 12
    assert numbers(train(spec, None, made[1])) == numbers(record)


def rewrite(checkpoint, change):
    """Return a checkpoint whose state was changed by someone who knows how to seal."""
    end = 8 + int.from_bytes(checkpoint[:8], "little")
    header = json.loads(checkpoint[8:end])
    state = json.loads(header["__metadata__"].pop("state"))
    del header["__metadata__"]["checksum"]
    change(state)
    header["__metadata__"]["state"] = json.dumps(state)
    written = json.dumps(header).encode()
    return seal(len(written).to_bytes(8, "little") + written + checkpoint[end:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(key="0" * 16), "of run 0000000000000000"),
        (lambda state: state["machine"].update(torch="1.0"), r"made with torch 1\.0"),
        (lambda state: state["machine"].update(level="abacus"), "made with level abacus"),
    ],
)
def test_a_checkpoint_of_another_run_or_machine_is_not_used(change, words):
    spec = RunSpec(**SMALL)
    record, made = train_with_checkpoints(spec)
    assert rewrite(made[5], lambda state: None)
    with pytest.warns(SqrtdkWarning, match=rf"{spec.key} cannot be used \(it .*{words}\); the run begins again"):
        assert numbers(train(spec, None, rewrite(made[5], change))) == numbers(record)


def test_no_flipped_bit_and_no_cut_is_believed():
    spec = RunSpec(**SMALL)
    _, made = train_with_checkpoints(spec)
    content, rng = made[5], random.Random(0)
    truth = read_state(content, spec.key)
    header = int.from_bytes(content[:8], "little")
    # Everywhere in the header, where a flip could change meaning, and at random among the tensors.
    places = [*range(0, 8 + header, 7), *(rng.randrange(len(content)) for _ in range(200))]
    refused = 0
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        try:
            assert read_state(bytes(changed), spec.key) == truth  # only a blank at the header's end can be another
            assert content[place : place + 1] == b" "
        except ValueError:
            refused += 1
    assert refused >= len(places) - 3
    for length in (0, 1, 7, 8, 9, 100, header, 8 + header, len(content) - 1):
        with pytest.raises(ValueError, match=r"it is no checkpoint|checksum does not fit"):
            read_state(content[:length], spec.key)


@pytest.fixture
def two(tmp_path):
    """A folder with two checkpoints of a run, of steps 4 and 5."""
    spec = RunSpec(**SMALL)
    _, made = train_with_checkpoints(spec)
    said = []
    kept = Checkpoints(tmp_path / "runs.checkpoints", said.append)
    for step in (3, 4, 5):
        kept.put(spec.key, made[step])
    return kept, spec.key, made, said


def test_the_last_two_are_kept_and_removed_with_their_folder(two):
    kept, key, made, said = two
    names = sorted(path.name for path in kept.folder.iterdir())
    assert names == [f"{key}.before.safetensors", f"{key}.safetensors"]
    assert kept.get(key) == made[5]
    kept.drop(key)
    assert kept.get(key) is None
    kept.close()
    assert not kept.folder.exists()
    assert not said


@pytest.mark.parametrize("damage", [lambda content: content[:-3], lambda content: b"", lambda content: b"x" * 500])
def test_a_damaged_one_is_named_and_the_one_before_is_used(two, damage):
    kept, key, made, said = two
    latest, before = (kept.folder / f"{key}{kind}.safetensors" for kind in ("", ".before"))
    latest.write_bytes(damage(made[5]))
    assert kept.get(key) == made[4]
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {latest} cannot be used (")
    assert said[0].endswith("the run goes on from the one before it")
    before.write_bytes(damage(made[4]))
    assert kept.get(key) is None
    assert said[1].endswith("the run goes on from the start")


def test_a_full_disk_costs_the_new_checkpoint_alone(two, monkeypatch):
    kept, key, made, said = two

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    kept.put(key, made[6])
    monkeypatch.undo()
    assert kept.get(key) == made[5]
    assert len(list(kept.folder.iterdir())) == 2
    assert said == [
        f"checkpoint {kept.folder / key}.safetensors cannot be written ([Errno 28] No space left on device); "
        "the run goes on without this checkpoint"
    ]


def test_without_a_folder_nothing_is_kept():
    kept = Checkpoints(None)
    kept.put("a", b"b")
    assert kept.get("a") is None
    kept.drop("a")
    kept.close()
