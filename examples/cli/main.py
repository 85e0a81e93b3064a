"""A LightningCLI: callbacks come from YAML files and the command line.

python examples/cli/main.py fit --config examples/cli/config.yaml --config recipes/cli/workstation.yaml
"""

from __future__ import annotations

import hashlib

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    """Learns the sum of its inputs.

    Args:
        width: Width of the hidden layer.
        learning_rate: Learning rate of Adam.
    """

    def __init__(self, width: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.hparams.learning_rate)


class RandomNumbers(L.LightningDataModule):
    """Rows of random numbers, the same in every process.

    Args:
        rows: Number of rows.
        batch_size: Number of rows in a batch.
    """

    def __init__(self, rows: int = 100_000, batch_size: int = 8) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        numbers = torch.randn(self.rows, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(numbers), self.batch_size, shuffle=True)


def main() -> None:
    cli = LightningCLI(Regression, RandomNumbers, seed_everything_default=1, save_config_callback=None)
    if cli.subcommand == "fit" and cli.trainer.is_global_zero:
        weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in cli.model.parameters())
        print(f"sha256 of the weights: {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
