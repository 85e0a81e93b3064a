"""A bad batch leaves the state bitwise as if it had not been there."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from lightning_resilience import AutoResume, NaNGuard
from tests.gpu.device import Device
from tests.gpu.runner import Bench, check
from tests.gpu.training import OPTIMIZERS, Module, batches, digest, events, network

WIDTH, BATCHES, BAD = 64, 16, 6


class HalvesScale(L.Callback):
    """Does to the gradient scaler of an undisturbed run what the bad batch does: it halves the scale."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BAD:
            self.scaler.update(self.scaler.get_scale() / 2)


class Busy(L.Callback):
    """Has the device work before each step, so that it is behind the host; by at most ``at_most`` steps."""

    def __init__(self, device: Device, seconds: float, at_most: int) -> None:
        self.device, self.seconds, self.at_most = device, seconds, at_most
        self.ends: deque[Any] = deque()
        self.behind: list[int] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.device.busy(self.seconds)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.ends.append(self.device.event())
        while len(self.ends) > self.at_most:
            self.ends.popleft().synchronize()
        while self.ends and self.ends[0].query():
            self.ends.popleft()
        self.behind.append(len(self.ends))


def guards(run_dir: Path) -> list[L.Callback]:
    return [AutoResume(run_dir, every_n_train_steps=4), NaNGuard(run_dir=run_dir)]


def fit(device: Device, folder: Path, callbacks: list[L.Callback], module: Any, data: Any, **options: Any) -> L.Trainer:
    trainer = device.trainer(callbacks, folder, **options)
    trainer.fit(module, data)
    return trainer


def model(optimizer: str) -> Module:
    L.seed_everything(1, verbose=False)
    return Module(network(WIDTH, norm=True), optimizer)


def outcome(run_dir: Path) -> str:
    names = [each["event"] for each in events(run_dir)]
    back, skipped = names.count("went_back"), names.count("bad_step")
    return f"{back} x gone back" if back else f"{skipped} x skipped" if skipped else "nothing was noticed"


def compare(bench: Bench, title: str, optimizer: str, extra: list[L.Callback]) -> None:
    device, folder = bench.device, bench.folder
    run_dir = folder / f"run {title}"
    reference = digest(fit(device, folder, [], model(optimizer), batches(BATCHES, WIDTH, without=BAD)))
    try:
        trainer = fit(device, folder, [*guards(run_dir), *extra], model(optimizer), batches(BATCHES, WIDTH, bad=BAD))
    except (Exception, SystemExit) as error:
        bench.expect(False, f"{title}: {type(error).__name__}: {str(error)[:200]}")
        return
    bench.figure(title, outcome(run_dir))
    bench.expect(digest(trainer) == reference, f"{title}: another state than without the bad batch")


@check("a NaN batch leaves no trace, with each optimizer", limit_s=180)
def nan_bitwise(bench: Bench) -> None:
    for optimizer in OPTIMIZERS:
        compare(bench, optimizer, optimizer, [])


@check("the same while the device is steps behind the host, and so are the verdicts", limit_s=180)
def nan_late(bench: Bench) -> None:
    for optimizer in ("AdamW fused", "AdamW"):
        busy = Busy(bench.device, 0.02 if bench.quick else 0.05, at_most=5)
        compare(bench, optimizer, optimizer, [busy])
        bench.figure(f"{optimizer}: steps behind", max(busy.behind))
        bench.expect(max(busy.behind) >= 3, f"{optimizer}: the device was never 3 steps behind", timing=True)


@check("16-mixed with batch normalisation: a NaN batch leaves no trace in the running statistics", limit_s=120)
def nan_fp16(bench: Bench) -> None:
    device, folder = bench.device, bench.folder
    for optimizer in ("AdamW", "AdamW fused"):
        scaler = device.scaler(2.0**10)
        reference = fit(
            device,
            folder,
            [HalvesScale(scaler)],
            model(optimizer),
            batches(BATCHES, WIDTH, without=BAD),
            precision="16-mixed",
            scaler=scaler,
        )
        run_dir = folder / f"run {optimizer}"
        module = model(optimizer)
        try:
            trainer = fit(
                device,
                folder,
                guards(run_dir),
                module,
                batches(BATCHES, WIDTH, bad=BAD),
                precision="16-mixed",
                scaler=device.scaler(2.0**10),
            )
        except (Exception, SystemExit) as error:
            finite = all(bool(buffer.isfinite().all()) for buffer in module.buffers())
            bench.figure(f"{optimizer}: running statistics finite", finite)
            bench.expect(False, f"{optimizer}: {type(error).__name__}: {str(error)[:200]}")
            continue
        bench.figure(optimizer, outcome(run_dir))
        bench.expect(digest(trainer) == digest(reference), f"{optimizer}: another state than without the bad batch")


class Gan(L.LightningModule):
    """The usual step of a GAN: the discriminator's update comes between the generator's forward and backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Sequential(*list(network(WIDTH, norm=True))[:-1], torch.nn.Linear(WIDTH, WIDTH))
        self.discriminator = network(WIDTH, norm=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()  # type: ignore
        fake = self.generator(batch.flip(0))
        loss = (self.discriminator(batch) - 1).pow(2).mean() + self.discriminator(fake.detach()).pow(2).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        of_generator.zero_grad()
        self.manual_backward((self.discriminator(fake) - 1).pow(2).mean())
        of_generator.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-3, fused=True) for part in (self.generator, self.discriminator)]


@check("a GAN with batch normalisation and fused optimizers trains, bitwise as without NaNGuard", limit_s=120)
def nan_gan(bench: Bench) -> None:
    found = []
    for callbacks in ([], guards(bench.folder / "run")):
        L.seed_everything(1, verbose=False)
        found.append(digest(fit(bench.device, bench.folder, callbacks, Gan(), batches(BATCHES, WIDTH))))
    bench.figure("steps", BATCHES)
    bench.expect(found[0] == found[1], "NaNGuard changes a healthy training")


class OwnScaler(L.LightningModule):
    """Manual optimization with a gradient scaler of its own."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = network(WIDTH, norm=True)
        self.scaler = scaler

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        with torch.autocast(self.device.type, torch.float16):
            loss = self.net(batch).pow(2).mean()
        optimizer.zero_grad()  # type: ignore
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)  # type: ignore
        self.scaler.update()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3, fused=True)


@check(
    "manual optimization with the user's own GradScaler: bitwise as without NaNGuard, and as without a NaN batch",
    limit_s=120,
)
def nan_own_scaler(bench: Bench) -> None:
    device, folder = bench.device, bench.folder
    found = {}
    for name, guarded, data in (
        ("healthy", False, {}),
        ("healthy", True, {}),
        ("without", False, {"without": BAD}),
        ("bad", True, {"bad": BAD}),
    ):
        L.seed_everything(1, verbose=False)
        scaler = device.scaler(2.0**10)
        callbacks = guards(folder / f"run {name}") if guarded else []
        callbacks += [HalvesScale(scaler)] if name == "without" else []
        try:
            trainer = fit(device, folder, callbacks, OwnScaler(scaler), batches(BATCHES, WIDTH, **data))
        except (Exception, SystemExit) as error:
            bench.expect(False, f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        found[name, guarded] = digest(trainer)
    bench.figure("steps", BATCHES)
    if ("healthy", True) in found:
        bench.expect(found["healthy", True] == found["healthy", False], "NaNGuard changes a healthy training")
    if ("bad", True) in found:
        bench.expect(found["bad", True] == found["without", False], "another state than without the bad batch")
