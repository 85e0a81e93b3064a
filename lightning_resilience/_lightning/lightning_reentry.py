"""Entering ``trainer.fit`` a second time in the same process, as a new process would."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from lightning_resilience._lightning.lightning_callbacks import callbacks, callbacks_named
from lightning_resilience._lightning.lightning_loops import reset_loops, reset_progress
from lightning_resilience._lightning.lightning_strategies import name_of
from lightning_resilience._torch import Layers
from lightning_resilience.checkpoint import data_position

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger(__name__)

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_ENVIRONMENTS = (
    "lightning.fabric.plugins.environments.torchelastic",
    "lightning_fabric.plugins.environments.torchelastic",
)
_CPU = torch.device("cpu")
_wrapped: set[str] = set()


def on_run(run: Callable[[Any, Any, Callable[[], Any]], Any]) -> None:
    """Has every Trainer call ``run(trainer, module, call)`` for what it does between the start and the end of a fit.

    ``call`` does that, and may be called again after :func:`leave_fit`. No hook would do: the process group is opened
    before any callback is called, and after an exception callbacks and loggers are notified that the fit has ended.
    """
    for name in _PACKAGES:
        package = sys.modules.get(name)
        if package is None or name in _wrapped or not hasattr(package, "Trainer"):
            continue
        _wrapped.add(name)
        package.Trainer._run = _wrapper(package.Trainer._run, run)


def _wrapper(inner: Callable[..., Any], run: Callable[[Any, Any, Callable[[], Any]], Any]) -> Callable[..., Any]:
    def wrapped(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return run(trainer, model, lambda: inner(trainer, model, *args, **kwargs))

    return wrapped


def accept_fewer_ranks(are_fewer: Callable[[], bool]) -> None:
    """Allows Trainers in which ``devices`` times ``num_nodes`` is not the number of ranks.

    Args:
        are_fewer: Whether ranks are absent; if not, Lightning checks the number as usual.
    """
    for name in _ENVIRONMENTS:
        module = sys.modules.get(name)
        if module is None or name in _wrapped:
            continue
        _wrapped.add(name)
        environment: Any = module.TorchElasticEnvironment
        environment.validate_settings = _validation(environment.validate_settings, are_fewer)


def _validation(inner: Callable[..., None], are_fewer: Callable[[], bool]) -> Callable[..., None]:
    def validate_settings(environment: Any, num_devices: int, num_nodes: int) -> None:
        if not are_fewer():
            inner(environment, num_devices, num_nodes)

    return validate_settings


def is_fit(trainer: Trainer) -> bool:
    """Whether the Trainer is running a fit."""
    return bool(trainer.state.fn == "fit")


def why_not(trainer: Trainer) -> str | None:
    """Why a fit of this Trainer cannot be entered again; ``None`` if it can."""
    return "ModelPruning has changed layers" if callbacks_named(trainer, "ModelPruning") else None


_SIZES = ("_data_parallel_size", "_tensor_parallel_size")
"""Sizes of the mesh of a ``ModelParallelStrategy``: with fewer ranks there are fewer groups of the same size."""


_devices: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By strategy, the devices of the whole node."""


def take_place(trainer: Trainer, nodes: Sequence[Sequence[int]], node: int) -> None:
    """Has the Trainer take part as one of fewer or more ranks; its rank is in the environment.

    Args:
        trainer: The Trainer.
        nodes: The ranks of every node, in order; each is given as the number of its device in the Trainer.
        node: The number of this node.
    """
    strategy: Any = trainer.strategy
    here, its = nodes[node], vars(strategy)
    sizes = [its.get(name) for name in _SIZES]
    if all(type(size) is int for size in sizes):  # otherwise Lightning finds them, which it does once
        ranks = sum(map(len, nodes))
        its.update(zip(_SIZES, (ranks // sizes[1], sizes[1]), strict=True))
    all_devices = _devices.setdefault(strategy, getattr(strategy, "parallel_devices", None))
    if all_devices is None or max(here) >= len(all_devices):
        return
    devices, strategy.num_nodes = [all_devices[place] for place in here], len(nodes)
    if len({len(each) for each in nodes}) > 1:
        # Lightning does not support nodes with different numbers of ranks: it multiplies to get their total.
        devices += [devices[-1]] * (sum(map(len, nodes)) - len(here))
        strategy.num_nodes = 1
    strategy.parallel_devices = devices


class Start:
    """The state at the start of a fit that the fit may change and no checkpoint has; a new process begins with it.

    Lightning's callbacks change their own attributes, attributes of the Trainer, and which parameters are trained.
    Random numbers that are drawn before the training are drawn again. Attributes of the script's own callbacks and of
    the module are left unchanged.

    Args:
        trainer: The Trainer of the fit.
        module: The module of the fit.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._random_state = data_position.get_random_state(_CPU)  # asking a device for its state would initialize it
        self._layers = Layers(module) if name_of(trainer.strategy) == "ModelParallelStrategy" else None
        # Layers that are made later may be frozen when they are made.
        self._trained = [(each, each.requires_grad) for each in module.parameters()]
        self._modes = [(each, each.training) for each in module.modules()]
        self._types = {name: each.dtype for name, each in (*module.named_parameters(), *module.named_buffers())}
        self._forward = {name: value for name, value in vars(module).items() if name == "forward"}  # the script's own
        self._limits = trainer.fit_loop.max_epochs, trainer.accumulate_grad_batches
        self._attributes = [(each, _copy_of(vars(each))) for each in callbacks(trainer) if _is_lightnings(each)]

    def put_back(self) -> None:
        """Restores the state at the start of the fit."""
        if self._layers is not None:
            self._layers.put_back()
        for each in callbacks_named(self._trainer, "StochasticWeightAveraging"):
            each.reset_momenta()  # of layers
        for callback, attributes in self._attributes:
            vars(callback).clear()
            vars(callback).update(_copy_of(attributes))
        vars(self._trainer.lightning_module).update(self._forward)
        self._trainer.fit_loop.max_epochs, self._trainer.accumulate_grad_batches = self._limits
        self._trainer.fit_loop._skip_backward = False
        for parameter, is_trained in self._trained:
            if parameter.requires_grad != is_trained:  # a lazy parameter refuses the call
                parameter.requires_grad_(is_trained)
        for layer, is_training in self._modes:
            layer.training = is_training
        self._put_back_types()
        data_position.set_random_state(self._random_state, _CPU)
        data_position.begin_again(self._trainer.strategy.root_device)

    def _put_back_types(self) -> None:
        """Restores the module's first types, which identify it: a precision such as 64-true has converted it."""
        module = self._trainer.lightning_module
        for name, parameter in module.named_parameters():
            if (dtype := self._types.get(name, parameter.dtype)) != parameter.dtype:
                parameter.data = parameter.data.to(dtype)
        for prefix, layer in module.named_modules():
            for key, buffer in layer._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is not None and (dtype := self._types.get(name, buffer.dtype)) != buffer.dtype:
                    layer._buffers[key] = buffer.to(dtype)


def _is_lightnings(callback: Any) -> bool:
    bases = [cls for cls in type(callback).__mro__ if cls.__module__.startswith(_PACKAGES)]
    return any(cls.__name__ != "Callback" for cls in bases)


def _copy_of(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: copy(value) if type(value) in (dict, list, set) else value for name, value in attributes.items()}


def leave_fit(trainer: Trainer, start: Start) -> None:
    """Resets a Trainer after its fit has failed: to the state in which ``fit`` began.

    Calls ``teardown`` of callbacks, module and data module, since their ``setup`` will be called. Loggers continue.
    """
    module = trainer.lightning_module
    # After a forward pass that fails inside of DDP, Lightning's redirection of ``forward`` still exists.
    vars(module).pop("forward", None)
    trainer.training = True  # it may have failed in a validation
    data: Any = vars(trainer).get("datamodule")
    for owner in (data, *callbacks(trainer), module):
        if owner is None:
            continue
        try:
            if owner is module or owner is data:
                owner.teardown(stage="fit")
            else:
                owner.teardown(trainer, module, stage="fit")
        except Exception as error:  # such as a collective without the rank that was lost
            log.warning("%s.teardown has failed: %s", type(owner).__name__, error)
    module._metric_attributes = None  # its setup makes them
    trainer.strategy.optimizers = []  # otherwise the teardown copies their state to the host
    with suppress(Exception):
        trainer._teardown()
    trainer.strategy.model = module  # drops the wrapper around the module, and its hooks
    reset_loops(trainer, module)
    reset_progress(trainer)
    trainer.strategy.lr_scheduler_configs = []
    start.put_back()
