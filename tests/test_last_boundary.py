"""The state of the last boundary, put together in the middle of a step: that of this rank, and that of a lost one."""

from __future__ import annotations

import functools
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import CatMetric, MeanMetric

from lightning_resilience import AutoResume, FaultTolerance, LocalCheckpoint
from lightning_resilience._files import write_json
from lightning_resilience._lightning import lightning_loggers, lightning_strategies
from lightning_resilience._lightning.lightning_patches import Patches
from lightning_resilience.agreement_protocol import PeerLost
from lightning_resilience.checkpoint.digest import digest_of
from lightning_resilience.checkpoint.generations import rank_locations
from lightning_resilience.checkpoint.local import LocalSaves
from lightning_resilience.checkpoint.safe_serialization import pack
from lightning_resilience.detect.hangs import watchdog
from lightning_resilience.detect.numerics.divergence import Divergence
from lightning_resilience.elastic.own_part import read_own_parts
from lightning_resilience.fit import context, joining, last_boundary, logger_files
from lightning_resilience.fit.exact_state import LOGS, ExactState
from lightning_resilience.fit.last_boundary import LastBoundary, _savers, _Standing
from lightning_resilience.fit.local_saves import LocalSavePolicy
from lightning_resilience.fit.logger_files import Logs
from lightning_resilience.fit.own_values import StateUnknown
from lightning_resilience.fit.participant import Participant, Participants
from lightning_resilience.fit.reentry import Replaceability
from lightning_resilience.fit.saving import Saver
from lightning_resilience.launch import membership
from lightning_resilience.run.deadlines import LOSS_CONFIRMED_WITHIN_S
from lightning_resilience.run.run_directory import StaleAttempt
from tests import test_logs
from tests.harness import QUIET


class Found(Exception):
    """What was looked for is found: the fit need not go on."""


class Net(L.LightningModule):
    """Changes all that a step can change, and then calls ``within``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("mask", torch.ones(300, 300))  # too large to be copied
        self.metric = MeanMetric()
        self.within: Callable[[], None] = lambda: None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).pow(2).mean() + random.random() + float(np.random.rand())
        self.average.copy_(0.9 * self.average + 0.1 * loss.detach())
        self.metric.update(loss.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if batch_idx % 3 == 2:
            self.log("now and then", loss, on_step=False, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        self.within()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(3)))
    return DataLoader(data, batch_size, shuffle=shuffle)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(4, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(8)


class Watched(Participant):
    """Notes the state of each boundary, as a save there would have it."""

    def __init__(self) -> None:
        self.state: Any = None
        self.clean = False

    def after_batch(self, window_complete: bool) -> None:
        self.clean = window_complete

    def before_batch(self) -> None:
        if self.clean:
            self.state = state_now()


def state_now() -> Any:
    """All that a save has, in a form that can be compared."""
    structure, tensors, left_out = pack(joining._active.saver.capture())
    assert left_out == []
    return structure, [(str(each.dtype), tuple(each.shape), digest_of([each])) for each in tensors]


def by_value(part: Any, tensors: list[Any]) -> Any:
    """A state with its tensors where they are, be they the same ones or equal ones."""
    if isinstance(part, dict) and part.get("__resilience_type__") == "tensor":
        return tensors[part["index"]]
    if isinstance(part, dict):
        return {key: by_value(each, tensors) for key, each in part.items()}
    return [by_value(each, tensors) for each in part] if isinstance(part, list) else part


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Net, LastBoundary, Watched]]:
    """Trains as one of several ranks of ``launch --elastic``, and calls a function in the step ``at``."""
    monkeypatch.setattr(Replaceability, "is_possible", True)
    monkeypatch.setattr(lightning_strategies, "replicates_state", lambda trainer: True)
    monkeypatch.setattr("lightning_resilience.checkpoint.node_store.in_node_memory", lambda folder: True)
    context.fits_begun.clear()

    def run(
        at: int,
        within: Callable[[LastBoundary, Watched], None],
        module: Any = None,
        data: type[Data] | None = None,
        **options: Any,
    ) -> None:
        module, more = module or Net(), options.pop("callbacks", [])
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        watched, calls = Watched(), iter(range(1000))

        def step() -> None:
            if next(calls) == at:
                fit = joining._active.fit
                participants = fit.participants  # they leave the fit, whatever has taken their place
                try:
                    within(joining._active.last_boundary, watched)
                finally:
                    fit.participants = participants
                raise Found

        class Joins(L.Callback):
            def on_train_start(self, *args: Any) -> None:
                joining._active.fit.participants.add(watched)
                if not trainer.loggers:
                    joining._active.exact.logs = None  # as on a rank that may be lost with it

        module.within = step
        local = LocalCheckpoint(tmp_path / "local", every_n_train_steps=3, run_dir=tmp_path / "run")
        trainer = L.Trainer(
            **{**QUIET, "max_epochs": 3, "default_root_dir": tmp_path, **options},
            callbacks=[Joins(), local, *more],
        )
        loaders = loader(4, shuffle=True), loader(8)
        with pytest.raises(Found):
            trainer.fit(module, *loaders) if data is None else trainer.fit(module, datamodule=data())

    return run


def known(boundary: LastBoundary) -> Any:
    return boundary._known()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"data": Data},
    "accumulation": {"accumulate_grad_batches": 2},
    "averaged": {"callbacks": [EMAWeightAveraging(decay=0.9)]},
    "validation within the epoch": {"val_check_interval": 2},
}


@pytest.mark.parametrize("at", [0, 4, 6, 9], ids=["first", "middle", "first of an epoch", "second epoch"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.slow_but_for("plain-first", "accumulation-second epoch", "averaged-second epoch")
def test_the_state_in_a_step_is_that_of_the_boundary_before(
    train: Callable[..., None], options: dict[str, Any], at: int
) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        assert state_now() != watched.state
        for _ in boundary._put_back(known(boundary), [0]):
            assert state_now() == watched.state

    train(at, look, **options)


def leave_as_rank_1(boundary: LastBoundary, rank: int = 1) -> None:
    for path in list(boundary._folder.glob("rank-00000.*")):
        shutil.copy(path, boundary._path(rank).with_suffix(path.suffix))


def test_a_survivor_has_the_state_of_a_lost_rank(train: Callable[..., None]) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        leave_as_rank_1(boundary)
        note = known(boundary)
        states, exact = boundary._put_back(note, [0, 1]), joining._active.exact
        next(states)
        torch.rand(7)
        exact._epoch_random_state = exact._first_batch_random_state = exact.get_random_state()  # of another rank
        boundary._session.fit.module.metric.update(3.0)
        next(states)
        assert state_now() == watched.state

    train(9, look)


class HalfOfTheData(Data):
    def train_dataloader(self) -> Any:
        return loader(2, shuffle=True)


@pytest.fixture
def train_for_two(train: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Trains on from step 3 of 6 of an epoch as the only one that is left of two ranks.

    The absent one's batch comes first in each step.
    """
    own_state = ExactState.own_state

    def of_both(exact: ExactState, final: bool) -> dict[str, Any]:
        own, before = own_state(exact, final), exact.get_random_state()
        torch.manual_seed(7)
        of_another = {**own, "now": exact.get_random_state()}
        exact.set_random_state(before)
        return {**own, "world_size": 2, "absent": {"1": of_another}}

    def wait_for_save(boundary: LastBoundary, watched: Watched) -> None:
        assert all(each(30.0) for each in boundary._session.fit.participants.implement(Participant.settle_saves))

    with monkeypatch.context() as patch:
        patch.setattr(ExactState, "own_state", of_both)
        train(4, wait_for_save, data=HalfOfTheData)
    context.fits_begun.clear()
    return functools.partial(train, data=HalfOfTheData)


@pytest.mark.parametrize(
    "at", [0, 1, 3, 6, 7], ids=["first", "its own", "later", "first of an epoch", "its own of an epoch"]
)
@pytest.mark.slow_but_for("first", "its own of an epoch")
def test_what_the_step_of_an_absent_rank_has_changed_is_put_back_here_and_for_a_lost_rank(
    train_for_two: Callable[..., None], at: int
) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        exact = joining._active.exact
        assert [*exact.absent_states] == [1]
        assert state_now() != watched.state
        leave_as_rank_1(boundary, 2)
        note = known(boundary)
        absent = note.absent[1]
        assert torch.equal(absent["now"]["torch"], absent["first_batch"]["torch"]) == (at >= 6)  # its epoch has begun
        states = boundary._put_back(note, [0, 2])
        next(states)
        assert state_now() == watched.state
        exact.put_back_absent({})
        next(states)
        assert by_value(*state_now()) == by_value(*watched.state)  # at the begin of an epoch two of its are the same
        boundary._path(1).unlink()
        with pytest.raises(StateUnknown, match="rank 1 has left nothing"):
            list(boundary._put_back(known(boundary), [2]))

    train_for_two(at, look)


class LogsItself(L.Callback):
    """Gives numbers to the loggers itself, in the middle of every step."""

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"by itself": trainer.global_step / 2}, trainer.global_step)


def lost_logs(boundary: LastBoundary) -> Any:
    """The state of the logs of this rank, if it were lost, as a survivor puts it together."""
    exact, fit = joining._active.exact, boundary._session.fit
    leave_as_rank_1(boundary)
    own, exact.logs, fit.rank = exact.logs, None, 1
    try:
        list(boundary._put_back(known(boundary), [1, 0]))
        return exact.own_state(final=False)["kept"][LOGS]
    finally:
        exact.logs, exact._kept_of_lost, fit.rank = own, None, 0


def test_what_rank_0_had_not_written_to_its_logs_is_in_them_once(
    train: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")

    def look(boundary: LastBoundary, watched: Watched) -> None:
        with open(boundary._rows_path(0), "ab") as file:
            file.write(b'[0, 7, {"by')  # where a kill has cut it off
        logs = lost_logs(boundary)
        assert [len(each["unwritten"]) for each in logs.values()] == [2, 1]  # a save has TensorBoard write
        for has_written_since in (False, True):
            if has_written_since:  # what lay behind the boundary, too
                for logger in loggers:
                    logger.save()
            copy = tmp_path / f"copy-{has_written_since}"
            shutil.copytree(tmp_path / "logs", copy)
            replacement = [kind(copy, kind.__name__, version=0) for kind in (CSVLogger, TensorBoardLogger)]
            lightning_loggers.append_to_csv(replacement[0])
            of_replacement = Logs(SimpleNamespace(loggers=replacement), Patches())  # type: ignore[arg-type]
            of_replacement.load_state_dict({str(copy / Path(*Path(name).parts[-2:])): logs[name] for name in logs})
            for logger in replacement:
                logger.log_metrics({"by itself": 4.0}, 8)
                logger.finalize("success")
            expected = [(step, step / 2) for step in range(9)]
            of_csv = [(int(row["step"]), float(row["by itself"])) for row in test_logs.rows(copy) if row["by itself"]]
            assert of_csv == expected
            assert test_logs.shown(copy)["by itself"] == expected
        # What is not known is refused.
        monkeypatch.setattr(logger_files, "_MOST_UNWRITTEN_BYTES", 1)
        loggers[1].log_metrics({"large": 1.0}, 8)
        boundary._keep()
        with pytest.raises(StateUnknown, match="lost rows"):
            lost_logs(boundary)
        loggers[1].save()
        boundary._keep()
        lost_logs(boundary)
        loggers[1].experiment.add_scalars("of another file", {"of": 1.0}, 8)
        boundary._keep()
        with pytest.raises(StateUnknown, match="lost rows"):
            lost_logs(boundary)

    loggers = [kind(tmp_path / "logs", kind.__name__) for kind in (CSVLogger, TensorBoardLogger)]
    train(8, look, logger=loggers, callbacks=[LogsItself()], log_every_n_steps=6)


def test_rows_of_a_logger_of_the_users_own_are_not_known(train: Callable[..., None], tmp_path: Path) -> None:
    class Own(CSVLogger):
        pass

    def look(boundary: LastBoundary, watched: Watched) -> None:
        with pytest.raises(StateUnknown, match="lost rows"):
            lost_logs(boundary)

    train(1, look, logger=Own(tmp_path))


def test_what_a_surviving_rank_0_has_logged_in_the_step_is_not_in_the_state(
    train: Callable[..., None], tmp_path: Path
) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        note = known(boundary)
        assert joining._active.exact.logs.position() != note.logs
        list(boundary._put_back(note, [0]))
        assert state_now() == watched.state

    for log_every_n_steps in (6, 1):  # some rows are not written, or all of them are
        logger = CSVLogger(tmp_path / str(log_every_n_steps))
        train(8, look, logger=logger, callbacks=[LogsItself()], log_every_n_steps=log_every_n_steps)


def test_of_another_position_token_or_layout_a_lost_rank_has_left_nothing(train: Callable[..., None]) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        note, fit = known(boundary), boundary._session.fit
        leave_as_rank_1(boundary)

        def refused(why: str, position: int = note.position) -> None:
            with pytest.raises(StateUnknown, match=why):
                list(boundary._put_back(note._replace(position=position), [1]))

        list(boundary._put_back(note, [1]))
        refused("not at the last boundary", note.position + 1)
        boundary._constants += "other"
        refused("had other buffers")
        boundary._values.layout += 1
        refused("different metrics")
        boundary._path(1).with_suffix(".epoch1").unlink()
        boundary._values.layout -= 1
        refused("begin of its epoch")
        fit.nonce = "another start"
        refused("left nothing")

    train(4, look)


@torch.no_grad()
def write(boundary: LastBoundary) -> None:
    boundary._session.fit.module.net[0].weight.mul_(1.0)


def validate(boundary: LastBoundary) -> None:
    boundary._session.fit.trainer.fit_loop.epoch_loop.val_loop.batch_progress.increment_ready()


CHANGES: dict[str, tuple[Callable[[LastBoundary], Any], str]] = {
    "a parameter": (write, "parameters before the optimizer"),
    "a rate": (lambda b: b._optimizer.param_groups[0].update(lr=1.0), "settings of the optimizer"),
    "a validation": (validate, "gone on"),
    "an optimizer's step": (lambda b: b._optimizer.step(), "gone on"),
    "a mode": (lambda b: b._session.fit.module.net[2].eval(), "switched"),
    "a constant": (lambda b: b._session.fit.module.mask[3].zero_(), "buffers, or parameters"),
    "a pause": (lambda b: b._session.fit.participants.add(Pauses()), "bad"),
}


class Pauses(Participant):
    def pauses_saves(self) -> bool:
        return True


def test_a_step_that_has_changed_more_is_not_saved(train: Callable[..., None]) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        for name, (change, why) in CHANGES.items():
            boundary._keep()  # as if this were a boundary
            known(boundary)
            change(boundary)
            with pytest.raises(StateUnknown) as found:
                known(boundary)
            assert why in str(found.value), name
            boundary._session.fit.module.train()
            boundary._session.fit.module.mask.fill_(1.0)

    train(4, look)


def test_what_is_not_known_in_a_step_is_refused_at_the_start(train: Callable[..., None]) -> None:
    class Keeps(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["seen"] = 3

    class Gathers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gathered = CatMetric()

    class Turned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turned", torch.ones(2, 3).T)

    class Counts(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": 3}

    class Stateful(Data):
        state_dict = Counts.state_dict

    def refused(why: str) -> Callable[..., None]:
        def look(boundary: LastBoundary, watched: Watched) -> None:
            assert why in str(boundary._off)
            with pytest.raises(StateUnknown, match=why):
                known(boundary)

        return look

    train(1, refused("Keeps saves its own state"), Keeps())
    train(1, refused("gathered.value is a list"), Gathers())
    train(1, refused("turned is not contiguous"), Turned())
    train(1, refused("Counts saves its own state"), callbacks=[Counts()])
    train(1, refused("Stateful saves its own state"), data=Stateful)


STANDINGS: dict[str, tuple[dict[int, _Standing], list[int] | str]] = {
    "all at the same boundary": ({0: _Standing(7), 2: _Standing(7)}, [0, 2]),
    "one a step ahead": ({0: _Standing(8), 1: _Standing(7), 3: _Standing(7)}, [1, 3]),
    "one in the optimizer's step": ({1: _Standing(None), 2: _Standing(7)}, [2]),
    "all in the optimizer's step": ({0: _Standing(None), 1: _Standing(None)}, "all ranks have gone on"),
}


def test_the_ranks_at_the_oldest_boundary_save() -> None:
    for name, (standings, expected) in STANDINGS.items():
        if isinstance(expected, list):
            assert _savers(standings) == expected, name
        else:
            with pytest.raises(StateUnknown, match=expected):
                _savers(standings)


def leave_word(boundary: LastBoundary, rank: int, standing: _Standing, **more: Any) -> None:
    token = boundary._session.fit.nonce
    write_json(boundary._standing_path(rank), {"token": token, **standing._asdict(), **more})


def test_the_first_survivor_at_the_oldest_boundary_saves_for_the_others(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        calls = []

        class Saves(Participant):
            settles = True

            def settle_saves(self, within_s: float) -> bool:
                return self.settles

            def save_after_loss(self, generation: str, ranks: Any, records: bool, within_s: float) -> bool:
                calls.append((generation, fit.rank, list(ranks), records))
                return True

        fit = boundary._session.fit
        fit.participants, saves = Participants(), Saves()
        fit.participants.add(saves)
        monkeypatch.setattr(L.Trainer, "world_size", 4)
        boundary._session.selector.local.locations = rank_locations([("here", 0)] * 4)
        here = boundary._note.position
        for rank in range(1, 4):
            shutil.copy(boundary._path(0), boundary._path(rank))
            shutil.copy(boundary._epoch_path(0, boundary._epochs), boundary._epoch_path(rank, boundary._epochs))

        def saved(rank: int, lost: tuple[int, ...] = (1,), /, **others: _Standing) -> Any:
            calls.clear()
            for each in range(4):
                boundary._standing_path(each).unlink(missing_ok=True)
            for name, standing in others.items():
                leave_word(boundary, int(name[1:]), standing)
            fit.rank = rank
            boundary.save(lost)
            return [call[1:] for call in calls]

        same, ahead = _Standing(here), _Standing(here + 1)
        # Also where none is lost, but others come back: all save, and the first at the oldest boundary for the others.
        assert saved(2, (), r0=same, r1=same, r3=same) == [(2, [2], False)]
        assert saved(0, (), r1=same, r2=same, r3=same) == [(0, [0], True)]
        assert saved(1, (), r0=ahead, r2=same, r3=same) == [(1, [1, 0], True)]
        assert saved(0, r2=same, r3=same) == [(0, [0, 1], True)]
        name = calls[0][0]
        assert saved(2, r0=same, r3=same) == [(2, [2], False)]
        assert calls[0][0] == name
        assert saved(2, r0=ahead, r3=same) == [(2, [2, 0, 1], True)]
        assert saved(3, r0=ahead, r2=same) == [(3, [3], False)]
        assert saved(2, r0=_Standing(None), r3=ahead) == [(2, [2, 0, 1, 3], True)]
        assert saved(2, r0=_Standing(here - 1), r3=same) == []
        assert saved(2, r0=_Standing(None, "no"), r3=same) == []
        # Rank 3 says nothing in time, or only something of an earlier start; or it is found to be lost, too.
        monkeypatch.setattr(last_boundary, "SURVIVORS_FOUND_WITHIN_S", 0.02)
        assert saved(0, r2=same) == []
        leave_word(boundary, 3, same, token="another start")
        boundary.save((1,))
        assert calls == []
        monkeypatch.setattr(last_boundary, "_lost_by_now", lambda lost: {*lost, 3})
        # It lives and does not go on, and may still come to this boundary.
        part = boundary._path(3).rename(boundary._path(3).with_suffix(".later"))
        assert saved(0, r2=same) == []
        clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: part.rename(boundary._path(3)))
        with monkeypatch.context() as patch:
            patch.setattr(last_boundary, "time", clock)
            assert saved(0, r2=same) == [(0, [0, 1, 3], True)]
        assert saved(0, r2=same, r3=ahead) == [(0, [0, 1, 3], True)]
        assert saved(0, r2=same, r3=_Standing(None, "what it saves is stuck")) == []
        assert saved(1) == []
        assert boundary._standing_of(1) == same
        monkeypatch.setattr(last_boundary, "_dead", lambda lost: {*lost, 3})
        assert saved(0, r2=same) == [(0, [0, 1, 3], True)]
        # Of several nodes each has its own words; the first that is left of all reports it.
        boundary._session.selector.local.locations = rank_locations([("here", 0)] * 2 + [("there", 1)] * 2)
        monkeypatch.setattr(last_boundary, "_lost_by_now", lambda lost: {*lost})
        monkeypatch.setattr(last_boundary, "_dead", lambda lost: {*lost})
        assert saved(0) == [(0, [0, 1], True)]
        assert saved(3, r2=ahead) == [(3, [3, 2], False)]
        assert saved(2, (3,)) == [(2, [2, 3], False)]
        boundary._session.selector.local.locations = rank_locations([("here", 0)] * 4)
        # Who cannot save says so, and the others need not wait.
        saves.settles = False
        assert saved(0, r2=same) == []
        assert boundary._standing_of(0) == _Standing(None, "a local save in progress is stuck")
        saves.settles = True
        boundary._step_has_begun = True
        assert saved(0, r2=same) == []
        assert boundary._standing_of(0) == _Standing(None)
        boundary._step_has_begun = False
        boundary._note = boundary._note._replace(position=7)
        boundary._note.unchanged[:] = [owner[key] for owner, key in boundary._unchanged]

    train(4, look)


def test_survivors_may_publish_although_the_replacement_of_rank_0_has_claimed_the_run(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        fit = boundary._session.fit
        fit.check_owner()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
        fit.run.claim()  # by a rank of the same launch, namely this one
        with pytest.raises(StaleAttempt):
            fit.check_owner()
        fit.rank_0_may_go_ahead = True
        fit.check_owner()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another one")
        with pytest.raises(StaleAttempt):
            fit.check_owner()

    train(1, look)


def test_a_survivor_that_has_not_heard_of_the_next_generation_leaves_for_it(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer becomes rank 0 and claims the run while a survivor that is alone finishes its step."""

    def look(boundary: LastBoundary, watched: Watched) -> None:
        fit, line = boundary._session.fit, Line()
        monkeypatch.setattr(membership, "current", lambda: line)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
        fit.check_owner()
        assert line.asked == []
        fit.run.claim()
        with pytest.raises(StaleAttempt):  # all ranks are restarted
            fit.check_owner()
        line.next = object()
        with pytest.raises(PeerLost):
            fit.check_owner()
        assert line.asked == [LOSS_CONFIRMED_WITHIN_S] * 2
        fit.rank_0_may_go_ahead = True  # it has left, and saves
        fit.check_owner()
        fit.rank_0_may_go_ahead = False
        fit.run.claim()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another one")
        with pytest.raises(StaleAttempt):
            fit.check_owner()

    train(1, look)


def test_who_leaves_without_the_others_does_not_wait_for_a_watchdog_that_starts(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start, started = threading.Event(), threading.Event()

    def start(directory: Path) -> None:
        assert may_start.wait(60)
        started.set()

    def look(boundary: LastBoundary, watched: Watched) -> None:
        session = joining._active
        assert session is not None
        joining.leave_without_peers(session.fit.trainer, [])
        assert session.has_left
        assert not started.is_set()

    monkeypatch.setattr(watchdog, "start", start)
    watched = FaultTolerance(calculate_timeouts=False)
    try:
        train(4, look, callbacks=[watched])
    finally:
        may_start.set()
    assert started.wait(60), "it starts all the same"


class Line:
    """Of the membership, what says whether another generation was announced."""

    def __init__(self) -> None:
        self.next: object | None = None
        self.asked: list[float] = []

    def replacement(self, within_s: float) -> object | None:
        self.asked.append(within_s)
        return self.next


def test_a_save_after_a_loss_is_recorded_when_all_have_saved(train: Callable[..., None]) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        fit = boundary._session.fit
        (save,) = fit.participants.implement(Participant.save_after_loss)
        policy: Any = save.__self__

        def recorded() -> list[Any]:
            events = fit.ledger.events()
            return [(each.step, each.generation) for each in events if getattr(each, "reason", "") == "after a loss"]

        def ranks() -> Any:
            return boundary._put_back(known(boundary), [0])

        assert save("0123abcd", ranks(), True, 30.0)
        assert recorded() == [(9, "0123abcd")]
        policy.locations = rank_locations([(policy.location.node, 0)] * 2)  # another rank, which is elsewhere
        assert save("0123abce", ranks(), False, 30.0)
        assert not save("0123abcf", ranks(), True, 0.5)
        policy._saves._snapshots._volatile.add("a parameter that is written outside of the optimizer's step")
        assert not save("0123abd0", ranks(), False, 30.0)
        assert recorded() == [(9, "0123abcd")]

    train(9, look)


def test_a_rank_that_validates_or_has_seen_bad_steps_does_not_save(train: Callable[..., None]) -> None:
    class LooksBad(Participant):
        def looks_bad(self) -> bool:
            return True

    def look(boundary: LastBoundary, watched: Watched) -> None:
        exact, participants = boundary._session.exact, boundary._session.fit.participants
        known(boundary)
        for name, why in (("before_evaluation", "in a validation"), ("resumed", "has not resumed yet")):
            before = vars(exact)[name]
            vars(exact)[name] = object()
            with pytest.raises(StateUnknown, match=why):
                known(boundary)
            vars(exact)[name] = before
        divergence = Divergence(3, ((0,), (1,)))
        boundary._session.fit.diverged(divergence)
        with pytest.raises(StateUnknown, match="the same state do not"):
            known(boundary)
        boundary._session.fit.replicas_differ = False
        participants.add(LooksBad())
        with pytest.raises(StateUnknown, match="bad"):
            known(boundary)

    train(4, look)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("is_bad", [True, False])
@pytest.mark.parametrize("gone", [set(), {7}])
def test_where_all_leave_together_what_is_not_known_after_a_loss_is_saved(
    train: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gone: set[int],
    is_known: bool,
    is_bad: bool,
) -> None:
    said: list[Any] = []

    class Saves(Participant):
        def save_locally(self, reason: str, within_s: float, gone: Collection[int] = ()) -> bool:
            said.append((reason, gone))
            return True

        def looks_bad(self) -> bool:
            return is_bad

        def save_after_loss(self, generation: str, ranks: Any, records: bool, within_s: float) -> bool:
            said.append("after a loss")
            return bool([*ranks])

    def look(boundary: LastBoundary, watched: Watched) -> None:
        fit = boundary._session.fit
        fit.participants = Participants()
        fit.participants.add(Saves())
        if not is_known:
            boundary._turn_off("the module has a state of its own")
        boundary.save_together(gone)
        with monkeypatch.context() as full:
            if said:  # no rank needs to know in node memory where this one is
                full.setattr(boundary, "_leave_word", MagicMock(side_effect=OSError(28, "node memory is full")))
            boundary.save(())
        for saved_at in (fit.steps_counted, fit.steps_counted - 1):  # this boundary, and one that was not left
            boundary._saved_at = saved_at
            boundary.save(())

    train(4, look)
    assert "node memory is full" not in caplog.text
    is_saved_after = is_known and not gone
    saved = ["after a loss"] * 2 if is_saved_after else [("the ranks change", gone)]
    if is_known and gone:
        saved.append("after a loss")  # at the boundary that was not left
    assert said == ([] if is_bad else saved)


def test_a_boundary_is_noted_also_where_the_local_saves_hear_of_a_loss_first(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def hear(policy: LocalSavePolicy, step: int, may_save: Callable[[], bool]) -> None:
        if step == 4:
            found.append(policy.session.fit.steps_counted)
            raise Found

    monkeypatch.setattr(LocalSavePolicy, "at_boundary", hear)
    kept: list[LastBoundary] = []
    leaves = LastBoundary.leave
    monkeypatch.setattr(LastBoundary, "leave", lambda boundary: (kept.append(boundary), leaves(boundary)))
    train(100, lambda boundary, watched: None)
    assert [each._note.position for each in kept] == found


def test_a_boundary_is_noted_before_an_event_is_acted_on(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change the state, and a rank that is lost in it has left its part."""
    noted: list[tuple[int, int]] = []

    class Acts(Participant):
        def after_batch(self, window_complete: bool) -> None:
            fit = joining._active.fit
            if fit.trainer.global_step == 3:
                fit.agreement.request("something")

        def on_event(self, event: Any) -> None:
            boundary, fit = joining._active.last_boundary, joining._active.fit
            noted.append((fit.steps_counted, boundary._note.position))
            raise Found

    class Joins(L.Callback):
        def on_train_start(self, *args: Any) -> None:
            joining._active.fit.participants.add(Acts())

    kept: list[LastBoundary] = []
    keeps = LastBoundary._keep
    monkeypatch.setattr(LastBoundary, "_keep", lambda boundary: (kept.append(boundary), keeps(boundary)))
    train(100, lambda boundary, watched: None, callbacks=[Joins()])
    [(counted, position)] = noted
    assert counted == position
    assert kept[-1]._note.position == position, "and what the event has changed is not noted where it fails"
    assert len(kept) == position + 1


def test_what_an_event_has_changed_is_noted_before_it_is_saved(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Acts(Participant):
        def after_batch(self, window_complete: bool) -> None:
            if joining._active.fit.trainer.global_step == 2:
                joining._active.fit.agreement.request("something")

        def on_event(self, event: Any) -> None:
            random.seed(77)

    class Joins(L.Callback):
        def on_train_start(self, *args: Any) -> None:
            joining._active.fit.participants.add(Acts())

    def take(policy: LocalSavePolicy) -> None:
        boundary = joining._active.last_boundary
        newest, *_ = read_own_parts(boundary._path(0), boundary._session.fit.nonce)
        found.append(newest.python_state == random.getstate())
        raise Found

    found: list[bool] = []
    monkeypatch.setattr(LocalSavePolicy, "_state", take)  # at step 3
    monkeypatch.setattr(LocalSaves, "miss", lambda saves, step, error: None)
    train(4, lambda boundary, watched: None, callbacks=[Joins()])
    assert found[0]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_boundary_is_noted_before_the_state_is_saved(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_async: bool
) -> None:
    """A rank that is lost in a save would leave nothing of that boundary, and all would go back."""
    noted: dict[str, list[bool]] = {"capture": [], "_collect": []}
    asked: list[int] = []

    def look(name: str, collects: Callable[..., Any], *args: Any, **options: Any) -> Any:
        boundary, position = joining._active.last_boundary, joining._active.fit.steps_counted
        parts = read_own_parts(boundary._path(0), boundary._session.fit.nonce)
        noted[name].append(boundary._note.position == parts[0].position == position)
        return collects(*args, **options)

    def keep(boundary: LastBoundary, keeps: Callable[..., None] = LastBoundary._keep) -> None:
        asked.append(boundary._session.fit.steps_counted)
        keeps(boundary)

    monkeypatch.setattr(LastBoundary, "_keep", keep)
    for name in noted:
        looked = functools.partial(look, name, vars(Saver)[name])
        monkeypatch.setattr(Saver, name, lambda *args, looked=looked, **options: looked(*args, **options))
    saves = AutoResume(every_n_train_steps=2, async_save=is_async, run_dir=tmp_path / "run")
    train(9, lambda boundary, watched: None, callbacks=[saves])
    assert all(noted["capture"])
    assert len(noted["capture"]) >= 2
    assert all(noted["_collect"])
    assert len(noted["_collect"]) >= 3
    assert max(Counter(asked).values()) == 2, "once before all saves of a boundary, and behind them"
    assert Counter(asked)[1] == 1, "where nothing is saved"


class Drawn(IterableDataset[torch.Tensor]):
    """Without a length, so that a batch is fetched ahead; what it has depends on the random state of its time."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(12):
            yield torch.randn(4)


class Reads(L.LightningModule):
    """Notes its batches, and ends before a step."""

    def __init__(self, ends_at: int = -1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.ends_at = ends_at
        self.read: dict[int, float] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.ends_at:
            raise Found
        self.read[batch_idx] = float(batch.sum())
        torch.rand(1)  # such as dropout
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("is_elastic", [True, False])
def test_what_a_batch_that_was_fetched_ahead_had_drawn_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elastic: bool
) -> None:
    monkeypatch.setattr(Replaceability, "is_possible", is_elastic)

    def fit(run: str, module: Reads) -> Reads:
        context.fits_begun.clear()
        torch.manual_seed(1)
        saves = AutoResume(every_n_train_steps=4, async_save=False, run_dir=tmp_path / run)
        trainer = L.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path, callbacks=[saves])
        with suppress(Found):
            trainer.fit(module, DataLoader(Drawn(), batch_size=2))
        return module

    undisturbed = fit("undisturbed", Reads()).read
    assert fit("disturbed", Reads(ends_at=5)).read == {index: undisturbed[index] for index in range(5)}
    assert fit("disturbed", Reads()).read == {index: undisturbed[index] for index in range(4, 6)}


def test_the_begin_of_an_epoch_is_taken_from_the_same_start_and_epoch_of_a_lost_rank(
    train: Callable[..., None],
) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        leave_as_rank_1(boundary)
        fit, begun_at = boundary._session.fit, boundary._begun_at
        boundary._epoch_of(1, begun_at)
        with pytest.raises(StateUnknown, match="begin of its epoch"):
            boundary._epoch_of(1, begun_at + 1)
        fit.nonce = "another start"
        with pytest.raises(StateUnknown, match="begin of its epoch"):
            boundary._epoch_of(1, begun_at)

    train(9, look)


def test_where_the_last_boundary_is_not_kept_no_hook_and_no_check_is_left(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[None] = []
    monkeypatch.setattr(Replaceability, "check", lambda self: checks.append(None))

    def turned_off(boundary: LastBoundary, watched: Watched) -> None:
        assert boundary._hook.id in boundary._hook.hooks_dict_ref()
        boundary._turn_off("a test")
        assert boundary._hook.id not in boundary._hook.hooks_dict_ref()

    train(1, turned_off, num_sanity_val_steps=0)
    assert len(checks) > 1
    checks.clear()
    monkeypatch.setattr(Replaceability, "is_possible", False)  # without --elastic

    def absent(boundary: LastBoundary | None, watched: Watched) -> None:
        assert boundary is None
        assert not checks

    train(1, absent, num_sanity_val_steps=0)


def test_where_the_state_of_a_lost_rank_would_not_be_known_the_last_boundary_is_not_kept(
    train: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Draws(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(loader(4).dataset, 4, shuffle=True, generator=torch.Generator())

    def refused(why: str) -> Callable[..., None]:
        def look(boundary: LastBoundary, watched: Watched) -> None:
            assert why in str(boundary._off)

        return look

    train(1, refused("a random generator of its own"), data=Draws)
    with monkeypatch.context() as patch:
        patch.setattr(lightning_strategies, "replicates_state", lambda trainer: False)
        train(1, refused("different parameters"))
    with monkeypatch.context() as patch:
        patch.setattr(Participants, "own_states", lambda self: ["the counts"])
        train(1, refused("different states of the counts"))
    monkeypatch.setattr("lightning_resilience.checkpoint.node_store.in_node_memory", lambda folder: False)
    train(1, refused("not in node memory"))


def test_buffers_that_are_put_back_are_the_same_tensors(train: Callable[..., None]) -> None:
    def look(boundary: LastBoundary, watched: Watched) -> None:
        module = boundary._session.fit.module
        before = dict(module.named_buffers())
        list(boundary._put_back(known(boundary), [0]))
        assert all(each is before[name] for name, each in module.named_buffers())

    train(4, look)
