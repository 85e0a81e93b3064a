"""The policy of a callback in a fit, as methods that the session calls in a fixed order.

In the order of the callbacks in the Trainer, at these moments:

Start
    ``before_training_data``, ``start``.
Training boundary
    ``on_event`` for every event that is due, the rollback if one has requested it, ``after_batch``, ``at_boundary``,
    ``skips_batch``, ``before_batch``.
Training batch
    ``batch_ready``, ``on_train_batch_start`` of all callbacks, ``batch_begins``, the optimizer step, ``batch_done``,
    ``before_batch_end``, ``on_train_batch_end``.
Evaluation
    ``before_evaluation``; with each batch ``on_event``.
End of an epoch
    ``at_end_of_epoch``.
Save
    ``before_save``, ``check_state``, ``digest``, the write, ``after_save``.
Rollback
    ``before_rollback``, loading of the older checkpoint, ``after_rollback``.
Loss of a rank that is replaced
    ``settle_saves``, ``save_after_loss``, ``leave``, ``left``.
Failure
    ``on_raised``, ``on_exception`` of the callbacks before ours, ``on_failure``, ``leave``, ``left``.
End
    ``before_end``, the final save, ``after_final_save``, ``on_train_end`` of all callbacks, ``on_event_at_end``,
    ``after_save``, ``leave``, ``left``.

At any time ``on_event_known``, ``hurry``, ``on_record``; at each boundary ``ranks_agree``. ``tests/test_order.py``
holds that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from lightning_resilience.agreement_protocol import Event
    from lightning_resilience.detect.numerics.divergence import Divergence
    from lightning_resilience.run import events

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Stateful(Protocol):
    """State of a rank beside the training, as in ``torch.distributed.checkpoint``."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in types that a safe load reads."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restores it."""


class Participant:
    """The policy of one callback in one fit.

    Only methods that a class implements are called: the others cost a healthy step nothing. All ranks call them in the
    same order, but only methods documented so may use collectives.
    """

    protects_workers = False
    """Whether data-loader workers ignore the signals that stop the run."""

    extra_state_matters = True
    """Whether the training depends on :meth:`extra_state`; else that of a lost rank begins anew."""

    def extra_state(self) -> Mapping[str, Stateful]:
        """State of this rank that every checkpoint holds, by name."""
        return {}

    def before_training_data(self, loaders: list[Any]) -> None:
        """The training data loaders are made, their workers are not started."""

    def start(self) -> None:
        """Training begins, once in a fit. Collectives are allowed."""

    def on_event(self, event: Event) -> None:
        """An event is due on all ranks, at the same boundary. Collectives are allowed."""

    def on_event_at_end(self, event: Event) -> bool:
        """The same when no boundary is left. Returns whether the event was handled."""
        return False

    def on_event_known(self, event: Event) -> None:
        """An event is known, its boundary is still to come; in the agreement's thread."""

    def hurry(self, within_s: float) -> None:
        """The process ends so soon, and a boundary is needed where ranks agree; in the agreement's thread."""

    def on_record(self, event: events.Event) -> None:
        """This rank has recorded an event in the ledger; in any thread. Must not raise."""

    def after_batch(self, window_complete: bool) -> None:
        """A training boundary; ``window_complete``: no accumulated gradients wait for a step."""

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> None:
        """After every ``after_batch``. Collectives are allowed where all ranks decide the same.

        Args:
            step: ``trainer.global_step``.
            may_save: Whether the window is complete and no participant pauses saves.
        """

    def skips_batch(self) -> bool:
        """Whether the training skips the next batch."""
        return False

    def before_batch(self) -> None:
        """Everything at the boundary is done, the next batch is about to be fetched."""

    def batch_ready(self) -> None:
        """The batch is there, on its device."""

    def batch_begins(self) -> None:
        """Forward and backward pass and optimizer steps of the batch are next."""

    def batch_done(self) -> None:
        """They have been made; before any hook of the batch's end."""

    def before_batch_end(self) -> None:
        """After every ``batch_done``. Collectives are allowed where all ranks decide the same."""

    def ranks_agree(self) -> bool:
        """Whether all ranks hold the same at this boundary, as they do where gradients are reduced in every step."""
        return True

    def before_evaluation(self) -> None:
        """A validation within the fit begins. Collectives are allowed."""

    def at_end_of_epoch(self) -> None:
        """After the last batch of an epoch, before any hook of its end. Collectives are allowed."""

    def before_save(self) -> None:
        """A state is about to be saved by all ranks, which may take a while."""

    def check_state(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ``ValueError`` if a state of these tensors must not be saved."""

    def digest(self) -> str:
        """A digest of this rank's replica of the state."""
        return ""

    def pauses_saves(self) -> bool:
        """Whether saves wait, equal on all ranks: the last steps were bad, and older checkpoints must stay."""
        return False

    def looks_bad(self) -> bool:
        """Whether the last steps of this rank were bad; waits for pending verdicts."""
        return False

    def after_save(self, is_end: bool) -> None:
        """All ranks have saved together, or the training has ended. Collectives are allowed."""

    def after_final_save(self) -> None:
        """On rank 0, when the final state is saved. It is saved only if a participant implements this."""

    def save_locally(self, reason: str, within_s: float) -> bool:
        """Saves the state to local storage of all nodes at this boundary. Collectives are allowed.

        Returns:
            Whether all ranks have saved.
        """
        return False

    def settle_saves(self, within_s: float) -> bool:
        """A rank was lost: waits for the local save in progress, without the peers; returns whether it has ended."""
        return True

    def save_after_loss(self, generation: str, ranks: Iterable[int], records: bool, within_s: float) -> bool:
        """Saves the state of the last boundary to local storage, without the peers, of which some are lost.

        Args:
            generation: Name of the generation, the same on all ranks.
            ranks: Whose states to save. When it gives the next one, the state of that rank has been put in the place of
                this rank's.
            records: Whether to wait until the other ranks have saved, too, and to record that.
            within_s: How long it may take.

        Returns:
            Whether the states of these ranks are saved; with ``records``, of all.
        """
        return False

    def on_divergence(self, divergence: Divergence) -> None:
        """Replicas differ; on rank 0, in any thread."""

    def blames_replicas(self) -> bool:
        """Whether a differing replica has caused a bad step; called before its rollback. A collective."""
        return False

    def before_rollback(self) -> None:
        """Before all ranks roll back. Collectives are allowed."""

    def after_rollback(self) -> None:
        """After all ranks have rolled back: ``trainer.global_step`` is smaller. Collectives are allowed."""

    def before_end(self) -> bool:
        """Training has ended, its final state is not saved yet. Collectives are allowed.

        Returns:
            Whether this rank has requested an event that must be handled before the final save.
        """
        return False

    def on_raised(self) -> None:
        """An exception has ended training on this rank, before any ``on_exception``. Not for a stop in order."""

    def on_failure(self, exception: BaseException) -> str | None:
        """The fit ends with an exception. Returns why the whole run must halt; ``None``: it need not."""
        return None

    def leave(self) -> None:
        """The fit has ended in any way; called once."""

    def left(self) -> None:
        """Everything of the fit is released."""


class StepCalls(NamedTuple):
    """What every training step calls, by method of :class:`Participant`."""

    after_batch: tuple[Callable[[bool], None], ...]
    at_boundary: tuple[Callable[[int, Callable[[], bool]], None], ...]
    skips_batch: tuple[Callable[[], bool], ...]
    before_batch: tuple[Callable[[], None], ...]
    batch_ready: tuple[Callable[[], None], ...]
    batch_begins: tuple[Callable[[], None], ...]
    batch_done: tuple[Callable[[], None], ...]
    before_batch_end: tuple[Callable[[], None], ...]


class Participants:
    """The participants of a fit, in the order of their callbacks."""

    def __init__(self) -> None:
        self._all: list[Participant] = []
        self._withdrawn: list[Participant] = []
        self._calls: dict[str, tuple[Any, ...]] = {}
        self._step_calls: StepCalls | None = None

    def add(self, participant: Participant) -> None:
        """Adds one."""
        self._all.append(participant)
        self._calls, self._step_calls = {}, None

    def withdraw(self, participant: Participant) -> None:
        """Stops calling one, except for ``leave``, ``left`` and ``extra_state``."""
        self._withdrawn.append(participant)
        self._calls, self._step_calls = {}, None

    def implement(self, method: Callable[Concatenate[Any, _P], _R]) -> tuple[Callable[_P, _R], ...]:
        """The participants' own implementations of a method of :class:`Participant`. For any thread."""
        # If another thread adds a participant meanwhile, the result goes into the old dictionary.
        name, calls = method.__name__, self._calls
        if (found := calls.get(name)) is None:
            active = self._all if name in _UNTIL_THE_END else [p for p in self._all if p not in self._withdrawn]
            found = tuple(getattr(each, name) for each in active if getattr(type(each), name) is not method)
            calls[name] = found
        return found

    def in_step(self) -> StepCalls:
        """The implementations of the methods of a training step, found once. For the main thread."""
        if (calls := self._step_calls) is None:
            calls = self._step_calls = StepCalls(
                self.implement(Participant.after_batch),
                self.implement(Participant.at_boundary),
                self.implement(Participant.skips_batch),
                self.implement(Participant.before_batch),
                self.implement(Participant.batch_ready),
                self.implement(Participant.batch_begins),
                self.implement(Participant.batch_done),
                self.implement(Participant.before_batch_end),
            )
        return calls

    @property
    def train_apart(self) -> bool:
        """Whether there are times at which ranks do not hold the same."""
        return bool(self.implement(Participant.ranks_agree))

    def ranks_agree(self) -> bool:
        """Whether all ranks hold the same now, as they always do unless they train apart."""
        return all(ranks_agree() for ranks_agree in self.implement(Participant.ranks_agree))

    def extra_state(self) -> dict[str, Stateful]:
        """The extra state of all participants."""
        return {name: state for extra in self.implement(Participant.extra_state) for name, state in extra().items()}

    def own_states(self) -> list[str]:
        """The names of the extra states on which the training depends."""
        return [name for each in self._all if each.extra_state_matters for name in each.extra_state()]

    def protect_workers(self) -> bool:
        """Whether any participant protects data-loader workers."""
        return any(each.protects_workers for each in self._all)


_UNTIL_THE_END = ("leave", "left", "extra_state")
