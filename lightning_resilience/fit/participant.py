"""Participants: the policy of each callback in a fit, as methods that the session calls in a fixed order.

The session calls the participants in the order of their callbacks in the Trainer, at these moments:

Start
    ``before_training_data``, ``start``.
Training boundary
    ``on_event`` for every event that is due, the rollback if an event has requested it, ``after_batch``,
    ``at_boundary``, ``skips_batch``, ``before_batch``.
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

It calls ``on_event_known``, ``hurry`` and ``on_record`` at any time, and ``ranks_agree`` at each boundary.
``tests/test_order.py`` checks this order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from lightning_resilience.agreement_protocol import Event
    from lightning_resilience.detect.numerics.divergence import Divergence
    from lightning_resilience.run import events

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Stateful(Protocol):
    """State of a rank besides the training state, as in ``torch.distributed.checkpoint``."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in types that a safe load reads."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restores the state."""


class Participant:
    """The policy of one callback in one fit.

    Only methods that a class implements are called, so the other methods cost a healthy step nothing. All ranks call
    them in the same order, but only methods whose docstring allows it may use collectives.
    """

    protects_workers = False
    """Whether data-loader workers ignore the signals that stop the run."""

    extra_state_matters = True
    """Whether the training depends on :meth:`extra_state`; if not, the extra state of a lost rank begins anew."""

    def extra_state(self) -> Mapping[str, Stateful]:
        """The state of this rank that every checkpoint holds, by name."""
        return {}

    def before_training_data(self, loaders: list[Any]) -> None:
        """Called when the training data loaders are made and their workers are not started."""

    def start(self) -> None:
        """Called once in a fit, when training begins. Collectives are allowed."""

    def on_event(self, event: Event) -> None:
        """Called when an event is due on all ranks, at the same boundary. Collectives are allowed."""

    def on_event_at_end(self, event: Event) -> bool:
        """:meth:`on_event` when no boundary is left. Returns whether the event was handled."""
        return False

    def on_event_known(self, event: Event) -> None:
        """Called when an event is known, before its boundary is reached; in the agreement's thread."""

    def hurry(self, within_s: float) -> None:
        """Called when the process must end soon and needs a boundary where ranks agree; in the agreement's thread."""

    def on_record(self, event: events.Event) -> None:
        """Called when this rank has recorded an event in the ledger; in any thread. Must not raise."""

    def after_batch(self, window_complete: bool) -> None:
        """Called at a training boundary. ``window_complete``: whether no accumulated gradients wait for a step."""

    def at_boundary(self, step: int, may_save: Callable[[], bool]) -> None:
        """Called after every ``after_batch``. Collectives are allowed if all ranks decide the same.

        Args:
            step: ``trainer.global_step``.
            may_save: Whether the window is complete, the ranks agree and no participant pauses saves.
        """

    def skips_batch(self) -> bool:
        """Whether the training skips the next batch."""
        return False

    def before_batch(self) -> None:
        """Called when everything at the boundary is done, before the next batch is fetched."""

    def batch_ready(self) -> None:
        """Called when the batch is on its device."""

    def batch_begins(self) -> None:
        """Called before the forward pass, the backward pass and the optimizer steps of the batch."""

    def batch_done(self) -> None:
        """Called after the optimizer steps of the batch, before any hook at its end."""

    def before_batch_end(self) -> None:
        """Called after every ``batch_done``. Collectives are allowed if all ranks decide the same."""

    def ranks_agree(self) -> bool:
        """Whether all ranks hold the same state at this boundary, as they do if every step reduces gradients."""
        return True

    def before_evaluation(self) -> None:
        """Called before a validation within the fit. Collectives are allowed."""

    def at_end_of_epoch(self) -> None:
        """Called after the last batch of an epoch, before any hook at its end. Collectives are allowed."""

    def before_save(self) -> None:
        """Called before all ranks save a state, which may take a while."""

    def check_state(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ``ValueError`` if a state with these tensors must not be saved."""

    def digest(self) -> str:
        """A digest of this rank's replica of the state."""
        return ""

    def pauses_saves(self) -> bool:
        """Whether saves wait, equal on all ranks: the last steps were bad, and older checkpoints must be kept."""
        return False

    def looks_bad(self) -> bool:
        """Whether the last steps of this rank were bad; waits for pending verdicts."""
        return False

    def after_save(self, is_end: bool) -> None:
        """Called after all ranks have saved together, or training has ended. Collectives are allowed."""

    def after_final_save(self) -> None:
        """Called on rank 0 after the final state was saved, which happens only if a participant implements this."""

    def save_locally(self, reason: str, within_s: float, gone: Collection[int] = ()) -> bool:
        """Saves the state to local storage of all nodes at this boundary. Collectives are allowed.

        Args:
            reason: Recorded in the ledger.
            within_s: Limit in seconds for the save itself.
            gone: Ranks whose nodes may end: the nodes of the other ranks get what only these nodes have.

        Returns:
            Whether all ranks have saved.
        """
        return False

    def settle_saves(self, within_s: float) -> bool:
        """Waits after a loss for the local save in progress, without the peers; returns whether it has ended."""
        return True

    def save_after_loss(self, generation: str, ranks: Iterable[int], records: bool, within_s: float) -> bool:
        """Saves the state of the last boundary to local storage, without the peers: some of them are lost.

        Args:
            generation: Name of the generation, the same on all ranks.
            ranks: The ranks whose states to save. When this yields a rank, the state of that rank has replaced this
                rank's own.
            records: Whether to wait until the other ranks of this node have also saved, and to record the save.
            within_s: How many seconds the save may take.

        Returns:
            Whether the states of these ranks are saved; with ``records``, those of all ranks of this node.
        """
        return False

    def on_divergence(self, divergence: Divergence) -> None:
        """Called when replicas differ; on rank 0, in any thread."""

    def blames_replicas(self) -> bool:
        """Whether a differing replica has caused a bad step; called before its rollback. A collective."""
        return False

    def before_rollback(self) -> None:
        """Called before all ranks roll back. Collectives are allowed."""

    def after_rollback(self) -> None:
        """Called after all ranks have rolled back: ``trainer.global_step`` is smaller. Collectives are allowed."""

    def before_end(self) -> bool:
        """Called when training has ended and its final state is not saved yet. Collectives are allowed.

        Returns:
            Whether this rank has requested an event that must be handled before the final save.
        """
        return False

    def on_raised(self) -> None:
        """Called when an exception has ended training here, before any ``on_exception``; not for an orderly stop."""

    def on_failure(self, exception: BaseException) -> str | None:
        """Called when the fit ends with an exception. Returns why the whole run must halt; ``None`` if it need not."""
        return None

    def leave(self) -> None:
        """Called once when the fit has ended, in any way."""

    def left(self) -> None:
        """Called when everything of the fit is released."""


class StepCalls(NamedTuple):
    """The calls of every training step, by method of :class:`Participant`."""

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
        """Adds a participant."""
        self._all.append(participant)
        self._calls, self._step_calls = {}, None

    def withdraw(self, participant: Participant) -> None:
        """Stops calling a participant, except for ``leave``, ``left`` and ``extra_state``."""
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
        """Whether there are times at which ranks hold different states."""
        return bool(self.implement(Participant.ranks_agree))

    def ranks_agree(self) -> bool:
        """Whether all ranks hold the same state now, as they always do unless they train independently."""
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
