"""Numbers that went wrong: found, named and undone, without the host waiting for a device."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.aggregation import RunningMean

from lightning_resilience.detect.numerics import numerics
from lightning_resilience.detect.numerics.numerics import (
    ChangingBuffers,
    LateReads,
    SpikeReference,
    Undo,
    all_finite,
    are_finite,
    nonfinite_names,
)

NAN, INF = math.nan, math.inf
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BYTES = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


class NothingRead(TorchDispatchMode):
    """Refuses whatever makes the host wait for a device."""

    READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "nonzero_static", "equal", "masked_select", "_unique2"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"the host reads: {name}"
        if name.startswith("index"):  # how much a mask chooses has to be known
            assert not any(index.dtype is torch.bool for index in args[1] if index is not None), "the host reads: mask"
        if name == "_to_copy" and args[0].device.type != "cpu":
            assert torch.device(kwargs.get("device") or args[0].device).type != "cpu", "the host copies to itself"
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "read",
    [lambda t: t.item(), lambda t: bool(t), lambda t: t.nonzero(), lambda t: torch.ones(2)[t.reshape(1).expand(2)]],
)
def test_a_read_is_refused_here(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="the host reads"), NothingRead():
        read(torch.tensor(True))


@pytest.fixture
def one_rank() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


# Whether everything is finite


@pytest.fixture(params=["cpu", "cuda"])
def on_path_of(request: pytest.FixtureRequest) -> Callable[[Tensor], bool]:
    """What is calculated for tensors of a device, with tensors of the CPU: for their values both are the same."""
    device = torch.device(request.param)
    return lambda tensor: bool(numerics._is_group_finite([torch.zeros(3, dtype=tensor.dtype), tensor], device))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 7, 64, 4099])
def test_one_element_of_any_type_is_found(on_path_of: Callable[[Tensor], bool], dtype: torch.dtype, size: int) -> None:
    largest = torch.finfo(dtype).max
    for rest in (0.0, 1.0, largest, -largest):
        clean = torch.full((size,), rest, dtype=dtype)
        assert on_path_of(clean)
        for place in {0, size // 2, size - 1}:
            for bad in (NAN, INF, -INF):
                tensor = clean.clone()
                tensor[place] = bad
                assert not on_path_of(tensor), (rest, place, bad)


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_numbers_are_finite(dtype: torch.dtype) -> None:
    """A sum or a norm of them would not be."""
    assert all_finite([torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)] * 3)
    assert all_finite([torch.full((1000,), 1e30), torch.full((1000,), 60000.0, dtype=torch.float16)])


@pytest.mark.parametrize("dtype", BYTES)
def test_every_number_of_eight_bits(dtype: torch.dtype) -> None:
    for bits in range(256):
        tensor = torch.tensor([0x38, bits], dtype=torch.uint8).view(dtype)
        number = tensor.to(torch.float64)[1].item()
        assert bool(all_finite([tensor])) == math.isfinite(number), (bits, number)


def test_numbers_of_four_bits_are_finite() -> None:
    assert all_finite([torch.full((4,), 255, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert all_finite([torch.full((5,), complex(largest, -largest), dtype=dtype)])  # its magnitude is infinite
    assert all_finite([torch.full((5,), complex(largest, -largest), dtype=dtype).conj()])
    for bad in (complex(0, NAN), complex(INF, 0), complex(0, -INF)):
        assert not all_finite([torch.tensor([0, bad, 1], dtype=dtype)])
        assert not all_finite([torch.tensor([0, bad, 1], dtype=dtype).conj()])


def sparse(values: list[float]) -> Tensor:
    indices = torch.zeros((1, len(values)), dtype=torch.int64)  # all at the same place: not coalesced
    return torch.sparse_coo_tensor(indices, torch.tensor(values), (5,), check_invariants=True)


ODD = {
    "no dimensions": lambda x: torch.tensor(x),
    "transposed": lambda x: torch.tensor([[1.0, 2.0, 3.0], [4.0, x, 6.0]]).t(),
    "every other": lambda x: torch.tensor([1.0, NAN, x, NAN, 2.0])[::2],
    "channels last": lambda x: torch.full((2, 3, 4, 5), x).contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: torch.tensor([x]).expand(4, 3),
    "overlapping": lambda x: torch.tensor([1.0, x, 2.0]).as_strided((2, 2), (1, 1)),
    "needs a gradient": lambda x: torch.tensor([1.0, x], requires_grad=True) * 2,
    "a parameter": lambda x: nn.Parameter(torch.tensor([1.0, x])),
    "sparse": lambda x: torch.tensor([0.0, 1.0, x]).to_sparse(),
    "sparse, not coalesced": lambda x: sparse([1.0, x, 2.0]),
    "compressed": lambda x: torch.tensor([[0.0, 1.0], [x, 0.0]]).to_sparse_csr(),
}


@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_all_kinds(kind: str) -> None:
    tensors = [ODD[kind](x) for x in (7.0, NAN, INF, -INF)]
    with NothingRead():
        clean, *bad = [all_finite([tensor]) for tensor in tensors]
    assert clean
    assert not any(bad)
    for verdict in (clean, *bad):
        assert (verdict.dtype, verdict.shape, verdict.requires_grad) == (torch.bool, (), False)


def test_what_was_made_for_inference() -> None:
    with torch.inference_mode():
        tensors = [torch.ones(3), torch.tensor([NAN])]
    assert all_finite(tensors[:1])
    assert not all_finite(tensors)


def test_what_cannot_be_bad() -> None:
    whole = [torch.tensor([2**62]), torch.tensor(True), torch.zeros(3, dtype=torch.uint8)]
    hollow = [torch.empty(0), torch.empty(3, 0), torch.full((2,), NAN, device="meta"), torch.empty(0).to_sparse()]
    for tensors in ([], whole, hollow, whole + hollow, [*hollow, torch.ones(2)]):
        verdict = all_finite(iter(tensors))
        assert verdict
        assert (verdict.dtype, verdict.shape, verdict.device.type) == (torch.bool, (), "cpu")
    assert not all_finite([*whole, *hollow, torch.tensor(NAN)])


@pytest.mark.parametrize("place", range(6))
def test_one_of_many(place: int) -> None:
    tensors = [torch.ones(2, dtype=dtype) for dtype in (*FLOATS, torch.complex64, torch.float32)]
    with NothingRead():
        clean = all_finite(tensors)
        tensors[place][1] = NAN
        bad = all_finite(tensor for tensor in tensors)
    assert clean
    assert not bad


@pytest.mark.parametrize("place", range(8))
def test_one_of_many_that_are_grouped_at_once(place: int) -> None:
    tensors = [
        torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64) * 2
    ]
    assert numerics._groups_of_dense(tensors) is not None, "as most gradients are"
    assert all_finite(tensors)
    tensors[place][1] = INF
    assert not all_finite(tensors)
    with NothingRead():
        all_finite(tensors)


@pytest.mark.parametrize("kind", ODD)
def test_what_is_odd_among_many_is_seen(kind: str) -> None:
    many, odd = [torch.ones(2) for _ in range(5)], ODD[kind]
    assert all_finite([*many, odd(1.0)])
    assert not all_finite([*many, odd(NAN)])


def test_the_part_of_a_sharded_tensor(one_rank: Any) -> None:
    clean = distribute_tensor(torch.ones(4, 2), one_rank, [Shard(0)])
    bad = distribute_tensor(torch.tensor([1.0, INF]), one_rank, [Shard(0)])
    with NothingRead():
        verdicts = all_finite([clean]), all_finite([clean, bad])
    assert [type(verdict) for verdict in verdicts] == [Tensor, Tensor]
    assert [bool(verdict) for verdict in verdicts] == [True, False]
    assert nonfinite_names([("a", clean), ("b", bad)]) == ["b (1 of 2 elements: inf)"]


@pytest.mark.parametrize(
    ("devices", "home"),
    [
        (["cuda:0"], "cuda:0"),
        (["cuda:1", "cuda:0"], "cuda:1"),
        (["cuda:1", "cpu"], "cuda:1"),
        (["cpu", "cuda:0", "cuda:1"], "cuda:0"),
        (["meta", "cpu"], "cpu"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.float8_e5m2])
def test_the_verdict_waits_for_no_device(devices: list[str], home: str, dtype: torch.dtype) -> None:
    """Devices that torch only pretends to have: what has to be read from them raises."""
    with FakeTensorMode():
        tensors = [torch.empty(3, dtype=dtype, device=device) for device in devices]
        with NothingRead():
            assert all_finite(tensors).device == torch.device(home)


# Which ones


def test_names_of_what_is_not_finite() -> None:
    weight = torch.ones(32, 32, requires_grad=True)
    with torch.no_grad():
        weight[3, 4:7] = NAN
    named = [
        ("layer.weight", weight),
        ("layer.bias", torch.tensor([1.0, -INF])),
        ("fine", torch.ones(3)),
        ("both", torch.tensor([NAN, INF, -INF, 0.0])),
        ("complex", torch.tensor([complex(NAN, INF), 1.0])),
        ("sparse", sparse([1.0, NAN])),
        ("bytes", torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)),
        ("step", torch.tensor(3)),
    ]
    told = [
        "layer.weight (3 of 1024 elements: nan)",
        "layer.bias (1 of 2 elements: inf)",
        "both (3 of 4 elements: nan, inf)",
        "complex (1 of 2 elements: nan, inf)",
        "sparse (1 of 2 elements: nan)",
        "bytes (1 of 2 elements: nan)",
    ]
    assert nonfinite_names(iter(named), limit=6) == told
    assert nonfinite_names(named) == [*told[:5], "and 1 more"]
    assert nonfinite_names(named, limit=2) == [*told[:2], "and 4 more"]
    assert nonfinite_names(named[2:3]) == []


# Spikes


class MegatronRule:
    """``RerunStateMachine.is_unexpectedly_large``, written down from its description."""

    def __init__(self, factor: float, samples: int) -> None:
        self.factor, self.samples, self.seen = factor, samples, 0
        self.largest = 0.0

    def __call__(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return False
        if self.seen < self.samples:
            self.seen += 1
            self.largest = max(self.largest, abs(loss))
            return False
        return abs(loss) >= self.largest * self.factor


def some_losses(count: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = (torch.randn(count, generator=generator, dtype=torch.float64) * 2).exp().tolist()
    return [
        (NAN, INF, -INF)[index % 3] if index % 11 == 5 else loss * (-1) ** index for index, loss in enumerate(losses)
    ]


def test_the_rule_of_megatron() -> None:
    rule, reference = MegatronRule(1.5, samples=20), SpikeReference(1.5, samples=20)
    flagged = []
    for loss in some_losses(400):
        flagged.append(reference.is_spike(loss))
        assert flagged[-1] == rule(loss)
        reference.observe(loss)
    assert 0 < sum(flagged) < 200
    assert reference.threshold == rule.largest * 1.5


def test_a_running_mean() -> None:
    mean, reference = (
        RunningMean(window=5, nan_strategy="disable").set_dtype(torch.float64),
        SpikeReference(2.0, window=5),
    )
    observed = 0
    for loss in some_losses(60):
        reference.observe(loss)
        if math.isfinite(loss):
            observed += 1
            mean.update(torch.tensor(abs(loss), dtype=torch.float64))
        assert reference.threshold == (INF if observed < 5 else pytest.approx(2 * mean.compute().item(), rel=1e-6))


@pytest.mark.parametrize(("window", "samples"), [(None, 3), (3, 100)])
def test_nothing_is_flagged_before_enough_was_seen(window: int | None, samples: int) -> None:
    reference = SpikeReference(2.0, window, samples)
    for loss in (1.0, NAN, -1.0, INF):
        reference.observe(loss)
        assert reference.threshold == INF
        assert not reference.is_spike(1e300)
    reference.observe(1.0)
    assert reference.threshold == 2.0
    assert [reference.is_spike(loss) for loss in (2.0, -2.0, 1e300)] == [True] * 3
    assert [reference.is_spike(loss) for loss in (1.99, -1.99, 0.0, NAN, INF, -INF)] == [False] * 6


def test_only_the_running_mean_follows_the_training() -> None:
    fixed, running = SpikeReference(2.0, samples=2), SpikeReference(2.0, window=2)
    for loss in (8.0, 4.0, 2.0, 100.0, 1.0, 1.0):
        fixed.observe(loss)
        running.observe(loss)
    assert (fixed.threshold, running.threshold) == (16.0, 2.0)


@pytest.mark.parametrize("window", [None, 2])
def test_of_negative_losses_the_magnitude_counts(window: int | None) -> None:
    reference = SpikeReference(10.0, window, samples=2)
    for loss in (-1.0, 1.0):
        reference.observe(loss)
    assert reference.threshold == 10.0
    assert [reference.is_spike(loss) for loss in (-11.0, 11.0, -9.0)] == [True, True, False]


@pytest.mark.parametrize("window", [None, 2])
def test_zeros_say_nothing(window: int | None) -> None:
    reference = SpikeReference(2.0, window, samples=2)
    for _ in range(5):
        reference.observe(0.0)
    assert not reference.is_spike(0.0)
    assert not reference.is_spike(3.0)
    reference.observe(3.0)
    assert reference.threshold == (6.0 if window is None else 3.0)
    reference.observe(5.0)
    assert reference.threshold == (6.0 if window is None else 8.0)


def test_enormous_losses_raise_nothing() -> None:
    for window in (None, 2):
        reference = SpikeReference(2.0, window, samples=2)
        for _ in range(3):
            reference.observe(1.5e308)
        assert reference.threshold == INF
        assert not reference.is_spike(1.7e308)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cut", [0, 3, 9, 10, 30])
def test_an_interruption_changes_no_threshold(window: int | None, cut: int) -> None:
    losses = some_losses(60, seed=1)
    whole, before, after = (SpikeReference(1.1, window, samples=10) for _ in range(3))
    for loss in losses[:cut]:
        before.observe(loss)
        whole.observe(loss)
    after.observe(1e9)  # forgotten
    after.load_state_dict(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    for loss in losses[cut:]:
        assert after.threshold == whole.threshold
        whole.observe(loss)
        after.observe(loss)
    assert after.threshold == whole.threshold < INF


def test_a_state_of_other_settings() -> None:
    def restored(source: SpikeReference, **settings: Any) -> SpikeReference:
        reference = SpikeReference(**settings)
        reference.load_state_dict(source.state_dict())
        return reference

    fixed, running = SpikeReference(2.0, samples=3), SpikeReference(2.0, window=3)
    for loss in (1.0, 2.0, 6.0):
        fixed.observe(loss)
        running.observe(loss)
    assert restored(fixed, factor=5.0, samples=3).threshold == 30.0
    assert restored(fixed, factor=2.0, samples=2).threshold == 12.0
    assert restored(running, factor=5.0, window=3).threshold == 15.0
    assert restored(running, factor=2.0, window=2).threshold == 8.0  # of the latest
    for anew in (
        restored(fixed, factor=2.0, samples=4),
        restored(running, factor=2.0, window=4),
        restored(running, factor=2.0, samples=1),
        restored(fixed, factor=2.0, window=2),
    ):
        assert anew.threshold == INF
    one_more = restored(running, factor=2.0, window=4)
    one_more.observe(7.0)
    assert one_more.threshold == 8.0


# Tensors get their content back


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.fixture(params=["bool", "tensor", "tensor of one dimension"])
def truth(request: pytest.FixtureRequest) -> Callable[[bool], Tensor | bool]:
    made: dict[str, Callable[[bool], Tensor | bool]] = {"bool": bool, "tensor": torch.tensor}
    return made.get(request.param, lambda value: torch.tensor([value]))


def test_a_bad_batch_leaves_no_trace_in_running_statistics(truth: Callable[[bool], Tensor | bool]) -> None:
    """Torch does not count the writes to a running mean."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True))
    undo = Undo(module.buffers)
    module(torch.randn(2, 3, 8, 8))
    for _ in range(3):
        undo.keep()
        before = [bits(buffer) for buffer in module.buffers()]
        module(torch.full((2, 3, 8, 8), NAN))
        assert not all_finite(module.buffers())
        undo.restore(truth(True))
        assert [bits(buffer) for buffer in module.buffers()] == before
        module(torch.randn(2, 3, 8, 8))
        undo.keep()
        module(torch.randn(2, 3, 8, 8))
        after = [bits(buffer) for buffer in module.buffers()]
        undo.restore(truth(False))
        assert [bits(buffer) for buffer in module.buffers()] == after


@pytest.mark.parametrize(
    "dtype",
    [
        *FLOATS,
        *BYTES,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
    ],
)
def test_every_bit_comes_back(truth: Callable[[bool], Tensor | bool], dtype: torch.dtype) -> None:
    """Also of numbers that are none: signalling ones, with whatever they carry."""
    generator = torch.Generator().manual_seed(3)
    high = 2 if dtype is torch.bool else 256
    first, second = torch.randint(high, (2, 512 * 16), dtype=torch.uint8, generator=generator)
    for special in (first, second) if dtype is not torch.bool else ():
        special[1:64:4], special[2:64:4], special[3:64:4] = 0, 0x80, 0x7F  # float32: NaNs that carry few bits
    for value in (True, False):
        tensor = first.view(dtype).clone()
        undo = Undo(lambda tensor=tensor: [tensor])
        undo.keep()
        tensor.copy_(second.view(dtype))
        undo.restore(truth(value))
        assert bits(tensor) == (first if value else second).tolist()


def test_what_is_put_back_is_not_read() -> None:
    tensors = [torch.zeros(3), torch.tensor(1), nn.Parameter(torch.ones(2, 2)), torch.zeros(4, dtype=torch.bfloat16)]
    undo = Undo(lambda: tensors)
    with NothingRead():
        undo.keep()
        for tensor in tensors:
            tensor.detach().add_(5)
        undo.restore(torch.tensor(False))
        undo.restore(torch.tensor(True))
    assert [tensor.detach().flatten()[0].item() for tensor in tensors] == [0, 1, 1, 0]


def test_a_choice_is_made_where_the_tensor_is() -> None:
    """Devices that torch only pretends to have: reading from them raises."""
    with FakeTensorMode():
        bad = torch.empty((), dtype=torch.bool, device="cuda:0")
        tensors = [torch.empty(2, device="cuda:0"), torch.empty((), device="cuda:1")]
        undo = Undo(lambda: tensors)
        with NothingRead():
            undo.keep()
            undo.restore(bad)
            undo.restore(torch.empty((), dtype=torch.bool))  # a verdict on the CPU
        tensors.append(torch.empty(3))
        undo.keep()
        with pytest.raises(DataDependentOutputException):
            undo.restore(bad)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "no dimensions": lambda: torch.tensor(4.0),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "every other": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.arange(3.0).reshape(1, 3).expand(4, 3),
    "a parameter": lambda: nn.Parameter(torch.arange(3.0)),
    "with a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "sparse": lambda: torch.tensor([0.0, 1.0, 2.0]).to_sparse(),
    "compressed": lambda: torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr(),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts(truth: Callable[[bool], Tensor | bool], kind: str) -> None:
    for value in (True, False):
        tensor = LAYOUTS[kind]()
        before = tensor.detach().to_dense().clone()
        undo = Undo(lambda tensor=tensor: [tensor])
        undo.keep()
        written = numerics.stored_numbers(tensor.detach())
        (written[0] if kind == "expanded" else written).mul_(NAN)
        undo.restore(truth(value))
        now = tensor.detach().to_dense()
        if value or kind == "empty":
            assert torch.equal(now, before)
        else:
            assert now.isnan().any()


def test_more_elements_of_a_sparse_tensor_go_again() -> None:
    tensor = torch.tensor([0.0, 1.0, 0.0]).to_sparse()
    undo = Undo(lambda: [tensor])
    for _ in range(2):
        undo.keep()
        tensor.copy_(torch.tensor([NAN, 2.0, 3.0]).to_sparse())
        undo.restore()
        assert tensor.to_dense().tolist() == [0.0, 1.0, 0.0]


def test_what_was_made_for_inference_can_be_put_back(truth: Callable[[bool], Tensor | bool]) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    undo = Undo(lambda: [tensor])
    undo.keep()
    with torch.inference_mode():
        tensor.fill_(NAN)
    undo.restore(truth(True))
    assert tensor.tolist() == [1.0] * 3


def test_a_sharded_tensor(one_rank: Any, truth: Callable[[bool], Tensor | bool]) -> None:
    tensor = distribute_tensor(torch.arange(4.0), one_rank, [Shard(0)])
    undo = Undo(lambda: [tensor])
    undo.keep()
    tensor.mul_(NAN)
    undo.restore(truth(False))
    assert tensor.to_local().isnan().all()
    undo.restore(truth(True))
    assert tensor.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_has_saved_async_the_back_of_torch() -> None:
    tensor = torch.ones(3)
    undo = Undo(lambda: [tensor])
    for _ in range(2):
        tensor.data.fill_(2.0)
        undo.keep()
        tensor.data.fill_(NAN)
        undo.restore()
        assert tensor.tolist() == [2.0] * 3


def test_replaced_and_exchanged_tensors_are_put_back(truth: Callable[[bool], Tensor | bool]) -> None:
    module = nn.Module()
    for name, value in (("mean", 1.0), ("best", 2.0), ("worst", 3.0)):
        module.register_buffer(name, torch.tensor([value]))
    undo = Undo(module.buffers)
    undo.keep()
    module.mean = module.mean * NAN
    module.best, module.worst = module.worst, module.best
    undo.restore(truth(True))
    assert [buffer.item() for buffer in module.buffers()] == [1.0, 2.0, 3.0]


def test_tensors_that_come_and_go() -> None:
    kept, gone, new = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    tensors = [gone, kept]
    undo = Undo(lambda: tensors)
    undo.restore()
    undo.keep()
    tensors = [new, gone, new, kept]
    kept.fill_(NAN)
    undo.restore()
    assert (kept.item(), new.item()) == (1.0, 3.0)
    tensors = [kept]
    kept.fill_(NAN)
    undo.restore()
    assert kept.item() == 1.0
    undo.keep()


def test_what_became_something_else_is_left_alone() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([5.0])]
    undo = Undo(lambda: tensors)
    undo.keep()
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2).to_sparse()):
        tensors[0] = other
        tensors[1].fill_(NAN)
        undo.restore()
        assert other.to_dense().tolist() == [0.0] * len(other)
        assert tensors[1].item() == 5.0


def test_a_module_that_is_given_another_type() -> None:
    module = nn.Linear(2, 2)
    undo = Undo(module.parameters)
    undo.keep()
    for dtype in (torch.float64, torch.bfloat16):
        weight = module.weight
        module.to(dtype)
        assert module.weight is weight  # with other content
        nn.init.constant_(weight, torch.pi)
        before = bits(weight)
        undo.keep()
        nn.init.constant_(weight, NAN)
        undo.restore()
        assert bits(weight) == before


@pytest.mark.parametrize(
    "other", [torch.ones(1).expand(4), torch.ones(1).expand(2, 4), torch.ones(6), torch.ones(4).double()]
)
def test_a_tensor_that_is_given_other_content(truth: Callable[[bool], Tensor | bool], other: Tensor) -> None:
    """The same object with other memory, as FSDP1 does with buffers."""
    tensor = torch.zeros(1).expand(4)
    undo = Undo(lambda: [tensor])
    undo.keep()
    tensor.data = other.clone() if other.is_contiguous() else other[..., :1].clone().expand(other.shape)
    undo.keep()
    stored = tensor if tensor.is_contiguous() else tensor.data.as_strided((1,), (1,))
    stored.data.fill_(NAN)
    undo.restore(truth(True))
    assert torch.equal(tensor, other)


def test_a_tensor_that_is_given_another_shape(truth: Callable[[bool], Tensor | bool]) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    undo = Undo(lambda: [tensor])
    undo.keep()
    tensor.t_()
    undo.keep()
    tensor.fill_(NAN)
    undo.restore(truth(True))
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3).t())


def test_the_memory_is_used_again() -> None:
    tensors = [torch.ones(100), torch.ones(5, dtype=torch.int64)]
    undo = Undo(lambda: tensors)
    undo.keep()
    memory = [kept.data_ptr() for kept in undo._kept]
    tensors[0] = torch.full((100,), 3.0)
    undo.keep()
    assert [kept.data_ptr() for kept in undo._kept] == memory
    tensors[0].zero_()
    undo.restore()
    assert tensors[0].tolist() == [3.0] * 100


def test_a_graph_from_before_can_be_used_after(truth: Callable[[bool], Tensor | bool]) -> None:
    """Of the first of several steps of a batch, say: what is put back is no write that torch must know of."""
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(8, 4))
    norm.eval()  # now the graph holds the running statistics
    undo = Undo(norm.buffers)
    for value in (False, True):
        undo.keep()
        result = norm(torch.randn(8, 4, requires_grad=True)).sum()
        undo.restore(truth(value))
        result.backward()


class Kernels(TorchDispatchMode):
    """Counts what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.launched += name not in ("detach", "view", "split", "empty", "lift_fresh", "alias")
        return func(*args, **(kwargs or {}))


def test_however_many_tensors_a_few_kernels_are_enough() -> None:
    module = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(50)))
    undo, bad = Undo(module.buffers), torch.tensor(True)
    undo.keep()
    undo.restore(bad)
    with Kernels() as kernels:
        undo.keep()
        undo.restore(bad)
    assert kernels.launched <= 2 * 4  # of numbers and of counts: kept, brought together, chosen, put back


def test_what_was_finite_and_is_not(truth: Callable[[bool], Tensor | bool]) -> None:
    tensors = [torch.tensor([1.0, -INF]), torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor(3)]
    undo = Undo(lambda: tensors)
    assert not undo.invalidated()
    undo.keep()
    assert not undo.invalidated()
    tensors[0][1] = NAN  # it was none before
    assert not undo.invalidated()
    tensors[1][0] = INF
    with NothingRead():
        invalidated = undo.invalidated()
    assert invalidated
    undo.restore(truth(True))
    assert not undo.invalidated()


# Numbers that are read when they are there


class Travelling:
    """Numbers that arrive when a test says so."""

    def __init__(self) -> None:
        self.events: list[Travelling.Event] = []

    class Event:
        def __init__(self) -> None:
            self.arrived = False
            self.waited = False

        def query(self) -> bool:
            return self.arrived

        def synchronize(self) -> None:
            self.arrived = self.waited = True

    def __call__(self, tensor: Tensor) -> tuple[Tensor, Event]:
        self.events.append(self.Event())
        return tensor.clone(), self.events[-1]


@pytest.fixture
def travelling(monkeypatch: pytest.MonkeyPatch) -> Travelling:
    sent = Travelling()
    monkeypatch.setattr(numerics, "_send", sent)
    return sent


@pytest.mark.parametrize(
    ("tensor", "number"),
    [
        (torch.tensor(0.1), torch.tensor(0.1).item()),
        (torch.tensor(0.1, dtype=torch.float64), 0.1),
        (torch.tensor([[2.5]], dtype=torch.bfloat16, requires_grad=True), 2.5),
        (torch.tensor(True), 1.0),
        (torch.tensor(7), 7.0),
    ],
)
def test_numbers_of_the_cpu_are_there_at_once(tensor: Tensor, number: float) -> None:
    reads = LateReads()
    reads.put("loss", tensor)
    tensor.detach().zero_()  # the number is the one that was put
    assert reads.ready() == [("loss", number)]
    assert reads.ready() == reads.drain() == []


def test_numbers_come_in_order_and_nobody_waits(travelling: Travelling) -> None:
    reads = LateReads()
    for tag in range(4):
        reads.put(tag, torch.tensor(float(tag)))
    travelling.events[1].arrived = travelling.events[2].arrived = True
    assert reads.ready() == []
    travelling.events[0].arrived = True
    assert reads.ready() == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert reads.ready() == []
    assert not any(event.waited for event in travelling.events)
    assert reads.drain() == [(3, 3.0)]
    assert [event.waited for event in travelling.events] == [False, False, False, True]


def test_no_more_than_so_many_are_on_their_way(travelling: Travelling) -> None:
    reads = LateReads(limit=2)
    for tag in range(5):
        reads.put(tag, torch.tensor(float(tag)))
        assert [event.waited for event in travelling.events].count(False) <= 2
    assert [event.waited for event in travelling.events] == [True, True, True, False, False]
    assert reads.ready() == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert reads.drain() == [(3, 3.0), (4, 4.0)]


# -- where the host may wait -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 7, 1 << 14, (1 << 14) + 1, 1 << 17])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_the_quick_look_sees_the_same(numel: int, value: float) -> None:
    for place, beside in itertools.product([0, -1], [0, 1, 5]):
        tensors = [torch.full((numel,), 1.0), *(torch.full((3,), 3e38) for _ in range(beside))]
        assert are_finite(tensors), "sums that overflow say nothing"
        tensors[0][place] = value
        assert are_finite(tensors) == bool(all_finite(tensors)) == math.isfinite(value), (place, beside)
        assert are_finite(tensors[::-1]) == math.isfinite(value), (place, beside)


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, dtype=torch.float64), torch.ones(2, 2).to_sparse(), torch.ones(3).half()]
)
def test_the_quick_look_at_what_is_not_plain(tensor: torch.Tensor) -> None:
    assert are_finite([torch.ones(3), tensor])
    assert not are_finite([torch.ones(3), tensor * math.nan])
    assert not are_finite([torch.tensor([math.nan]), tensor])
    assert are_finite([])


def test_the_quick_look_changes_no_bit() -> None:
    tensors = [torch.tensor([1e-42, -0.0, 3e38, 1.0]), torch.randn(7, 5).t(), torch.ones(1).expand(9)]
    before = [tensor.clone() for tensor in tensors]
    assert are_finite(tensors)
    for value in (math.nan, math.inf):
        broken = torch.tensor([1.0, value])
        assert not are_finite([*tensors, broken])
        assert are_finite(tensors), "what was found once is forgotten"
        assert str(broken) == str(torch.tensor([1.0, value]))
    for tensor, held in zip(tensors, before, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.int32), held.contiguous().view(torch.int32))


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.zeros(1 << 17))
        self.register_buffer("book", torch.zeros(1 << 17))
        self.register_buffer("nothing", None)


def test_large_buffers_are_kept_only_if_they_change() -> None:
    module = Layers()
    changing = ChangingBuffers(module)
    for window in range(6):
        changing.look()
        expected = {"running_mean", "running_var", "num_batches_tracked", "book"} | ({"mask"} if window < 3 else set())
        names = {name.split(".")[-1] for name, each in module.named_buffers() if any(each is own for own in changing())}
        assert names == expected, window
        module.book.add_(1)
        module.norm(torch.randn(2, 4))
    module.mask = torch.ones(1 << 17)
    changing.look()
    assert any(each is module.mask for each in changing())
