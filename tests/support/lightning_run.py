"""A training run of Lightning's own Trainer with a monitor; prints what it saw as JSON. Run as a program."""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from sqrtdk.torch import Monitor
from torch_others import add_packages


def main():
    """Run it with the packages in the folder that is the first argument."""
    library = add_packages(sys.argv[1])  # noqa: F841
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(LightningModule):
        def __init__(self, scale=1.0, fails_at=None):
            super().__init__()
            torch.manual_seed(0)
            self.attention, self.fails_at = nn.MultiheadAttention(16, 2, batch_first=True), fails_at
            with torch.no_grad():
                self.attention.in_proj_weight[:16] *= scale

        def training_step(self, batch, index):
            if index == self.fails_at:
                raise ValueError("the loss is wrong")
            return (self.attention(batch, batch, batch)[0] - batch).square().mean()

        def validation_step(self, batch, index):
            self.attention(batch, batch, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train(model, folder, start=None, batches=24, **options):
        """Return the observed steps, the monitor, the state of the last checkpoint, and whether the run failed."""
        steps, data = [], list(torch.randn(batches, 2, 12, 16, generator=torch.Generator().manual_seed(1)))
        monitor = Monitor(
            model,
            to=lambda step, entry: steps.append([step, len(entry["alerts"])]),
            every=4,
            on_alert=lambda alert: None,
            **options,
        )
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            val_check_interval=8,
            callbacks=[monitor.callback("lightning"), ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)],
        )
        failure = None
        try:
            trainer.fit(model, DataLoader(data, None), DataLoader(data[:2], None), ckpt_path=start)
        except ValueError as error:
            failure = str(error)
        return {"steps": steps, "closed": "closed" in repr(monitor), "failure": failure, "end": trainer.global_step}

    with tempfile.TemporaryDirectory() as folder:
        results = {
            "healthy": train(Model(), folder),
            "stopped": train(Model(scale=4000.0), folder + "/stopped", stop_on="severe"),
            "failed": train(Model(fails_at=5), folder + "/failed"),
            "resumed": train(Model(), folder + "/resumed", next(iter(Path(folder).glob("*step=6.ckpt")))),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
