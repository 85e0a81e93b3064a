"""Ranks that train apart and exchange now and then: what they come to, and that it survives what kills runs."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as L
import pytest
import torch
import torch.nn.utils.prune
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import LocalSGD, NaNGuard, averaging
from lightning_resilience._lightning import lightning_strategies
from lightning_resilience.agreement import PeerLost
from lightning_resilience.averaging import OuterStep, RanksDiffer, average, average_numbers, differing, kept_by, meet
from lightning_resilience.fit.exchanges import Exchanges
from lightning_resilience.fit.numerics_policy import NumericsPolicy
from lightning_resilience.run.run_directory import RunDirectory
from tests.harness import free_port, reference, result, run, run_ranks, undisturbed
from tests.ledgers import read_ledger
from tests.test_exact_resume import killed_and_resumed, make
from tests.test_launch import wait_until
from tests.test_replacement import launched, replaced

BATCHES, EPOCHS = 7, 2
MIXED = torch.nn.parallel.distributed._MixedPrecision(torch.bfloat16)
DILOCO = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


# -- what they come to -------------------------------------------------------------------------------------------------


class Apart(L.LightningModule):
    """Whose ranks have data of their own. It notes all that it holds, at the end of each batch."""

    def __init__(self, manual: bool = False, accumulated: int = 1) -> None:
        super().__init__()
        self.accumulated = accumulated
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
        )
        self.frozen = torch.nn.Parameter(torch.rand(5), requires_grad=False)
        self.automatic_optimization = not manual
        self.seen: list[list[torch.Tensor]] = []
        self.validated: list[list[torch.Tensor]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).pow(2).mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss / self.accumulated)
            if (batch_idx + 1) % self.accumulated == 0 or batch_idx + 1 == BATCHES:
                optimizer.step()
                optimizer.zero_grad()
        return cast(torch.Tensor, loss)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(held(self, self.trainer.optimizers[0]))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(held(self, self.trainer.optimizers[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), 0.05)


def held(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [each for state in optimizer.state.values() for _, each in sorted(state.items())]
    return [each.detach().clone() for each in (*module.parameters(), *module.buffers(), *moments)]


def batches(rank: int, epoch: int = 0) -> list[torch.Tensor]:
    return list(torch.randn(BATCHES, 3, 4, generator=torch.Generator().manual_seed(rank)))


def as_rank(rank: int, ranks: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="test")
    torch.set_num_threads(1)


def train(rank: int, folder: Path, port: int, ranks: int, every: int, options: dict[str, Any]) -> None:
    as_rank(rank, ranks, port)
    manual, size = options.get("manual", False), options.get("accumulate", 1)
    module = Apart(manual, size)
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=ranks, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
        callbacks=[
            LocalSGD(every, DILOCO if options.get("outer") else None, run_dir=folder / "run"),
            ModelCheckpoint(folder / "saved", "{step}", save_top_k=-1, every_n_train_steps=options.get("save", 1000)),
        ],
        accumulate_grad_batches=1 if manual else size, val_check_interval=options.get("validate"),
        num_sanity_val_steps=1,
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.cat(batches(rank))), 3)
    held_out = DataLoader(TensorDataset(torch.ones(3, 4)), 3) if "validate" in options else None
    trainer.fit(module, data, held_out)
    end = held(module, trainer.optimizers[0])
    torch.save({"seen": module.seen, "validated": module.validated, "end": end}, folder / f"rank-{rank}")


def trained(tmp_path: Path, ranks: int, every: int, **options: Any) -> list[dict[str, list[Any]]]:
    run_ranks(train, tmp_path, free_port(), ranks, every, options, count=ranks)
    return [torch.load(tmp_path / f"rank-{rank}") for rank in range(ranks)]


def by_hand(ranks: int, every: int, **options: Any) -> list[dict[str, list[Any]]]:
    """The same as it is written in the papers, in one process."""
    modules = [Apart() for _ in range(ranks)]
    optimizers: list[Any] = [module.configure_optimizers() for module in modules]
    anchors = [each.detach().clone() for each in modules[0].net.parameters()]
    momenta = [torch.zeros_like(each) for each in anchors]
    found: list[dict[str, list[Any]]] = [{"seen": [], "validated": []} for _ in modules]
    since, steps, size = 0, 0, options.get("accumulate", 1)

    @torch.no_grad()
    def exchange() -> None:
        nonlocal since
        if since == 0:
            return
        since = 0
        trained = [[*module.net.parameters(), *moments(each)] for module, each in zip(modules, optimizers, strict=True)]
        for copies in zip(*trained, strict=True):
            mean = sum(copies[1:], copies[0]) / ranks
            for each in copies:
                each.copy_(mean)
        for module in modules[1:]:
            for mine, of_rank_0 in zip(module.buffers(), modules[0].buffers(), strict=True):
                mine.copy_(of_rank_0)
        if options.get("outer"):
            for place, (anchor, momentum) in enumerate(zip(anchors, momenta, strict=True)):
                gradient = anchor - list(modules[0].net.parameters())[place]
                momentum.mul_(0.9).add_(gradient)
                anchor -= 0.7 * (gradient + 0.9 * momentum)
                for module in modules:
                    list(module.net.parameters())[place].copy_(anchor)

    def moments(optimizer: Any) -> list[torch.Tensor]:
        return [each for state in optimizer.state.values() for _, each in sorted(state.items())]

    for _ in range(EPOCHS):
        for batch in range(BATCHES):
            is_whole = (batch + 1) % size == 0 or batch + 1 == BATCHES
            for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
                (module.net(batches(rank)[batch]).pow(2).mean() / size).backward()
                if is_whole:
                    optimizer.step()
                    optimizer.zero_grad()
            is_unknown = options.get("manual", False) and steps == 0  # whether the user's optimizers are counted
            since, steps = since + (is_whole or is_unknown), steps + is_whole
            if since == every or (is_whole and steps % options.get("save", 1000) == 0):
                exchange()
            for one, module, optimizer in zip(found, modules, optimizers, strict=True):
                one["seen"].append(held(module, optimizer))
            if (batch + 1) % options.get("validate", 1000) == 0:
                exchange()
                for one, module, optimizer in zip(found, modules, optimizers, strict=True):
                    one["validated"].append(held(module, optimizer))
        exchange()
    for one, module, optimizer in zip(found, modules, optimizers, strict=True):
        one["end"] = held(module, optimizer)
    return found


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.slow_but_for("DiLoCo")
@pytest.mark.parametrize(
    ("ranks", "every", "options", "meet_at"),
    [
        pytest.param(2, 3, {}, [3, 6, 10, 13], id="local SGD"),
        pytest.param(2, 3, {"outer": True}, [3, 6, 10, 13], id="DiLoCo"),
        pytest.param(3, 2, {"manual": True}, [2, 4, 6, 9, 11, 13], id="manual optimization"),
        pytest.param(2, 2, {"accumulate": 2}, [4, 7, 11, 14], id="accumulated"),
        pytest.param(2, 3, {"accumulate": 2, "manual": True}, [4, 13], id="accumulated by hand"),
        pytest.param(2, 5, {"save": 4}, [4, 8, 12], id="another callback saves"),
        pytest.param(2, 6, {"validate": 4, "outer": True}, [], id="validation in between"),
    ],
)
def test_ranks_train_apart_and_meet(
    tmp_path: Path, ranks: int, every: int, options: dict[str, Any], meet_at: list[int]
) -> None:
    found, expected = trained(tmp_path, ranks, every, **options), by_hand(ranks, every, **options)
    first = found[0]
    assert [n for n in range(1, 15) if all(alike(first["seen"][n - 1], each["seen"][n - 1]) for each in found)] == [
        n for n in range(1, 15) if n in meet_at
    ]
    for ours, theirs in zip(found, expected, strict=True):
        for part in ("seen", "validated"):
            assert len(ours[part]) == len(theirs[part])
            for step, (one, other) in enumerate(zip(ours[part], theirs[part], strict=True)):
                torch.testing.assert_close((step, one), (step, other), rtol=1e-4, atol=3e-5)
        torch.testing.assert_close(ours["end"], theirs["end"], rtol=1e-4, atol=3e-5)
    assert all(alike(first["end"], each["end"]) for each in found), "they end alike"
    assert all(alike(*pair) for each in found for pair in zip(first["validated"], each["validated"], strict=True))
    for path in (tmp_path / "saved").glob("*.ckpt"):
        state = torch.load(path, weights_only=False)
        if (step := state["global_step"]) < 14:
            assert alike(list(state["state_dict"].values()), in_state_dict(first["seen"][step - 1]))


def in_state_dict(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of what a module has noted, in the order of its state."""
    module = Apart()
    with torch.no_grad():
        for mine, its in zip((*module.parameters(), *module.buffers()), tensors, strict=False):
            mine.copy_(its)
    return list(module.state_dict().values())


class Numbered(torch.optim.SGD):
    """Keeps numbers as some optimizers of others do, and something of no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state["steps"] = state.get("steps", 0) + 1
                    state["norm"] = float(each.grad.norm())
                    state["last"] = [each.grad.clone()]
                    each.sub_(each.grad, alpha=0.01)
        cast(Any, self.state)["losses"] = state["norm"]
        return loss


class Odd(L.LightningModule):
    """Whose ranks do not do the same: gradients come in another order, buffers are new ones, a part is frozen."""

    def __init__(self, rank: int, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.rank, self.optimizer = rank, optimizer
        self.first, self.second, self.at_times = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3))
        self.teacher = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
        self.fixed = torch.nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("total", torch.zeros(()))
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.at_times.requires_grad_(True)
        used = [self.first, self.second] if batch_idx else [[self.first, self.second][self.rank]]
        self.total = self.total + 1 + self.rank
        self.teacher.data.mul_(0.5).add_(self.first.data, alpha=0.5)
        return cast(torch.Tensor, sum((each * batch[0].mean()).pow(2).sum() for each in (*used, self.at_times)))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.at_times.requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        kept = {
            f"{name}.{key}": value[0] if isinstance(value, list) else value
            for name, each in self.named_parameters()
            for key, value in optimizer.state.get(each, {}).items()
        }
        kept["losses"] = cast(Any, optimizer.state).get("losses", 0.0)
        average = [each for each in cast(Any, self.trainer).callbacks if isinstance(each, EMAWeightAveraging)]
        weights = average[0]._average_model.state_dict() if average else {}
        self.seen.append(copy.deepcopy({**self.state_dict(), **kept, **{f"ema {k}": v for k, v in weights.items()}}))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([self.first, self.second, self.at_times], lr=0.01)


def train_oddly(rank: int, folder: Path, port: int, optimizer: type[torch.optim.Optimizer]) -> None:
    as_rank(rank, 2, port)
    module = Odd(rank, optimizer)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False, enable_checkpointing=False,
        callbacks=[EMAWeightAveraging(decay=0.5), LocalSGD(3, run_dir=folder / "run")],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.cat(batches(rank))), 3))
    torch.save(module.seen, folder / f"rank-{rank}")


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, Numbered])
def test_whatever_ranks_hold_is_the_same_behind_an_exchange(
    tmp_path: Path, optimizer: type[torch.optim.Optimizer]
) -> None:
    run_ranks(train_oddly, tmp_path, free_port(), optimizer)
    first, second = (torch.load(tmp_path / f"rank-{rank}") for rank in range(2))
    assert len(first) == len(second) == BATCHES
    for batch, (one, other) in enumerate(zip(first, second, strict=True)):
        differs = {
            name
            for name in one.keys() | other.keys()
            if not torch.equal(*(torch.as_tensor(each.get(name, math.nan)) for each in (one, other)))
        }
        if (batch + 1) % 3 == 0:
            assert not differs, batch
        elif batch:  # the teacher learns from what was trained before
            assert {"first", "second", "at_times", "total", *(["teacher"] if batch % 3 else [])} < differs, batch
        assert torch.equal(one["fixed"], first[0]["fixed"])
    assert any("ema" in name for name in first[0])


def train_unevenly(rank: int, folder: Path, port: int, epochs: int, count: int, validates: bool) -> None:
    as_rank(rank, 2, port)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False, enable_checkpointing=False,
        callbacks=[LocalSGD(3, run_dir=folder / "run")],
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.cat(batches(rank)[: count - rank])), 3)
    held_out = DataLoader(TensorDataset(torch.ones(3, 4)), 3) if validates else None
    with pytest.raises((RanksDiffer, PeerLost)) as raised:
        trainer.fit(Apart(), data, held_out)
    (folder / f"rank-{rank}").write_text(str(raised.value))


@pytest.mark.parametrize(
    ("epochs", "count", "validates"),
    [(3, BATCHES, False), (1, 7, False), (2, 7, True)],
    ids=["later", "at once", "at a validation"],
)
def test_ranks_whose_epochs_end_at_other_steps_do_not_mix_them(
    tmp_path: Path, epochs: int, count: int, validates: bool
) -> None:
    run_ranks(train_unevenly, tmp_path, free_port(), epochs, count, validates)
    said = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert any("All ranks need epochs of the same length" in each for each in said), said


def group_of_2(rank: int, port: int) -> torch.device:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    return torch.device("cpu")


def mix(rank: int, folder: Path, port: int) -> None:
    host = group_of_2(rank, port)
    averaging._BUCKET_BYTES = 64  # so that some are sent in parts
    mixed: list[torch.Tensor] = [
        torch.full((3,), 1.0 + rank),
        torch.tensor(2.0 + rank, dtype=torch.bfloat16),
        torch.full((2, 2), 1 + rank * 1j),
        torch.tensor([rank == 0, True]),
        torch.tensor([7 + rank]),
        torch.zeros(0),
        torch.full((4,), rank * 2.0).double()[::2],
        torch.arange(100.0).reshape(2, 10, 5, 1).to(memory_format=torch.channels_last) + rank,
        torch.tensor(2.0**24 + 2 * rank),
        torch.full((30,), rank * 2.0).double()[::2],
    ]
    sent: list[None] = []
    average(mixed, host, lambda: sent.append(None))
    assert len(sent) > 10, "a watchdog is told after each message"
    numbers = {"whole": 4 + rank, "list": [1.0 + rank]}
    average_numbers([(numbers, "whole"), (numbers["list"], 0)], host)
    alike, other = torch.rand(5, generator=torch.Generator().manual_seed(3)), torch.full((5,), float(rank))
    assert [each is other for each in differing([alike, other, alike[:0]], host)] == [True]
    torch.save((mixed, numbers), folder / f"mixed-{rank}")
    torch.distributed.destroy_process_group()


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    run_ranks(mix, tmp_path, free_port())
    for rank in range(2):
        mixed, numbers = torch.load(tmp_path / f"mixed-{rank}")
        assert mixed[0].tolist() == [1.5] * 3
        assert (mixed[1].item(), mixed[1].dtype) == (2.5, torch.bfloat16)
        assert mixed[2].flatten().tolist() == [1 + 0.5j] * 4
        assert mixed[3].tolist() == [True, True]
        assert mixed[4].tolist() == [7]
        assert mixed[6].tolist() == [1.0, 1.0]
        assert torch.equal(mixed[7], torch.arange(100.0).reshape(2, 10, 5, 1) + 0.5)
        assert mixed[8].item() == 2**24 + 1 - 1  # as float32 has it; and not the half of a sum that was rounded
        assert mixed[9].tolist() == [1.0] * 15
        assert numbers == {"whole": 4, "list": [1.5]}


def come_together(rank: int, folder: Path, port: int) -> None:
    host, waited = group_of_2(rank, port), 0
    long = folder / "has waited long"

    def waiting() -> None:
        nonlocal waited
        waited += 1
        if waited > 10 and rank == 0:
            long.touch()

    if rank == 1:
        wait_until(long.exists)
    meet((4, 4), {"weight": torch.ones(2), "rate": 0.1}, host, waiting)
    assert long.exists()
    for place, named, says in [
        ((4 + rank, 4), {}, "one rank has begun 4 batches and made 4 steps, another rank 5 and 4"),
        ((4, 4), {"weight": torch.ones(2 + rank)}, "Have every rank use all parameters before the first exchange"),
        ((4, 4), {f"weight {rank}": torch.ones(2)}, "hold different states"),
        ((4, 4), {"weight": torch.ones(2, dtype=[torch.half, torch.float][rank])}, "hold different states"),
        ((4, 4), {"rate": 0.1 + 0.1 * rank}, "their learning rates differ"),
    ]:
        with pytest.raises(RanksDiffer, match=says):
            meet(place, named, host, waiting)
    (folder / f"{rank}").touch()
    torch.distributed.destroy_process_group()


def test_ranks_wait_for_each_other_and_look_whether_they_belong_together(tmp_path: Path) -> None:
    run_ranks(come_together, tmp_path, free_port())
    assert len(list(tmp_path.glob("[01]"))) == 2


def test_what_optimizers_keep_in_their_groups_is_exchanged() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
    optimizer.param_groups[0].update(d=0.5, lr=torch.tensor(0.1))
    kept = {name: container[key] for name, container, key in kept_by([optimizer])}
    assert kept["0.group 0.d"] == 0.5
    assert kept["0.group 0.momentum"] == 0.9
    assert not [name for name in kept if name.endswith((".lr", ".params"))]


def test_an_outer_optimizer_takes_over_what_is_unfrozen() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    outer = OuterStep({"first": first}, DILOCO)
    alone = OuterStep({"copy": (copied := torch.nn.Parameter(torch.ones(2)))}, DILOCO)
    for number in range(3):
        if number:
            outer.extend({"renamed": first, "second": second})
        for each in (outer, alone):
            each.begin()
        with torch.no_grad():
            for parameter in (first, copied, second):
                parameter -= 1.0
        for each in (outer, alone):
            each.take()
    assert first.tolist() == copied.tolist(), "its moments are kept"
    assert second.tolist() != [-2.0, -2.0], "it makes steps of the outer optimizer, too"
    assert outer.state_dict()["parameters"] == ["first", "second"]


def test_the_outer_state_of_a_parameter_that_was_pruned_since_is_found() -> None:
    module = torch.nn.Linear(2, 2)
    torch.nn.utils.prune.identity(module, "weight")
    exchanges = SimpleNamespace(session=SimpleNamespace(fit=SimpleNamespace(module=module)))
    assert Exchanges._named(exchanges, "weight") is module.weight_orig  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="was saved with gone, which is not a parameter now"):
        Exchanges._named(exchanges, "gone")  # type: ignore[arg-type]


def test_an_outer_optimizer_moves_only_what_was_trained() -> None:
    trained, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    outer = OuterStep({"trained": trained, "frozen": frozen}, DILOCO)
    for is_frozen in (False, True, True):
        outer.begin()
        before = frozen.tolist()
        with torch.no_grad():
            trained -= 1.0
            frozen -= 0.0 if is_frozen else 1.0
        outer.take()
        assert (frozen.tolist() == before) == is_frozen
    assert trained[0] < -2.0
    another = OuterStep({"trained": trained, "frozen": frozen}, DILOCO)
    another.load_state_dict(outer.state_dict())
    assert outer.state_dict()["parameters"] == ["trained", "frozen"]
    assert str(another.state_dict()) == str(outer.state_dict())


# -- what kills runs ---------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "trainer": {"devices": 2},
    "callbacks": ["preemption", "auto_resume", "local_sgd"],
    "local_sgd": {"exchange_every": 5, "outer": True},
    "save_every": 1,
    "logs_at_end": True,  # as ranks do that do not wait for each other
}


@pytest.mark.parametrize(
    ("events", "options", "exchanges"),
    [
        pytest.param([{"at": "train", "step": 24, "rank": 1}], {}, {21}, id="rank 1 is killed"),
        pytest.param(
            [{"at": "train", "step": 13, "rank": 0, "do": "SIGTERM"}], {}, {15, 16, 21, 26}, id="told to stop"
        ),
        pytest.param(
            [{"at": "validation", "step": 16, "rank": 0, "do": "SIGTERM"}],
            {"validation": True},
            {16, 21},
            id="validating",
        ),
        pytest.param(
            [{"at": "train", "step": 24}],
            {"local_sgd": {"exchange_every": 3}, "batch_norm": True, "trainer": {"devices": 3}},
            {22},
            id="3 ranks, no outer optimizer",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow_but_for("rank 1 is killed")
def test_a_disturbed_run_ends_as_the_undisturbed_one(
    tmp_path: Path, events: list[dict[str, Any]], options: dict[str, Any], exchanges: set[int]
) -> None:
    options = {**OPTIONS, **options}
    ended, trained_on, output = killed_and_resumed(tmp_path, events, **options)
    assert (ended, trained_on) == undisturbed(tmp_path, **options)
    (resumed,) = re.findall(r"Resuming from step (\d+)", output)
    assert int(resumed) in exchanges, output


@pytest.mark.slow_but_for("1000")
@pytest.mark.parametrize("save_every", [1, 1000])
def test_a_fit_that_a_limit_has_ended_goes_on_from_an_exchange_that_was_due(tmp_path: Path, save_every: int) -> None:
    """At its limit the ranks exchange, as they would not have if it had gone on."""
    options = {**OPTIONS, "save_every": save_every}
    options["trainer"] = {"devices": 2, "max_steps": 7, "max_epochs": -1}
    config = make(tmp_path, "run", **options)
    codes, output = run(config, tmp_path / "run")
    assert set(codes) == {0}, output
    config["trainer"]["max_steps"] = 14
    codes, output = run(config, tmp_path / "run")
    assert set(codes) == {0}, output
    resumed = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "resumed"]
    options["trainer"] = dict(config["trainer"])
    is_exact = result(config) == result(reference(**options))
    if save_every == 1:
        assert is_exact
        assert [each["step"] for each in resumed] == [5]
    else:
        assert not is_exact
        assert "is not exact: its last epoch was cut short" in output


@pytest.mark.slow
def test_local_checkpoints_and_comparisons_are_behind_exchanges(tmp_path: Path) -> None:
    """Ranks that train apart are no divergence, and what each one keeps belongs together."""
    options: dict[str, Any] = {
        **OPTIONS,
        "callbacks": ["auto_resume", "local_checkpoint", "replica_check", "local_sgd"],
        "save_every": 1000,
        "step_s": 0.02,
    }
    local = {"every_n_train_steps": 2, "dir": str(tmp_path / "local")}
    events = [{"at": "train", "step": 24, "rank": 1}]
    ended, trained_on, output = killed_and_resumed(tmp_path, events, local=local, **options)
    assert (ended, trained_on) == undisturbed(tmp_path, **options)
    found = re.search(r"Resuming from step (\d+) \(local checkpoint", output)
    assert found is not None, output
    assert int(found[1]) in (5, 10, 15, 16, 21)  # the exchanges, of which the end of the epoch has one
    assert "hold" not in output


SLOW = [{"at": "train", "step": step, "do": "sleep", "seconds": 1.0} for step in range(6, 32)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "every", "step_s", "slow"),
    [
        pytest.param(5, 1000, 0.3, [], id="in the middle"),
        pytest.param(12, 12, 0.5, [], id="right behind an exchange"),
        pytest.param(5, 30, 0.02, SLOW, id="steps become slow"),
    ],
)
def test_a_stop_that_cannot_wait_exchanges_ahead_of_time(
    tmp_path: Path, step: int, every: int, step_s: float, slow: list[dict[str, Any]]
) -> None:
    options: dict[str, Any] = {
        **OPTIONS,
        "local_sgd": {"exchange_every": every},
        "step_s": step_s,
        "grace_period_s": 10.0,
        "trainer": {"devices": 2, "max_epochs": 1},
    }
    events = [{"at": "train", "step": step, "rank": 1, "do": "SIGTERM", "once": True}, *slow]
    config = make(tmp_path, "run", events=events, batches=60, **{**options, "save_every": 1000})
    config["trainer"]["limit_train_batches"] = 60
    codes, output = run(config, tmp_path / "run")
    assert set(codes) == {0}, output
    assert "The ranks exchange early" in output
    config["trainer"]["limit_train_batches"], config["events"] = 20, []
    codes, output = run(config, tmp_path / "run")
    assert set(codes) == {0}, output
    (resumed,) = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "resumed"]
    # How many steps are slow enough depends on how long the others have taken; only that it is ahead does not.
    assert step < resumed["step"] <= (every - 1 if slow else step + 4)


@pytest.mark.parametrize("by_exchange", [True, False])
@pytest.mark.slow
def test_who_waits_long_for_the_others_does_not_hang(tmp_path: Path, by_exchange: bool) -> None:
    """Where they exchange, and where they are to act on something before that."""
    limits = "setup:60,step:3,validation:30,checkpointing:30,out_of_section:3"
    slow = [{"at": "train", "step": step, "rank": 1, "do": "sleep", "seconds": 0.8} for step in range(4, 14)]
    options: dict[str, Any] = {
        **OPTIONS,
        "callbacks": ["fault_tolerance", "auto_resume", "straggler_detection", "local_sgd"],
        "fault_tolerance": {"section_timeouts": limits, "calculate_timeouts": False},
        "straggler_detection": {"report_time_interval": 300.0 if by_exchange else 2.0},
        "step_s": 0.2,
        "local_sgd": {"exchange_every": 15},
    }
    options["trainer"] = {"devices": 2, "max_epochs": 1}
    config = make(tmp_path, "run", events=slow, **options)
    codes, output = run(config, tmp_path / "run")
    assert set(codes) == {0}, output
    assert not [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "hang"]


@pytest.mark.slow
def test_a_lost_rank_is_replaced(tmp_path: Path) -> None:
    """From the last exchange on, which all have in local checkpoints."""
    events = [{"at": "train", "step": 24, "rank": 1}]
    local = {"every_n_train_steps": 1, "dir": str(tmp_path / "local")}
    options = {**OPTIONS, "callbacks": ["auto_resume", "local_checkpoint", "local_sgd"], "local": local}
    config, output = launched(tmp_path, 2, events, **{**options, "step_s": 0.02})
    assert replaced(config) == [[1]], output


def test_a_bad_step_is_skipped_by_its_rank_alone(tmp_path: Path) -> None:
    options = {**OPTIONS, "callbacks": ["auto_resume", "nan_guard", "local_sgd"]}
    config = make(tmp_path, "run", spoils=[{"step": 7, "rank": 1, "what": "loss"}], **options)
    codes, output = run(config, tmp_path / "run")
    assert set(codes) == {0}, output
    bad = [each for each in read_ledger(RunDirectory(config["run_dir"]).ledger) if each["event"] == "bad_step"]
    assert [(each["rank"], each["step"], each["skipped"]) for each in bad] == [(1, 7, True)]
    assert result(config) != result(reference(**OPTIONS))
    assert len({Path(f"{config['out']}.{rank}").read_text() for rank in range(2)}) == 1


@pytest.mark.slow
def test_bad_steps_of_one_rank_roll_all_back(tmp_path: Path) -> None:
    options = {**OPTIONS, "callbacks": ["auto_resume", "nan_guard", "local_sgd"], "nan_guard": {"max_consecutive": 2}}
    spoils = [{"step": 22, "until": 25, "rank": 1, "what": "gradient", "times": 3}]
    config = make(tmp_path, "run", spoils=spoils, **options)
    codes, output = run(config, tmp_path / "run")
    assert set(codes) == {0}, output
    assert "Rolled back to the last good checkpoint" in output
    ledger = list(read_ledger(RunDirectory(config["run_dir"]).ledger))
    assert [each["step"] for each in ledger if each["event"] == "went_back"] == [21], output
    for rank in range(2):
        batches = [step for _, step, _ in map(json.loads, Path(f"{config['log']}.{rank}").read_text().splitlines())]
        assert batches.count(21) > 1 == batches.count(22) == batches.count(23), "the bad batches are left out"
    assert len({Path(f"{config['out']}.{rank}").read_text() for rank in range(2)}) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": L.strategies.DDPStrategy(static_graph=True)}, "static_graph"),
        ({"strategy": L.strategies.DDPStrategy(ddp_comm_hook=lambda *_: None)}, "ddp_comm_hook"),
        ({"strategy": L.strategies.ModelParallelStrategy()}, "ModelParallelStrategy is not plain DDP"),
        ({"strategy": L.strategies.DDPStrategy(mixed_precision=MIXED)}, "mixed_precision"),
        ({"strategy": "ddp"}, None),
        ({}, None),
    ],
)
def test_strategies_that_need_all_gradients(options: dict[str, Any], says: str | None) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, **options)
    problem = lightning_strategies.why_not_apart(trainer)
    assert says in (problem or "") if says is not None else problem is None


class Hooked(Apart):
    def on_fit_start(self) -> None:
        cast(Any, self.trainer.strategy.model).register_comm_hook(None, allreduce_hook)


def train_hooked(rank: int, folder: Path, port: int) -> None:
    as_rank(rank, 1, port)
    with pytest.raises(ValueError, match="LocalSGD: a communication hook of DDP would never be called"):
        fit(folder, Hooked(), strategy="ddp", devices=1)
    (folder / "refused").touch()


def test_a_hook_that_the_module_registers_is_refused(tmp_path: Path) -> None:
    run_ranks(train_hooked, tmp_path, free_port(), count=1)
    assert (tmp_path / "refused").exists()


class Whole(torch.optim.SGD):
    """As one of 8 bits."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for each in self.param_groups[0]["params"]:
            self.state[each]["moment"] = torch.ones(3, dtype=torch.uint8)
        return loss


def test_an_optimizer_of_8_bits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "configure_optimizers", lambda self: Whole(self.net.parameters(), 0.1))
    with pytest.raises(ValueError, match=r"LocalSGD: an optimizer keeps integers \(moment, torch.uint8\)"):
        fit(tmp_path, Apart())


def test_ranks_exchange_what_a_skipped_step_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever order callbacks are given: NaNGuard puts back what the forward pass has changed."""
    order: list[str] = []
    for cls, name in ((NumericsPolicy, "batch_done"), (Exchanges, "before_batch_end")):
        call = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda self, name=name, call=call: (order.append(name), call(self)))
    fit(tmp_path, Apart(), NaNGuard())
    assert order == ["batch_done", "before_batch_end"] * (BATCHES * EPOCHS)


def test_what_still_meets_in_every_step_is_said(tmp_path: Path) -> None:
    timed = ModelCheckpoint(train_time_interval=timedelta(minutes=10))
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[timed, ModelCheckpoint()], max_time="00:01:00:00"
    )
    assert lightning_strategies.meets_in_every_step(trainer) == ["Timer", "ModelCheckpoint(train_time_interval=...)"]


def fit(tmp_path: Path, module: Apart, *callbacks: L.Callback, **options: Any) -> None:
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, callbacks=[LocalSGD(3, DILOCO, tmp_path), *callbacks],
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.cat(batches(0))), 3))


def test_what_cannot_work_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "training_step", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(ValueError, match="rerun needs ranks that train in lockstep"):
        fit(tmp_path, Apart(), NaNGuard(rerun="validate_results"))
    with pytest.raises(
        ValueError, match="LocalSGD: ranks would validate at different steps if val_check_interval is a time"
    ):
        fit(tmp_path, Apart(), val_check_interval="00:00:10:00")
    monkeypatch.setattr(Apart, "configure_optimizers", lambda self: torch.optim.LBFGS(self.net.parameters()))
    with pytest.raises(ValueError, match="LocalSGD: the history that LBFGS keeps"):
        fit(tmp_path, Apart())
    monkeypatch.setattr(lightning_strategies, "why_not_apart", lambda trainer: "it is none of those. Use ddp.")
    with pytest.raises(ValueError, match="LocalSGD: it is none of those"):
        fit(tmp_path, Apart())


def test_one_process_makes_outer_steps_too(tmp_path: Path) -> None:
    module = Apart()
    fit(tmp_path, module)
    for one, other in zip(module.seen, by_hand(1, 3, outer=True)[0]["seen"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=3e-5)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="exchange_every must be at least 1, not 0"):
        LocalSGD(0)
    with pytest.raises(TypeError, match="outer_optimizer must be a function or None"):
        LocalSGD(4, outer_optimizer=0.7)  # type: ignore[arg-type]
