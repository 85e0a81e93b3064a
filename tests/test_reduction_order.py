"""What of DDP's order of reduction a resume can keep, and what it says where it cannot; see also test_exact_resume."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_resilience.checkpoint.reduction_order import (
    GradientArrivalRecorder,
    inexact_reasons,
    rebuilds_buckets,
    replay_gradient_arrival,
)


@pytest.fixture
def three_ranks() -> Iterator[None]:
    """This process as one of three, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def test_plain_ddp_is_replayed_and_nothing_is_said(three_ranks: None) -> None:
    ddp = DistributedDataParallel(model())
    assert rebuilds_buckets(ddp)
    assert inexact_reasons(ddp) == []


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook])
@pytest.mark.parametrize("has_group", [False, True])
def test_hooks_without_a_state_do_not_make_a_resume_inexact(three_ranks: None, hook: object, has_group: bool) -> None:
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(dist.group.WORLD if has_group else None, hook)
    assert rebuilds_buckets(ddp)
    assert inexact_reasons(ddp) == []


def _hook_of_the_user(state, bucket):  # DDP reads annotations, and takes no names of types
    return default_hooks.allreduce_hook(None, bucket)


def test_a_hook_with_a_state_does_not_see_a_replay(three_ranks: None) -> None:
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    assert not rebuilds_buckets(ddp)
    (reason,) = inexact_reasons(ddp)
    assert "communication hook" in reason


def test_a_hook_of_the_user_may_keep_a_state_elsewhere(three_ranks: None) -> None:
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(None, _hook_of_the_user)
    assert rebuilds_buckets(ddp)
    (reason,) = inexact_reasons(ddp)
    assert "communication hook" in reason


def test_mixed_precision_of_ddp_reduces_other_tensors_than_a_replay_would(three_ranks: None) -> None:
    ddp = DistributedDataParallel(model(), mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16))
    assert not rebuilds_buckets(ddp)
    (reason,) = inexact_reasons(ddp)
    assert "mixed_precision" in reason


def test_a_replay_does_not_touch_gradients_weights_or_hooks(one_rank: None) -> None:
    module = model()
    ddp = DistributedDataParallel(module)
    ddp.device_ids = [0]
    seen: list[torch.Tensor] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    assert replay_gradient_arrival(ddp, ["0.bias", "1.weight", "0.weight", "1.bias"])
    assert not seen
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert ddp.module is module


def test_the_first_of_several_backward_passes_gives_the_order(one_rank: None) -> None:
    ddp = DistributedDataParallel(model())
    recorder = GradientArrivalRecorder(ddp)
    loss = ddp(torch.ones(4, 3)).sum()
    loss.backward(retain_graph=True)
    ddp.reducer._rebuild_buckets()  # as Lightning's manual_backward does
    ddp.reducer.prepare_for_backward([])
    loss.square().backward()
    order = recorder.finish()
    assert order is not None
    assert sorted(order) == sorted(name for name, _ in ddp.module.named_parameters())
