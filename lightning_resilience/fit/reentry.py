"""``launch --elastic`` in a rank: when another rank was lost, this rank leaves its fit and enters it again.

The replacement of a lost rank runs the script from its first line. The other ranks keep their processes: they leave
``trainer.fit``, wait in Lightning's own ``init_process_group`` for the replacement, and begin the fit together with it.
So the start of a fit is the same for all ranks, and everything that belongs to one start (token, stores, agreement,
watchdog, local saves) is made anew on all of them by the code that a restart runs. All ranks resume from the newest
checkpoint that all of them can verify: the one of the last boundary, if it could be saved (:mod:`.last_boundary`).
Nothing is used that a device has computed since its collectives were aborted.

A healthy step only checks whether a loss is known. If ranks of a fit cannot be replaced that way, :func:`why_not`
refuses it, and the loss of a rank restarts all ranks, as without ``--elastic``.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_resilience import signals
from lightning_resilience._lightning import (
    lightning_callbacks,
    lightning_loggers,
    lightning_reentry,
    lightning_strategies,
)
from lightning_resilience._torch import hooks_of
from lightning_resilience.agreement_protocol import Event as AgreedEvent
from lightning_resilience.agreement_protocol import Needs, PeerLost
from lightning_resilience.checkpoint import devices, reduction_order
from lightning_resilience.elastic import stuck
from lightning_resilience.elastic.group import DEFAULT
from lightning_resilience.fit import absent_ranks, context
from lightning_resilience.fit.context import FitContext
from lightning_resilience.fit.last_boundary import RANKS_CHANGE
from lightning_resilience.fit.participant import Participant
from lightning_resilience.launch import membership, park
from lightning_resilience.launch.membership import Membership, Replacement
from lightning_resilience.run import exit_codes, time_account
from lightning_resilience.run.deadlines import DEVICE_ANSWERS_WITHIN_S, ENDED_WITHIN_S, LOSS_CONFIRMED_WITHIN_S
from lightning_resilience.run.events import Event, RestoredInPlace, Resumed, Saved
from lightning_resilience.run.run_directory import REPLACES_STRAGGLERS_VARIABLE

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_resilience.fit.session import FitSession

log = logging.getLogger(__name__)

_POLL_S = 0.5

_hooks_at_first: WeakKeyDictionary[LightningModule, Counter[str]] = WeakKeyDictionary()
"""By module, the hooks that it had when the loops of its fit first began in this process."""

_runs: list[bool] = []
"""For every run of a Trainer that this process has begun, whether it has ended."""


def install(leave_session: Callable[[Trainer, Collection[int]], None]) -> None:
    """Has this rank take part in replacements, once in a process; does nothing without ``launch --elastic``.

    Args:
        leave_session: Leaves the session of a Trainer's fit without its peers; given the ranks that do not continue.
    """
    if (line := membership.current()) is not None:
        DEFAULT.install(lambda: line.is_over)
        line.cut = functools.partial(_cut, line)
        lightning_reentry.on_run(functools.partial(_run, leave_session))
        lightning_reentry.accept_fewer_ranks(lambda: line.is_without_some)


def _cut(line: Membership) -> None:
    if (problem := DEFAULT.cut()) is not None:
        line.say("refused", problem)
    elif DEFAULT.may_forget:
        watch = threading.Thread(target=_end_if_stuck, args=(line, line.generation), name="after-a-cut", daemon=True)
        watch.start()


def _end_if_stuck(line: Membership, generation: int) -> None:
    if stuck.waits_for_ever(lambda: line.generation != generation):
        if not line.await_restart(0.0):
            log.warning(
                "This rank ends: gloo has not told it that the connections to the others are closed. It is replaced "
                "like a rank that is lost."
            )
        os._exit(exit_codes.HUNG)


def _run(
    leave_session: Callable[[Trainer, Collection[int]], None],
    trainer: Trainer,
    module: LightningModule,
    call: Callable[[], Any],
) -> Any:
    line = membership.current()
    number = len(_runs)
    is_inner = not all(_runs)
    _runs.append(False)
    try:
        if line is None or is_inner:
            return call()
        if number > 0 or not lightning_reentry.is_fit(trainer):
            _take_part(trainer, line)
            return call()
        with _without_what_is_there():
            start = lightning_reentry.Start(trainer, module)
            return _enter(trainer, call, line, functools.partial(leave_session, trainer), start)
    finally:
        _runs[number] = True


def _take_part(trainer: Trainer, line: Membership) -> None:
    """Has a run that this process cannot enter again take part in the present generation."""
    if line.is_at_door:
        _begin(line, _admission(line), trainer)
    elif line.is_without_some:
        if lightning_reentry.is_fit(trainer) and not line.is_start:  # equal on all ranks
            # No rank could be admitted to this fit before its end.
            line.say("needs_all", "another fit begins, which needs the absent ranks")
            while not line.await_restart(_POLL_S):
                if line.is_stopping or ((listener := signals.installed()) is not None and listener.received):
                    raise signals.Interrupted("interrupted before a fit that needs the absent ranks")
            os._exit(0)
        lightning_reentry.take_place(trainer, line.nodes, line.node)


@contextmanager
def _without_what_is_there() -> Iterator[None]:
    """Has the garbage collector leave out all present objects: to scan all imports takes 0.2 s at a loss."""
    if park.has_frozen or gc.get_freeze_count():  # to count frozen objects takes 30 ms
        yield
        return
    gc.collect()  # what is garbage now would stay until the fit ends
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _enter(
    trainer: Trainer,
    call: Callable[[], Any],
    line: Membership,
    leave_session: Callable[[Collection[int]], None],
    start: lightning_reentry.Start,
) -> Any:
    if line.is_at_door:
        _begin(line, _admission(line), trainer)
    while True:
        if (replacement := line.replacement()) is not None:  # another rank was lost while this one was not in the fit
            _begin(line, replacement, trainer)
        begun = dict(context.fits_begun)
        try:
            return call()
        except Exception as error:
            if (replacement := line.replacement_behind(error)) is None:
                raise
            log.debug("The fit is left for another generation", exc_info=True)
            if not replacement.lost and not isinstance(error, RuntimeError):  # which peers have not caused
                log.warning("Rank %s could not save before the ranks change (%r).", os.environ.get("RANK"), error)
        if replacement.lost and (trainer.is_global_zero or 0 in replacement.lost):
            goes_on = len(replacement.members) < len(line.slots)
            what = f"with {len(replacement.members)} of {len(line.slots)} ranks" if goes_on else "when it is replaced"
            log.info("Lost %s: going on %s.", replacement, what)
        device = trainer.strategy.root_device
        if (problem := devices.why_unusable(device, DEVICE_ANSWERS_WITHIN_S)) is not None:
            _end_refused(line, problem)  # its errors stay, and leaving the fit may wait for it
        leave_session(line.gone(replacement))
        context.fits_begun.clear()
        context.fits_begun.update(begun)
        lightning_reentry.leave_fit(trainer, start)
        DEFAULT.close()
        gc.collect()  # an old group's wrapper that still exists would reduce gradients, too
        devices.release_memory(device)
        _begin(line, replacement, trainer)
        time_account.OF_PROCESS.enter(time_account.RENDEZVOUS)


def _admission(line: Membership) -> Replacement:
    if (replacement := line.await_admission()) is None:
        os._exit(0)
    return replacement


def _begin(line: Membership, replacement: Replacement, trainer: Trainer) -> None:
    while line.slot not in replacement.members:  # its state is incomplete: a lost rank has held a part of it
        line.step_back(replacement)
        replacement = _admission(line)
    line.begin(replacement)
    lightning_reentry.take_place(trainer, line.nodes, line.node)


def _end_refused(line: Membership, problem: str) -> NoReturn:
    """Ends this process, which cannot be part of the next generation: the supervisor restarts all ranks."""
    line.say("refused", problem)
    line.await_restart(ENDED_WITHIN_S)
    os._exit(0)


def why_not(session: FitSession) -> str | None:
    """Why the loss of a rank of this fit restarts all ranks; ``None`` if the rank is replaced."""
    fit, trainer = session.fit, session.fit.trainer
    line = membership.current()
    if trainer.world_size == 1 and (line is None or len(line.slots) == 1):
        return "there is no other rank"
    is_sharded = lightning_strategies.name_of(trainer.strategy) == "ModelParallelStrategy"  # all can use a checkpoint
    if not is_sharded and not lightning_strategies.replicates_state(trainer):
        return f"ranks of {type(trainer.strategy).__name__} do not all have the same state"
    if fit.index > 0 or len(_runs) > 1:
        return "the script has used a Trainer before this fit"
    groups = lightning_strategies.groups_of_mesh(trainer)
    if (reason := DEFAULT.why_not(groups) or lightning_reentry.why_not(trainer)) is not None:
        return reason
    ddp = lightning_strategies.ddp_wrapper(trainer)
    if ddp is not None and reduction_order.keeps_state(ddp):  # it may affect what the hook communicates next
        return "a communication hook of DDP keeps a state, which a replacement would not have"
    if session.selector.local is None and not session.selector.uses_global:
        return "there is neither AutoResume nor LocalCheckpoint to go back to"
    return None


class Replaceability(Participant):
    """Reports to the supervisor whether a lost rank can be replaced without a restart of all ranks.

    Args:
        fit: The fit.

    Attributes:
        why_not: Why it cannot, after :meth:`begin`; ``None`` if it can.
        leaves: Whether all ranks leave the fit at this boundary, since other ranks come back, or some do not continue.
    """

    def __init__(self, fit: FitContext) -> None:
        self._fit = fit
        self._line = membership.current()
        self.leaves = False
        self.why_not: str | None = "launch --elastic has not started it"
        self._ready: dict[str, Any] = {}
        self._judges_data = False
        self._loaders: Sequence[Any] | None = None

    @property
    def is_possible(self) -> bool:
        """Whether this rank has a supervisor that replaces ranks."""
        return self._line is not None

    def begin(self, session: FitSession) -> None:
        """Called when the loops of the fit begin: reports whether ranks of this fit can be replaced."""
        if self._line is None:
            return
        trainer, is_first = self._fit.trainer, self._line.generation == 0
        module, hooks = self._fit.module, hooks_of(self._fit.module)
        before = _hooks_at_first.setdefault(module, hooks)
        if hooks != before:  # it would compute something else than new ranks
            where = min((hooks - before) + (before - hooks)) or type(module).__name__
            _end_refused(self._line, f"entering the fit again has changed how many hooks {where} has")
        asked = trainer.is_global_zero and is_first and REPLACES_STRAGGLERS_VARIABLE in os.environ
        if asked and not lightning_callbacks.callbacks_named(trainer, "StragglerDetection"):
            log.warning("--replace-stragglers replaces nothing: the Trainer has no StragglerDetection.")
        self.why_not = why_not(session)
        if self.why_not is None:
            fewer = absent_ranks.why_not(trainer, len(self._line.slots), some_are_absent=True)
            group = max(1, lightning_strategies.group_size(trainer))
            if any(len(node) % group for node in self._line.nodes):
                # Ranks that continue could lack a part of the state, if all copies of it are on other nodes of a group.
                fewer = fewer or "groups of ranks that share the state out spread over several nodes"
            if session.exact.places != trainer.world_size:
                fewer = fewer or ""  # some ranks are absent, and the data is divided already
            fewer = self._line.why_not_fewer if fewer is None else fewer
            self._judges_data = fewer is None
            self._line.leave_together = self._ask_to_leave  # cut within a step, ranks would do it again
            tasks = lightning_loggers.why_others_cannot_log(trainer)
            self._ready = {"tasks": tasks or "", "group": group}
            self._say_ready(fewer)
            self._judge_data()
            is_gpu = trainer.strategy.root_device.type != "cpu"
            if trainer.is_global_zero and is_first and is_gpu and dist.get_backend() != "gloo":
                log.info("--elastic has not been run with NCCL yet: if a replacement fails, all ranks are restarted.")
            return
        self._line.say("refused", self.why_not)
        if trainer.is_global_zero:
            log.warning("The loss of a rank will restart all ranks: %s.", self.why_not)
            if self._line.is_without_some and session.exact.places == trainer.world_size:
                log.warning(
                    "Only %s of %s ranks are running: this fit does not train on the batches of the others.",
                    trainer.world_size,
                    len(self._line.slots),
                )

    def before_training_data(self, loaders: Sequence[Any]) -> None:
        """Judges whether other ranks can train on the data of a lost rank, which is known only now.

        This is called before :meth:`begin` if the module asks for the number of steps to configure its optimizers.
        """
        self._loaders = loaders
        self._judge_data()

    def _judge_data(self) -> None:
        if self._judges_data and self._loaders is not None and self._line is not None:
            self._judges_data = False
            self._line.why_not_fewer = absent_ranks.why_not_divided(self._fit.trainer, self._loaders) or ""
            self._say_ready(self._line.why_not_fewer)

    def _say_ready(self, fewer: str | None) -> None:
        line = self._line
        assert line is not None
        line.say("ready", fewer=fewer, **self._ready)
        if fewer and line.goes_on and line.generation == 0 and self._fit.rank == 0:
            log.warning("If a rank is lost, the others wait for its replacement: %s.", fewer)

    def _ask_to_leave(self) -> None:
        if self._fit.rank == 0:
            self._fit.agreement.request(RANKS_CHANGE, needs=Needs.CLEAN | Needs.TRAINING)
        else:
            self._fit.agreement.expect()

    def on_event(self, event: AgreedEvent) -> None:
        """Notes that all ranks leave at this boundary, as soon as its state is noted."""
        if event.kind == RANKS_CHANGE:
            self.leaves = True
            if self._line is not None:
                self._line.reach_boundary()

    @property
    def not_in_next(self) -> set[int]:
        """The ranks that leave the fit at this boundary and do not enter it again with the other ranks."""
        line = self._line
        replacement = None if line is None else line.replacement(LOSS_CONFIRMED_WITHIN_S)
        return set() if line is None or replacement is None else line.gone(replacement)

    def check(self) -> None:
        """Called at a boundary: ends the fit if a lost rank has made the results of the device arbitrary.

        Raises:
            PeerLost: An error that counts as the loss of a rank.
        """
        DEFAULT.check_not_aborted()

    def check_members(self) -> None:
        """Called at a boundary whose state is noted: ends the fit if another generation begins.

        A single rank has no peers whose connections would break. If all ranks have agreed to leave, other ranks may
        learn of the next generation before this one.

        Raises:
            PeerLost: An error that counts as the loss of a rank.
        """
        line = self._line
        if line is not None and (line.is_over or (self.leaves and line.replacement(LOSS_CONFIRMED_WITHIN_S))):
            raise PeerLost("the ranks of this run have changed")

    def before_end(self) -> bool:
        """Reports that this rank has trained to the end: no rank needs to come back any more."""
        if self._line is not None and self.why_not is None:
            self._line.say("ready", fewer=self._line.why_not_fewer, has_trained=True, **self._ready)
        return False

    def end(self) -> None:
        """Reports that the loops of the fit have ended."""
        if self._line is not None:
            self._line.leave_together = None
            self._line.say("done")

    def on_record(self, event: Event) -> None:
        """Reports that a state exists from which ranks can resume."""
        if self._line is not None and isinstance(event, (Saved, Resumed, RestoredInPlace)):
            self._line.say_saved()

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error of the fit comes from the loss of a rank that is being replaced."""
        if self._line is None or not isinstance(error, Exception):
            return False
        return self._line.replacement_behind(error) is not None

    def check_has_state(self, has_state: bool) -> None:
        """Ends this process if it enters the fit again and no checkpoint exists: only a new process can begin anew.

        Args:
            has_state: Whether the ranks have found a checkpoint.
        """
        line = self._line
        if has_state or line is None or line.is_start or self._fit.index > 0:
            return  # later fits cannot be entered again
        line.say_saved(is_usable=False)
        _end_refused(line, "no checkpoint that all ranks can verify")
