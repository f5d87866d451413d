"""A monitor under the Trainer of transformers: steps, state, exceptions, loggers."""

import json

import pytest
import torch

from monitored import Looks
from sqrtdk.torch import Monitor


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_a_trainer_of_transformers(tmp_path):
    """A real run: gradient accumulation, evaluation between steps, resumed from a checkpoint."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    tokens = torch.randint(0, 40, (32, 48), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def run(looks, steps, stop_on=None, model_init=None, **options):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"),
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
        monitor = Monitor(model, to=looks, every=2, on_alert=print, stop_on=stop_on)
        made = None if model_init is None else model
        trainer = transformers.Trainer(
            None if model_init else model,
            args,
            train_dataset=data,
            eval_dataset=data[:4],
            callbacks=[monitor.callback()],
            model_init=model_init,
        )
        trainer.train(**options)
        assert made is not trainer.model
        return trainer

    looks = Looks()
    run(looks, 6)
    assert looks.steps == [0, 1, 2, 4]
    assert list(looks[0][1]["layers"]) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert all(len(entry["layers"]["transformer.h.0.attn"]["max_logit"]) == 2 for _, entry in looks)
    looks = Looks()
    run(looks, 8, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert looks.steps == [4, 6]
    assert [entry["restart"] for _, entry in looks] == ["resumed", None]
    state = json.loads((tmp_path / "run" / "checkpoint-8" / "sqrtdk_monitor.json").read_text())
    assert [step for step, _ in state["trend"]["points"]] == [0, 1, 2, 4, 6]
    # A model that the Trainer made itself is observed, and a severe alert stops it.
    looks = Looks()

    def make_broken():
        model = transformers.GPT2LMHeadModel(config)
        model.transformer.h[0].attn.c_attn.bias.data[0] = torch.nan
        return model

    trainer = run(looks, 6, stop_on="severe", model_init=make_broken)
    assert looks.steps == [0]
    assert trainer.state.global_step == 1
