"""What healthy steps of real models pay for all callbacks."""

from __future__ import annotations

import shutil
import statistics
import time
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.gpu.device import Device
from tests.gpu.runner import Bench, check
from tests.gpu.syncs import all_callbacks


class Block(nn.Module):
    """A bottleneck of ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        fits = stride == 1 and inside == out
        shortcut = [] if fits else [nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """25.6 M parameters and 53 batch normalisations."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Block(inside, width, stride if number == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Attention(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inputs(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.outputs(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """Of the size of GPT-2 with these values: 124 M parameters."""

    def __init__(
        self, words: int = 50257, length: int = 1024, width: int = 768, layers: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Attention(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x) + self.places.weight[: x.shape[1]]))


class Classifies(L.LightningModule):
    """Has the data on its device, so that steps show the training and not the loader."""

    def __init__(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor, fused: bool) -> None:
        super().__init__()
        self.net, self.x, self.y, self.fused = net, x, y, fused

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found = self.net(self.x)
        loss = nn.functional.cross_entropy(found.flatten(0, -2), self.y.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(self.x))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=self.fused)


class Timer(L.Callback):
    """Milliseconds per step of those in the middle of a fit: the device has done all of them at both ends."""

    def __init__(self, device: Device, first: int, last: int) -> None:
        self.device, self.first, self.last = device, first, last
        self.ms = self.host_ms = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.device.load().synchronize()
            self.began, self.host_began = time.perf_counter(), time.thread_time()
        elif batch_idx == self.last:
            steps = self.last - self.first
            self.host_ms = 1000 * (time.thread_time() - self.host_began) / steps
            self.device.load().synchronize()
            self.ms = 1000 * (time.perf_counter() - self.began) / steps


@check("a healthy step of ResNet-50, GPT-2 and an MLP with all callbacks takes as long as without", limit_s=500)
def step_cost(bench: Bench) -> None:
    device, target = bench.device, bench.device.at()
    cross = torch.randint(0, 1000, (128,), device=target)
    models: dict[str, Any] = {
        "ResNet-50 bf16": lambda: (resnet50(), torch.randn(128, 3, 224, 224, device=target), cross, "bf16-mixed", 40),
        "ResNet-50 16-mixed": lambda: (resnet50(), torch.randn(128, 3, 224, 224, device=target), cross, "16-mixed", 40),
        "GPT-2 124 M bf16": lambda: (
            Gpt(),
            torch.randint(0, 50257, (8, 1024), device=target),
            torch.randint(0, 50257, (8, 1024), device=target),
            "bf16-mixed",
            40,
        ),
        "MLP fp32": lambda: (
            nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1000)),
            torch.randn(128, 256, device=target),
            cross,
            "32-true",
            400,
        ),
    }
    rounds = 5
    if bench.quick:
        rounds = 1
        tokens = torch.randint(0, 50, (2, 8), device=target)
        models = {
            "two blocks": lambda: (
                nn.Sequential(
                    Block(3, 4, 1), Block(16, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000)
                ),
                torch.randn(2, 3, 8, 8, device=target),
                cross[:2],
                "32-true",
                4,
            ),
            "small GPT": lambda: (Gpt(50, 8, 16, 2, 2), tokens, tokens, "32-true", 4),
        }
        resnet50()
    for title, make in models.items():
        net, x, y, precision, steps = make()
        module = Classifies(net, x, y, fused=True)
        data = DataLoader(torch.zeros(steps + 12, 1), batch_size=None)  # type: ignore
        ms: dict[bool, list[float]] = {False: [], True: []}
        host_ms: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds):
            for ours in (False, True) if number % 2 == 0 else (True, False):
                timer = Timer(device, 10, 10 + steps)
                folder = bench.folder / f"{title} {number}"
                callbacks = [*(all_callbacks(folder) if ours else []), timer]
                device.trainer(callbacks, folder, precision=precision).fit(module, data)
                shutil.rmtree(folder, ignore_errors=True)  # its final state may have gigabytes
                ms[ours].append(timer.ms)
                host_ms[ours].append(timer.host_ms)
        ratios = [with_ours / without for without, with_ours in zip(ms[False], ms[True], strict=True)]
        bench.figure(f"{title}: ms without", statistics.median(ms[False]))
        bench.figure(f"{title}: ms with", statistics.median(ms[True]))
        bench.figure(f"{title}: ratios from to", [round(min(ratios), 3), round(max(ratios), 3)])
        more = statistics.median(host_ms[True]) - statistics.median(host_ms[False])
        bench.figure(f"{title}: ms more of the host", more)
        if "MLP" not in title:  # whose step is so short that it is the host's time
            ratio = statistics.median(ms[True]) / statistics.median(ms[False])  # that of a pair of runs has more noise
            bench.expect(ratio < 1.03, f"{title}: {ratio:.3f} x", timing=True)
