"""A monitor under the Trainer of transformers: steps, state, exceptions, loggers."""

import json

import pytest
import torch

from monitored import Looks
from sqrtdk.torch import Monitor
from torch_watched import hooks_now

CONFIG = {"vocab_size": 40, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
TOKENS = torch.randint(0, 40, (32, 48), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip("transformers")


def make_model():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG, bos_token_id=None, eos_token_id=None))


def make_trainer(folder, model, monitor, steps, data=DATA, kind=transformers.Trainer, **options):
    """Return a Trainer with gradient accumulation and with evaluation between steps."""
    args = transformers.TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=4,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return kind(model, args, train_dataset=data, eval_dataset=DATA[:4], callbacks=[monitor.callback()], **options)


def test_steps_and_state_are_the_trainers(tmp_path):
    looks, model = Looks(), make_model()
    trainer = make_trainer(tmp_path, model, Monitor(model, to=looks, every=2, on_alert=print), 6)
    trainer.train()
    assert looks.steps == [0, 1, 2, 4, 5]  # the last step, too
    assert list(looks[0][1]["layers"]) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert all(len(entry["layers"]["transformer.h.0.attn"]["max_logit"]) == 2 for _, entry in looks)
    looks, model = Looks(), make_model()
    trainer = make_trainer(tmp_path, model, Monitor(model, to=looks, every=2, on_alert=print), 8)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert looks.steps == [4, 6, 7]
    assert [entry["restart"] for _, entry in looks] == ["resumed", None, None]
    state = json.loads((tmp_path / "run" / "checkpoint-8" / "sqrtdk_monitor.json").read_text())
    assert [step for step, _ in state["trend"]["points"]] == [0, 1, 2, 4, 6, 7]
    # A checkpoint without a state is marked as a restart, too.
    (tmp_path / "run" / "checkpoint-4" / "sqrtdk_monitor.json").unlink()
    looks, model = Looks(), make_model()
    trainer = make_trainer(tmp_path, model, Monitor(model, to=looks, every=2, on_alert=print), 6)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert [(step, entry["restart"]) for step, entry in looks] == [(4, "resumed"), (5, None)]


def test_a_model_that_the_trainer_made_is_observed_and_a_severe_alert_stops_it(tmp_path):
    def make_broken():
        model = make_model()
        model.transformer.h[0].attn.c_attn.bias.data[0] = torch.nan
        return model

    looks = Looks()
    monitor = Monitor(make_model(), to=looks, every=2, on_alert=print, stop_on="severe")
    trainer = make_trainer(tmp_path, None, monitor, 6, model_init=make_broken)
    trainer.train()
    assert looks.steps == [0]
    assert trainer.state.global_step == 1


def test_a_trainer_runs_again_and_a_closed_monitor_observes_nothing(tmp_path):
    looks, model = Looks(), make_model()
    monitor = Monitor(model, to=looks, every=2, on_alert=print)
    trainer = make_trainer(tmp_path, model, monitor, 2)
    trainer.train()
    assert "closed" in repr(monitor)
    trainer.train()
    assert looks.steps == [0, 1, 0, 1]
    monitor.close()
    trainer.train()
    assert len(looks) == 4


def test_an_exception_in_training_leaves_no_hook(tmp_path):
    """A failing forward ends its observation, evaluation ends that of any other failure, and `with` closes at once."""

    class Failing(transformers.Trainer):
        def compute_loss(self, model, inputs, **options):
            super().compute_loss(model, inputs, **options)
            if model.training and self.state.global_step == 2:
                raise ValueError("the loss is wrong")
            return super().compute_loss(model, inputs, **options)

    before, model = hooks_now(), make_model()
    trainer = make_trainer(tmp_path, model, Monitor(model, to=Looks(), every=1, on_alert=print), 6, kind=Failing)
    with pytest.raises(ValueError, match="the loss is wrong"):
        trainer.train()
    assert hooks_now() != before
    trainer.evaluate()
    assert hooks_now() == before
    with Monitor(model, to=Looks(), every=1, on_alert=print) as monitor:
        trainer = make_trainer(tmp_path, model, monitor, 6, kind=Failing)
        with pytest.raises(ValueError, match="the loss is wrong"):
            trainer.train()
    assert hooks_now() == before
    # Token 40 is not in the vocabulary: the forward fails.
    bad = [*DATA[:8], *[{"input_ids": row + 40, "labels": row} for row in TOKENS[8:]]]
    trainer = make_trainer(tmp_path, model, Monitor(model, to=Looks(), every=1, on_alert=print), 6, data=bad)
    with pytest.raises(IndexError):
        trainer.train()
    assert hooks_now() == before


def test_labels_choose_rows_and_the_optimiser_is_the_trainers(tmp_path):
    looks, model = Looks(), make_model()
    data = [{"input_ids": row, "labels": torch.cat([torch.full((16,), -100), row[16:]])} for row in TOKENS]
    monitor = Monitor(model, to=looks, every=1, rows="labels", clip=1e-3, on_alert=print)
    make_trainer(tmp_path, model, monitor, 2, data).train()
    for _, entry in looks:
        assert [layer["rows"] for layer in entry["layers"].values()] == [[2 * 4 * 32] * 2] * 2
        assert entry["clipped"]["heads"]
    assert monitor._optimiser.param_groups
