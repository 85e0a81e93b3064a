"""``NaNGuard`` in many random runs, and in whole runs under ``launch`` whose saved states verify and are bad."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import AutoResume, LocalCheckpoint, NaNGuard, TrainingDiverged
from lightning_resilience.checkpoint import checkpoint_file, shard
from lightning_resilience.checkpoint.node_store import ShardWriter
from lightning_resilience.checkpoint.safe_serialization import unpack
from lightning_resilience.fit import context, joining, numerics_policy
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import command, free_port, result, run, run_command, run_ranks, weights
from tests.ledgers import read_ledger
from tests.test_exact_resume import make, undisturbed
from tests.test_local_checkpoint import Waits, part_of, parts_in, reseal
from tests.test_nan_guard import SPOILS, Spoil, same
from tests.test_nan_guard import Model as Watched
from tests.test_nan_guard import fit as fit_watched

# -- random runs -------------------------------------------------------------------------------------------------------

BATCHES = 8
"""In an epoch, so that the last window of three is a short one."""

RUNS = 200
RUNS_OF_BASE = 6

KINDS: dict[str, list[str]] = {
    "loss": ["NaN loss", "infinite loss", "NaN loss with finite gradients"],
    "gradient": ["NaN in one gradient", "an infinite gradient"],
    "batch": ["NaN in the batch"],
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1),
}


@dataclass(frozen=True)
class Case:
    """What a run is like, and what goes wrong in it.

    Attributes:
        what: What is spoilt: ``loss``, ``gradient``, ``batch``, ``weight`` or ``spike``.
        kind: How, where there are several ways.
        at: The first batch that is, counted from 0 over all epochs and all times that the run has gone back.
        times: How many batches from there on.
        again: When the run has gone back for the n-th time, also that batch after it.
        late: Whether verdicts come later, as on an accelerator.
        local: Every how many steps ``LocalCheckpoint`` saves; not in the run if ``None``. So are ``own`` and ``ours``,
            for ``ModelCheckpoint`` and ``AutoResume``.
    """

    what: str
    kind: str
    at: int
    times: int
    again: tuple[int, ...]
    action: Any
    max_consecutive: int
    max_rollbacks: int
    spikes: dict[str, Any]
    late: bool
    optimizer: str
    epochs: int
    accumulate: int
    clip: float | None
    precision: Any
    ours: int | None
    local: int | None
    own: int | None
    top_k: int
    save_last: bool

    @property
    def prevents(self) -> bool:
        """Whether a bad step changes nothing. Where verdicts come later, only fused optimizers can leave one out."""
        return self.action != "warn" and (not self.late or self.optimizer == "fused AdamW")


def case(seed: int) -> Case:
    """The run of a seed."""
    chance = random.Random(seed)
    what = chance.choice(["loss", "gradient", "batch", "weight", "spike"])
    epochs = chance.choice([2, 3])
    at = chance.choice([0, 1, BATCHES // 2, BATCHES - 1, BATCHES, chance.randrange(BATCHES * epochs)])
    every = [None, *range(1, 6)]
    optimizer, precision = chance.choice([*OPTIMIZERS]), chance.choice(["32-true", "32-true", "bf16-mixed"])
    clips = chance.random() < 0.5 and not (
        optimizer == "fused AdamW" and precision == "bf16-mixed"
    )  # Lightning refuses
    return Case(
        what=what,
        kind=chance.choice(KINDS.get(what, [""])),
        at=at,
        times=chance.choice([1, 1, 3, 10_000]),
        again=tuple(chance.sample(range(4), chance.randrange(3))),
        action=chance.choice(["skip", "skip", "rollback", "rollback", "stop", "warn"]),
        max_consecutive=chance.choice([1, 2, 4]),
        max_rollbacks=chance.randrange(4),
        spikes=chance.choice([{}, {"spiky_loss_factor": 20.0, "spike_window": 3}]),
        late=chance.random() < 0.3,
        optimizer=optimizer,
        epochs=epochs,
        accumulate=chance.choice([1, 3]),
        clip=0.1 if clips else None,
        precision=precision,
        ours=chance.choice(every),
        local=chance.choice(every),
        own=chance.choice(every),
        top_k=chance.choice([1, 2, -1]),
        save_last=chance.random() < 0.5,
    )


class Files:
    """Every checkpoint of every tier, looked at when it appears: most are gone again at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bad: list[str] = []
        self.seen: set[tuple[Path, int]] = set()
        self.local_steps: list[int] = []

    def look(self) -> None:
        """Looks at what is new in the run directory and in that of ``ModelCheckpoint``."""
        for path in [*self.folder.glob("resilience/fit-*/*/*.ckpt*"), *self.folder.glob("own/*.ckpt")]:
            try:
                about = (path, path.stat().st_mtime_ns)
                if about not in self.seen and not path.name.endswith(".txt"):
                    self._judge(path, _tensors(torch.load(path, weights_only=False)))
                    self.seen.add(about)
            except FileNotFoundError:
                pass  # removed, or moved to quarantine, meanwhile

    def look_at_part(self, path: Path) -> None:
        """Looks at a part of a local checkpoint that has just been published."""
        header, tensors = shard.load(path)  # of the only rank, which has all there is
        places = [position for _, position in header.structure["places"]]
        self._judge(path, _tensors(unpack(header.structure["state"], [tensors[position] for position in places])))
        self.local_steps.append(header.identity.step)

    def _judge(self, path: Path, tensors: list[torch.Tensor]) -> None:
        if not all(torch.isfinite(each).all() for each in tensors):
            self.bad.append(str(path.relative_to(self.folder)))

    def good(self, pattern: str) -> list[Path]:
        return [*self.folder.glob(pattern)]


def _tensors(checkpoint: dict[str, Any]) -> list[torch.Tensor]:
    kept = [each for states in checkpoint["optimizer_states"] for each in states["state"].values()]
    values = [*checkpoint["state_dict"].values(), *(each for state in kept for each in state.values())]
    return [each for each in values if isinstance(each, torch.Tensor)]


class Model(L.LightningModule):
    """Spoilt as its case says; finds fault with a skipped step that was one, and with a good one that was none."""

    def __init__(self, about: Case, files: Files) -> None:
        super().__init__()
        self.about = about
        self.files = files
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.begun = 0
        self.planted: set[int] = set()
        self.starts = 0
        self.window: tuple[int, list[torch.Tensor], bool] | None = None

    def on_train_start(self) -> None:
        self.window = None
        if self.starts and self.starts <= len(self.about.again):
            self.planted.add(self.begun + self.about.again[self.starts - 1])
        self.starts += 1

    def is_planted(self) -> bool:
        about = self.about
        return about.at <= self.begun < about.at + about.times or self.begun in self.planted

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.files.look()
        planted = self.is_planted()
        self.compare(planted)
        self.begun += 1
        loss = (self.net(batch[0]) - 1).pow(2).mean()
        if not planted or self.about.what == "weight":
            return loss
        if self.about.what == "spike":
            return loss * 1e6
        spoil: Spoil = SPOILS[self.about.kind]
        return spoil(self, loss)  # type: ignore[arg-type]

    def compare(self, planted: bool) -> None:
        """Before a batch: what the window before it has made of the state."""
        step = self.trainer.global_step
        if self.window is not None and self.window[0] == step:
            self.window = (*self.window[:2], self.window[2] or planted)
            return
        now = self.state()
        if self.window is not None and self.about.what in KINDS:
            _, before, was_bad = self.window
            if was_bad and self.about.prevents:
                assert same(before, now), f"the bad step before step {step} has changed something"
            if not was_bad and not self.about.spikes and all(torch.isfinite(each).all() for each in before):
                assert not same(before, now), f"the good step before step {step} was skipped"
        self.window = (step, now, planted)

    def on_train_batch_end(self, *args: Any) -> None:
        self.begun -= 1  # this batch is meant
        if self.about.what == "weight" and self.is_planted():
            self.net[0].weight.data[1, 2] = math.nan
        self.begun += 1

    def state(self) -> list[torch.Tensor]:
        """Everything that a step changes."""
        kept = [value for each in self.trainer.optimizers for state in each.state.values() for value in state.values()]
        tensors = [*self.parameters(), *self.buffers(), *(each for each in kept if isinstance(each, torch.Tensor))]
        return [each.detach().clone() for each in tensors]

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.about.optimizer](self.parameters())


def bad_since(events: list[dict[str, Any]], about: Case) -> int:
    """The step with which the last trouble began."""
    steps = [each["step"] for each in events if each["event"] == "bad_step"]
    began = steps.pop()
    while steps and steps[-1] == began - 1 and about.action == "skip":
        began = steps.pop()
    return int(began)


def overrides(trainer: L.Trainer) -> list[str]:
    """Methods that are set on an instance: how this package puts its patches on a Trainer."""
    loop = trainer.fit_loop
    owners = [trainer, loop, loop.epoch_loop, loop.epoch_loop.automatic_optimization, loop.epoch_loop.val_loop]
    owners += [trainer.strategy, trainer.strategy.checkpoint_io, trainer._checkpoint_connector, *trainer.callbacks]
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name in vars(owner)
        if callable(getattr(type(owner), name, None))
    ]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    found = Files(tmp_path)
    publish = ShardWriter.publish

    def published(self: ShardWriter, *args: Any) -> Path:
        path = publish(self, *args)
        found.look_at_part(path)
        return path

    monkeypatch.setattr(ShardWriter, "publish", published)
    monkeypatch.setattr(context, "fits_begun", {})
    return found


def fit(about: Case, model: Model, folder: Path) -> tuple[L.Trainer, list[str], str | None]:
    """Returns what was set on the Trainer before and, if the training has diverged, how."""
    torch.manual_seed(3)
    guard = NaNGuard(about.action, about.max_consecutive, about.max_rollbacks, **about.spikes)
    callbacks: list[L.Callback] = [guard]
    if about.ours is not None:
        callbacks.append(AutoResume(async_save=False, every_n_train_steps=about.ours))
    if about.local is not None:
        callbacks += [LocalCheckpoint(folder / "local", about.local), Waits()]
    if about.own is not None:
        options: dict[str, Any] = {"monitor": "step", "mode": "max"} if about.top_k == 2 else {}
        callbacks.append(
            ModelCheckpoint(
                folder / "own",
                every_n_train_steps=about.own,
                save_top_k=about.top_k,
                save_last=about.save_last,
                **options,
            )
        )
    trainer = L.Trainer(
        callbacks=callbacks,
        accelerator="cpu",
        max_epochs=about.epochs,
        accumulate_grad_batches=about.accumulate,
        gradient_clip_val=about.clip,
        precision=about.precision,
        logger=False,
        enable_checkpointing=about.own is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    before = overrides(trainer)
    try:
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(4 * BATCHES, 4)), 4, shuffle=True))
    except TrainingDiverged as diverged:
        return trainer, before, str(diverged)
    return trainer, before, None


@pytest.mark.slow_but_for("5")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(each, marks=pytest.mark.campaign if each >= RUNS_OF_BASE else ()) for each in range(RUNS)],
)
def test_whatever_goes_wrong(seed: int, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = case(seed)
    print(f"seed {seed}: {about}")  # shown if the test fails
    if about.late:
        monkeypatch.setattr(numerics_policy, "_reads_cost_nothing", lambda device: False)
    threads = set(threading.enumerate())
    model = Model(about, files)
    trainer, before, diverged = fit(about, model, tmp_path)
    files.look()
    events = list(read_ledger(RunDirectory(tmp_path / "resilience").ledger))

    assert files.bad == []
    may_be_bad = about.action == "warn" or about.what in ("weight", "spike") or (diverged and not about.prevents)
    assert may_be_bad or all(torch.isfinite(each).all() for each in model.state())

    tiers = 2 if None not in (about.local, about.ours) else 1
    assert sum(each["event"] == "rollback" for each in events) <= tiers * about.max_rollbacks
    outcome = RunDirectory(tmp_path / "resilience").fit(0).outcome
    assert outcome is not None
    nowhere = diverged is not None and "no checkpoint to go back to" in diverged
    # Begun anew, the run would pass the bad batches over, or go on from an older state: that is worth a try.
    is_worth_a_try = nowhere or (diverged is not None and "started again" in diverged)
    assert outcome.status == ("finished" if diverged is None else "failed" if is_worth_a_try else "halted")
    assert diverged is None or diverged in outcome.reason
    assert diverged is not None or trainer.current_epoch == about.epochs

    saved = {each["step"] for each in events if each["event"] == "saved" and each["tier"] == "global"}
    condemned = {each["step"] for each in events if each["event"] == "condemned"}
    if saved:
        assert files.good("resilience/fit-0*/checkpoints/*.ckpt") or (diverged is not None and condemned)
    if nowhere and not condemned:
        began = bad_since(events, about)
        assert not [step for step in {*saved, *files.local_steps} if step <= began], "there was one"
    if any(path.parent.name == "own" for path, _ in files.seen):
        assert files.good("own/*.ckpt")

    assert overrides(trainer) == before
    assert [each for each in threading.enumerate() if each not in threads] == []
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert not any(each._optimizer_step_pre_hooks for each in trainer.optimizers)
    assert joining._active is None

    if diverged is not None and about.what != "spike":  # an accepted one may have left large weights
        monkeypatch.setattr(context, "fits_begun", {})
        model = Model(replace(about, times=0, again=()), files)
        assert fit(replace(about, times=0, again=()), model, tmp_path)[2] is None, "what was wrong with it is repaired"
        assert all(torch.isfinite(each).all() for each in model.state())
        assert files.bad == []


# -- what only happens in some of them ---------------------------------------------------------------------------------


def plain_case(**options: Any) -> Case:
    """A run without anything special."""
    nothing = {"at": 0, "times": 0, "again": (), "spikes": {}, "late": False, "ours": None, "local": None, "own": None}
    plain = {"what": "loss", "kind": "NaN loss", "optimizer": "fused AdamW", "epochs": 2, "accumulate": 1}
    return replace(case(0), **{**nothing, **plain, "clip": None, "precision": "32-true", **options})


def ledger(folder: Path, name: str) -> list[dict[str, Any]]:
    return [each for each in read_ledger(RunDirectory(folder / "resilience").ledger) if each["event"] == name]


@pytest.mark.slow_but_for("global-saves0-False")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("tier", "saves"), [("global", {"ours": 1}), ("local", {"local": 1})])
def test_while_steps_are_bad_nothing_takes_the_place_of_what_was_good(
    tier: str, saves: dict[str, int], late: bool, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved after every step, and few are kept: skipped steps must not be among them."""
    if late:
        monkeypatch.setattr(numerics_policy, "_reads_cost_nothing", lambda device: False)
    about = plain_case(action="skip", max_consecutive=4, max_rollbacks=1, at=5, times=4, **saves)
    assert fit(about, Model(about, files), tmp_path)[2] is None
    assert [(each["tier"], each["step"]) for each in ledger(tmp_path, "went_back")] == [(tier, 5)]


def test_several_bad_batches_are_not_the_fault_of_the_checkpoint_before_them(files: Files, tmp_path: Path) -> None:
    """From where the training has come past the last trouble, and into the next."""
    about = plain_case(action="rollback", max_rollbacks=3, at=7, times=1, again=(2, 2), ours=5)
    assert fit(about, Model(about, files), tmp_path)[2] is None
    assert [each["epoch"] * BATCHES + each["batches"][0] for each in ledger(tmp_path, "bad_step")] == [7, 8, 9]
    assert [each["step"] for each in ledger(tmp_path, "went_back")] == [5, 5, 5]
    assert ledger(tmp_path, "condemned") == []


def test_what_a_checkpoint_brings_along_is_not_meant_so(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics that are used in validation only: the losses of the training are finite."""
    about = plain_case(epochs=1, ours=5)
    fit(about, Model(about, files), tmp_path)
    for path in (tmp_path / "resilience").glob("fit-000/checkpoints/*.ckpt"):
        state = checkpoint_file.load(path)
        state["state_dict"]["net.1.running_var"][2] = math.nan
        checkpoint_file.save(state, path, {"fit": 0})
    saved = len(ledger(tmp_path, "saved"))
    monkeypatch.setattr(context, "fits_begun", {})
    again = replace(about, epochs=2)
    fit(again, Model(again, files), tmp_path)
    assert len(ledger(tmp_path, "resumed")) == 1
    assert all(
        "net.1.running_var (1 of 8 elements: nan)" in each["reason"] for each in ledger(tmp_path, "save_refused")
    )
    assert ledger(tmp_path, "save_refused")
    assert len(ledger(tmp_path, "saved")) == saved


# -- one rank alone ----------------------------------------------------------------------------------------------------

ALONE: dict[str, Spoil] = {
    "NaN loss with finite gradients": SPOILS["NaN loss with finite gradients"],
    "spike": lambda model, loss: loss * 1e6,
}


def one_of_two(rank: int, port: int, spoil: str, folder: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", **place}
    os.environ.update({name: str(value) for name, value in about.items()})
    torch.set_num_threads(1)
    model = Watched({6: ALONE[spoil]} if rank == 1 else {})
    guard = NaNGuard(spiky_loss_factor=20.0, spike_window=3)
    fit_watched(model, folder, guard, devices=2, strategy="ddp", max_epochs=3)
    skipped = same(model.states[6], model.states[7]) and not same(model.states[7], model.states[8])
    parameters = [parameter.detach() for parameter in model.parameters()]
    torch.save((skipped, guard.skipped_steps, parameters), folder / f"{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ALONE)
def test_what_only_one_rank_could_know(spoil: str, tmp_path: Path) -> None:
    """The loss is the rank's own and the gradients would be fine: only because of the verdict they are not."""
    run_ranks(one_of_two, free_port(), spoil, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert [each[:2] for each in found] == [(True, 1), (True, 1)]
    assert same(found[0][2], found[1][2])


def with_losses_of_its_own(rank: int, ports: list[int], folder: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    about = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", **place}
    os.environ.update({name: str(value) for name, value in about.items()})
    torch.set_num_threads(1)

    def scaled(factor: float) -> Spoil:
        return lambda model, loss: loss * factor

    usual = 1000.0 if rank == 1 else 1.0
    spoils = dict.fromkeys(range(100), scaled(usual))
    spike = {BATCHES // 2: scaled(50 * usual)} if rank == 1 else {}
    skipped = []
    for port, epochs, more in zip(ports, (1, 2), ({}, spike), strict=True):
        os.environ["MASTER_PORT"] = str(port)  # the store of the first fit may not be gone yet
        guard = NaNGuard(spiky_loss_factor=20.0, spike_window=3)
        model = Watched({**spoils, **more}, lambda parameters: torch.optim.SGD(parameters, 1e-6))
        fit_watched(model, folder, guard, AutoResume(), devices=2, strategy="ddp", max_epochs=epochs)
        context.fits_begun.clear()
        torch.distributed.destroy_process_group()
        skipped.append(guard.skipped_steps)
    torch.save(skipped, folder / f"{rank}.pt")


def test_every_rank_goes_on_with_its_own_losses(tmp_path: Path) -> None:
    """After a resume too: what is much for one rank is nothing for another."""
    ports = [free_port(), free_port()]
    run_ranks(with_losses_of_its_own, ports, tmp_path)
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [[0, 1], [0, 1]]


# -- a bad state that verifies -----------------------------------------------------------------------------------------


def nan_moment(tensors: list[torch.Tensor]) -> None:
    """The first step is still a good one, and makes the weights bad."""
    _moment(tensors)[0] = math.nan


def huge_moment(tensors: list[torch.Tensor]) -> None:
    """Finite, but one step throws a weight so far away that the losses after it are infinite."""
    _moment(tensors)[0] = 1e30


def _moment(tensors: list[torch.Tensor]) -> torch.Tensor:
    """AdamW's mean of the gradients of the last layer, with weights for every output of the one before."""
    rows = [each.view(-1) for each in tensors if each.shape == (1, 32)]
    assert len(rows) == 3, "the weights, and two moments"
    return next(each for each in rows if (each < 0).any() and each is not rows[0])


def events(config: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] in names]


ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent.parent)}


def launch(config: dict[str, Any]) -> tuple[int, str]:
    """Runs the program under the launcher to its end; returns the exit code and what it printed."""
    arguments = [sys.executable, "-m", "lightning_resilience.launch.cli", "launch", "--nproc-per-node=1"]
    arguments += ["--recipe=nemo", f"--run-dir={config['run_dir']}", *command(config)[1:]]
    ended = run_command(arguments, env=ENVIRONMENT)
    return ended.returncode, ended.stdout + ended.stderr


def killed(folder: Path, max_rollbacks: int = 2, **options: Any) -> dict[str, Any]:
    """A run that was killed at step 27, with states of steps 20 and 25 on its node and of step 18 for all nodes."""
    written = str(folder / "local" / "**" / f"step-{25:012d}-*" / "rank-*")
    return make(
        folder,
        "run",
        callbacks=["auto_resume", "local_checkpoint", "nan_guard"],
        local={"dir": str(folder / "local"), "every_n_train_steps": 5},
        save_every=18,
        step_s=0.03,
        nan_guard={"max_consecutive": 2, "max_rollbacks": max_rollbacks},
        events=[{"at": "train", "step": 27, "do": "SIGKILL", "once": True, "after_file": written}],
        **options,
    )


def resumes(config: dict[str, Any]) -> list[tuple[str, int]]:
    """From where the run has gone on: at its start, and going back."""
    return [(each["tier"], each["step"]) for each in events(config, "resumed", "went_back")]


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [nan_moment, pytest.param(huge_moment, marks=pytest.mark.campaign)])
def test_bad_states_that_verify_are_condemned_until_a_good_one_is_found(spoil: Any, tmp_path: Path) -> None:
    config = killed(tmp_path)
    assert run(config, tmp_path)[0] == [-signal.SIGKILL]
    for path in parts_in(tmp_path / "local"):
        reseal(path, change=spoil)
    codes, text = run(config, tmp_path)
    assert codes == [0], text
    assert resumes(config) == [("local", 25), ("local", 20), ("global", 18)]
    assert [each["step"] for each in events(config, "condemned")] == [25, 20]
    bad = [each["step"] for each in events(config, "bad_step")]
    assert bad[0] == 26, bad
    of_newest = bad[: bad.index(21)]
    for begun_at, steps in ((25, of_newest), (20, bad[len(of_newest) :])):
        assert 2 <= len(steps) <= 4, "two in a row are enough, and the next one is under way by then"
        assert steps == [*range(begun_at + 1, begun_at + 1 + len(steps))], bad
    saved = [torch.load(path, weights_only=False) for path in Path(config["run_dir"]).glob("fit-000/checkpoints/*")]
    assert saved
    assert all(torch.isfinite(each).all() for state in saved for each in _tensors(state))
    assert result(config) == undisturbed(tmp_path)[0], "no batch is to blame, so none is skipped"


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.nvrx])])
@pytest.mark.parametrize(
    ("max_rollbacks", "reason"),
    [
        (2, "the run has gone back 2 times because of it"),
        pytest.param(9, "3 checkpoints of this fit were marked bad", marks=pytest.mark.campaign),
    ],
    ids=["of times", "of checkpoints"],
)
def test_if_all_states_are_bad_the_run_ends_with_the_reason(
    max_rollbacks: int, reason: str, launched: bool, tmp_path: Path
) -> None:
    config = killed(tmp_path, max_rollbacks)
    if launched:
        ended = run_command(command(config), env=ENVIRONMENT)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    else:
        assert run(config, tmp_path)[0] == [-signal.SIGKILL]
    for path in parts_in(tmp_path / "local"):
        reseal(path, change=nan_moment)
    (path,) = Path(config["run_dir"]).glob("fit-000/checkpoints/*")
    state = checkpoint_file.load(path)
    for moments in state["optimizer_states"][0]["state"].values():
        moments["exp_avg"].view(-1)[0] = math.nan
    checkpoint_file.save(state, path, {"fit": 0})
    run_directory = RunDirectory(config["run_dir"])
    if launched:
        code, text = launch(config)
        assert len(events(config, "start")) == 1, "it is not tried again"
        outcomes = [run_directory.outcome, run_directory.fit(0).outcome]
    else:
        (code,), text = run(config, tmp_path)
        outcomes = [run_directory.fit(0).outcome]
    assert code == 1, text
    assert resumes(config) == [("local", 25), ("local", 20), ("global", 18)]
    for outcome in outcomes:
        assert outcome is not None
        assert outcome.status == "halted"
        assert reason in outcome.reason
    assert reason in text


@pytest.mark.campaign
def test_a_bad_state_that_comes_from_another_node(tmp_path: Path) -> None:
    """A node is lost, and what it gets from the other one verifies, but is bad."""
    config = killed(tmp_path, trainer={"num_nodes": 2})
    codes, text = run(config, tmp_path / "run")
    assert -signal.SIGKILL in codes, text
    first, second = sorted((tmp_path / "local" / f"local_ckpt-{os.getuid()}").iterdir())
    shutil.rmtree(second)
    reseal(part_of(first, 25, "common-00-of-01"), change=nan_moment)
    codes, text = run(config, tmp_path / "run")
    assert codes == [0, 0], text
    assert resumes(config) == [("replica", 25), ("replica", 20)]
    assert [each["step"] for each in events(config, "condemned")] == [25]
    assert result(config) == undisturbed(tmp_path, trainer={"num_nodes": 2})[0]
    assert len(set(weights(config))) == 1
    saved = [torch.load(path, weights_only=False) for path in Path(config["run_dir"]).glob("fit-000/checkpoints/*")]
    assert saved
    assert all(torch.isfinite(each).all() for state in saved for each in _tensors(state))
