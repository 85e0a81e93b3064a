"""Joining: how callbacks join the session of their Trainer's fit, and where they stay passive."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from lightning_resilience._arguments import changed, shown
from lightning_resilience._files import Patience
from lightning_resilience._lightning import lightning_callbacks, lightning_loops, lightning_strategies
from lightning_resilience.fit import context, outputs, reentry
from lightning_resilience.fit.context import from_rank_0, job, run_dir_of
from lightning_resilience.fit.participant import Participant
from lightning_resilience.fit.session import FitSession
from lightning_resilience.launch.script_errors import WrongWorldSize
from lightning_resilience.run.run_directory import OFF_VARIABLE, RunDirectory, is_turned_off

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from lightning.pytorch import LightningModule, Trainer

_Options = TypeVar("_Options", bound="DataclassInstance")

log = logging.getLogger(__name__)

_active: FitSession | None = None


class SessionCallback(lightning_callbacks.ResilienceCallback):
    """Base of the callbacks that take part in a session: joins it in ``setup`` and forwards its hooks.

    Attributes:
        run_dir: The run directory that the user gave this callback, if any.
    """

    run_dir: str | os.PathLike[str] | None = None
    _same_as: ClassVar[tuple[str, ...]] = ()
    """Names of other packages' callbacks that conflict with this one."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={shown(value)}' for name, value in changed(self).items())})"

    _participant: Participant | None = None

    def _participate(self, session: FitSession) -> Participant | None:
        """Makes the participant of this callback, in the ``setup`` of a fit; ``None`` if this callback is off."""
        raise NotImplementedError

    def _options(self, kind: type[_Options], **more: Any) -> _Options:
        """The options of this callback for its policy: the attributes named like the fields of ``kind``.

        Args:
            kind: A dataclass.
            more: Values of its remaining fields.
        """
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind) if each.name not in more}, **more)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the fit in progress."""
        return {key: value for key, value in vars(self).items() if key != "_participant"}

    def _before_setup(self, trainer: Trainer) -> None:
        """Has Lightning write to the folders of an earlier attempt of this fit."""
        inner = _active is not None and not _active.fit.trainer.interrupted
        if trainer.state.fn != "fit" or inner or _is_passive(trainer) or _obstacle(trainer) is not None:
            return
        _check_worker_count(trainer)

        run = RunDirectory(run_dir_of(trainer, _own_run_dir(trainer)))  # raises on all ranks or on none

        def look() -> outputs.Folders:
            fit = run.fit(context.fits_begun.get(run.path, 0))
            if run.trained_by(job()) is not None:
                return outputs.folders(trainer, None)  # this fit will be refused
            recorded = None
            if fit.path.exists():
                recorded = fit.outputs or {}
                recorded = recorded if recorded.get("run") == run.identity() else {}
            fit.create()
            return outputs.folders(trainer, recorded)

        outputs.reuse(trainer, from_rank_0(trainer, look, Patience()))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Joins the fit's session."""
        if (session := _join(self, trainer, pl_module, stage)) is not None:
            self._participant = self._participate(session)
            if self._participant is not None:
                session.fit.participants.add(self._participant)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the batches of the sanity check boundaries."""
        if session := session_of(trainer, self):
            session.start_sanity_check()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the sanity check."""
        if session := session_of(trainer, self):
            session.end_sanity_check()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes the resume, and starts this callback's participant."""
        if session := session_of(trainer, self):
            session.start()
            if not session.fit.has_rolled_back and self._participant is not None:
                self._participant.start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the session."""
        if session := session_of(trainer, self):
            _end(session, lambda: session.fail(exception))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the session."""
        if session := session_of(trainer, self):
            _end(session, session.leave)


def _end(session: FitSession, end: Callable[[], None]) -> None:
    """Ends a fit and releases it from its callbacks."""
    global _active
    try:
        end()
    finally:
        if session.has_left:
            for member in session.members:
                member._participant = None
            if _active is session:
                _active = None


def _join(callback: SessionCallback, trainer: Trainer, module: LightningModule, stage: str) -> FitSession | None:
    """Has ``callback`` join the session of ``trainer``'s fit, in its ``setup``.

    Returns:
        The session; ``None`` if the callback stays passive: outside of ``fit``, in ``fast_dev_run`` and ``barebones``,
        in the fit of a Tuner's search, in a Trainer inside another Trainer's fit, and if another callback of the same
        class acts in this Trainer.
    """
    global _active
    if stage != "fit" or _is_passive(trainer):
        return None
    kind: type[SessionCallback] = next(cls for cls in type(callback).__mro__ if SessionCallback in cls.__bases__)
    same_kind = [other for other in lightning_callbacks.callbacks(trainer) if isinstance(other, kind)]
    # One acts: the user's last one, since it was added to those of a recipe; without any, the first injected one. There
    # may be several injected ones: a list of callbacks that is reused for a second Trainer still holds the first one's.
    of_user = [other for other in same_kind if not other._injected]
    acts = of_user[-1] if of_user else same_kind[0]
    if callback is not acts:
        if not callback._injected and repr(callback) != repr(acts) and trainer.is_global_zero:
            log.info("Using %r instead of %r, which comes earlier in the list.", acts, callback)
        return None
    if foreign := lightning_callbacks.callbacks_named(trainer, *kind._same_as):
        theirs = f"{type(foreign[0]).__module__}.{type(foreign[0]).__name__}"
        reason = f"{theirs} and {kind.__name__} do the same and would interfere. Remove one of them from the Trainer."
        if not callback._injected:
            raise ValueError(reason)
        if trainer.is_global_zero:
            log.warning("%s %s is off in this fit.", reason, kind.__name__)
        return None
    session = _active if _active is not None and _active.fit.trainer is trainer else None
    if session is None:
        if _active is not None and _active.fit.trainer.interrupted:
            _end(_active, _active.leave)  # another callback has raised in its on_exception, before ours could leave
        if _active is not None:
            return None
        if (obstacle := _obstacle(trainer)) is not None:
            if not callback._injected:
                raise RuntimeError(obstacle)
            if trainer.is_global_zero:  # the script works without an injected callback
                log.warning("%s %s is off in this fit.", obstacle, type(callback).__name__)
            return None
        _check_worker_count(trainer)
        session = FitSession(trainer, module, _own_run_dir(trainer))
        _active = session
    session.members.append(callback)
    return session


def leave_without_peers(trainer: Trainer, lost: Collection[int]) -> None:
    """Leaves the fit of ``trainer``, to continue without the ranks in ``lost``; no effect outside of a fit."""
    session = _active
    if session is None or session.has_left or session.fit.trainer is not trainer:
        return
    session.fit.failing = session.fit.peer_is_lost = True
    if session.last_boundary is not None:
        session.last_boundary.save(lost)
    try:
        _end(session, session.leave)
    except Exception:
        log.debug("The fit is left all the same", exc_info=True)
    session.fit.save_patches.undo()  # no hook that would undo them is called with the exception


def install_reentry() -> None:
    """Has this rank enter its fit again when another rank was lost; does nothing without ``launch --elastic``."""
    reentry.install(leave_without_peers)


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def _is_passive(trainer: Trainer) -> bool:
    if is_turned_off():
        if trainer.is_global_zero:
            _warn_once(f"{OFF_VARIABLE} is set: the callbacks of lightning-resilience are off.")
        return True
    return bool(vars(trainer)["fast_dev_run"]) or trainer.barebones or lightning_callbacks.is_search(trainer)


def _own_run_dir(trainer: Trainer) -> str | os.PathLike[str] | None:
    """The run directory that the user gave the callbacks of ``trainer``."""
    callbacks = lightning_callbacks.callbacks(trainer)
    run_dirs = [own.run_dir for own in callbacks if getattr(own, "run_dir", None) is not None]
    if len({os.path.abspath(os.path.expanduser(path)) for path in run_dirs}) > 1:
        raise ValueError(f"The callbacks of one Trainer must share one run_dir, not {sorted({*map(str, run_dirs)})}.")
    return run_dirs[0] if run_dirs else None


def _obstacle(trainer: Trainer) -> str | None:
    """Why a fit of this Trainer cannot be resumed, and what to do; ``None`` if it can be resumed."""
    if lightning_loops.spawns_processes(trainer):
        return (
            "A fit in spawned processes (ddp_spawn, ddp_fork, ddp_notebook) cannot be resumed: these processes end "
            "with the fit. Use strategy='ddp', or start the script by lightning-resilience launch or torchrun."
        )
    return lightning_strategies.traits_of(trainer.strategy).refused


def _check_worker_count(trainer: Trainer) -> None:
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else trainer.world_size
    if launched != trainer.world_size:
        raise WrongWorldSize(
            f"{launched} workers were started, but this Trainer has {trainer.world_size}. Pass the same numbers to "
            "Trainer(devices=, num_nodes=) and to the launcher (--nproc-per-node, --nnodes)."
        )


def report_progress() -> None:
    """Reports progress of a fit from code of yours that takes long between two batches.

    Examples are an export, or an evaluation in a loop of your own: without a report for longer than the
    ``out_of_section`` timeout, the fit counts as hung. Batches of another Trainer are reports too. Does nothing outside
    of a watched fit.
    """
    if _active is not None:
        _active.fit.advanced()


def session_of(trainer: Trainer, callback: SessionCallback) -> FitSession | None:
    """The session that ``callback`` has joined, if any."""
    session = _active
    if session is None or session.has_left or session.fit.trainer is not trainer or callback not in session.members:
        return None
    return session
