"""A small byte-level GPT that learns to write Python from the Python standard library's own source.

Ordinary PyTorch Lightning code: nothing in this file knows about lightning-resilience. It runs on its own, under
``torchrun``, and under ``lightning-resilience launch``:

    python examples/gpt.py
    torchrun --nproc-per-node 2 examples/gpt.py
    lightning-resilience launch --nproc-per-node 2 examples/gpt.py
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class StandardLibrary(Dataset[Tensor]):
    """The text of the standard library's modules in pieces of ``length + 1`` bytes.

    Args:
        length: The number of bytes the model sees at once.
        part: ``train``, or ``validation`` for the last twentieth of the text.
    """

    def __init__(self, length: int, part: str) -> None:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(module.read_bytes() for module in modules)
        split = len(text) * 19 // 20
        text = text[:split] if part == "train" else text[split:]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length
        self.random_crops = part == "train"

    def __len__(self) -> int:
        return len(self.text) // self.length - 2

    def __getitem__(self, index: int) -> Tensor:
        shift = int(torch.randint(self.length, ())) if self.random_crops else 0
        start = index * self.length + shift
        return self.text[start : start + self.length + 1].long()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.merge(attended.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(L.LightningModule):
    def __init__(self, length: int, layers: int, width: int, heads: int, dropout: float, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.length, self.learning_rate = length, learning_rate
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("validation_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        steps = self.trainer.max_steps
        warm_up = max(1, steps // 10)

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    @torch.no_grad()
    def write(self, prompt: str, count: int) -> str:
        """Continues ``prompt`` by ``count`` bytes."""
        self.eval()
        generator = torch.Generator().manual_seed(0)
        text = torch.tensor([list(prompt.encode())])
        for _ in range(count):
            probabilities = (self(text[:, -self.length :])[0, -1] / 0.8).softmax(-1)
            text = torch.cat([text, torch.multinomial(probabilities, 1, generator=generator)[None]], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


class Progress(L.Callback):
    """Prints a line every few steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index) -> None:
        step = trainer.global_step
        if trainer.is_global_zero and step % self.every == 0:
            print(f"step {step:4d} of {trainer.max_steps}  loss {float(outputs['loss']):.3f}", flush=True)

    def on_validation_end(self, trainer, module) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["validation_loss"])
            print(f"step {trainer.global_step:4d} validation loss {loss:.3f}", flush=True)


def main(
    arguments: Sequence[str] | None = None, callbacks: Sequence[L.Callback] = (), logger: Logger | bool = False
) -> None:
    """Trains the model.

    Args:
        arguments: The command line; default: this process's.
        callbacks: More callbacks for the Trainer.
        logger: The Trainer's logger.
    """
    parser = argparse.ArgumentParser(description="Trains a small byte-level GPT on the standard library's source.")
    parser.add_argument("--out", default="runs/gpt", help="where the checkpoints go (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="for each process (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="bytes the model sees at once (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--validate-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--save-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--accelerator", default="auto")
    options = parser.parse_args(arguments)

    L.seed_everything(1, workers=True, verbose=False)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    model = GPT(options.length, options.layers, options.width, options.heads, options.dropout, options.learning_rate)
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_steps=options.steps,
        val_check_interval=options.validate_every,
        check_val_every_n_epoch=None,
        limit_val_batches=8,
        gradient_clip_val=1.0,
        callbacks=[
            ModelCheckpoint(f"{options.out}/checkpoints", every_n_train_steps=options.save_every, save_last="link"),
            Progress(options.print_every),
            *callbacks,
        ],
        default_root_dir=options.out,
        logger=logger,
        log_every_n_steps=options.print_every,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(StandardLibrary(options.length, "train"), options.batch_size, shuffle=True, num_workers=2),
        DataLoader(StandardLibrary(options.length, "validation"), options.batch_size, num_workers=2),
    )
    if trainer.is_global_zero:
        weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
        print("The model writes:")
        print(model.cpu().write("def ", 240))
        print(f"sha256 of the weights: {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
