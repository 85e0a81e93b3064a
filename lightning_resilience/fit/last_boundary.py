"""``launch --elastic``: the state of the last boundary, saved after a rank was lost (just-in-time checkpoint).

With DistributedDataParallel, when a rank dies in a forward or backward pass, the other ranks still have the parameters
and optimizer states of the last boundary. So the survivors save them to local storage before they leave the fit. The
survivors and the replacement resume from there, and only the interrupted step is done again. The same holds for
replicas of FSDP2's shards: of the ranks that hold the same shard, one that continues saves it. A rank that has lost
another rank of its group does not continue; the other ranks save for it as for a lost rank. So no rank continues before
everything is saved.

What else a step changes is noted at each boundary (:mod:`.lightning_boundary`) and put back before the save. What only
the lost rank knew, it has left in node memory (:mod:`.own_part`). A survivor restores these values instead of its own
and also saves under the number of the lost rank. A process that takes places of absent ranks leaves an own part for
each place, so that its training for them is not lost with it.

Survivors may differ by a step: one has ended its reduction, which failed on another. So each survivor writes to node
memory at which boundary it is, and waits until the other survivors have done the same. The ranks at the oldest boundary
save: they have its parameters, and the values that the other ranks had there lie in node memory. The generation has the
same name on all of them. If one of them does not save, the generation is incomplete, and all ranks resume from an older
one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_resilience._files import publish, read_json, write_json
from lightning_resilience._lightning import (
    lightning_boundary,
    lightning_loggers,
    lightning_loops,
    lightning_strategies,
)
from lightning_resilience._torch import before_update
from lightning_resilience.checkpoint.digest import digest_of
from lightning_resilience.checkpoint.generations import RankLocation
from lightning_resilience.checkpoint.safe_serialization import from_safe, to_safe
from lightning_resilience.elastic.own_part import (
    ForeignFile,
    GivenState,
    OwnPart,
    OwnPartWriter,
    path_of,
    read_own_parts,
)
from lightning_resilience.elastic.own_rows import RowsWriter, read_rows
from lightning_resilience.fit.exact_state import LOGS
from lightning_resilience.fit.logger_files import LogPosition
from lightning_resilience.fit.own_values import OwnValues, StateUnknown
from lightning_resilience.fit.participant import Participant
from lightning_resilience.launch import membership
from lightning_resilience.run.deadlines import (
    LAST_BOUNDARY_SAVED_WITHIN_S,
    SAVED_TOGETHER_WITHIN_S,
    SURVIVORS_FOUND_WITHIN_S,
)

if TYPE_CHECKING:
    from lightning_resilience.fit.session import FitSession

log = logging.getLogger(__name__)

RANKS_CHANGE = "the ranks change"
"""Why all ranks leave the fit at the same boundary: other ranks come back, or some leave with their node."""

_VERSION = operator.attrgetter("_version")
_MOST_DIGESTED_BYTES = 64 << 20
"""How many bytes are hashed once an epoch, at most."""


class _GoneOn(StateUnknown):
    """This rank has left the last boundary, and is not yet at the next one."""


class _Standing(NamedTuple):
    """At which boundary a survivor is after a loss.

    Attributes:
        position: The position of its boundary; ``None`` if it has left the last one.
        refusal: Why no state may be saved; empty if it may be saved.
    """

    position: int | None
    refusal: str = ""


class _Note(NamedTuple):
    """The values at a boundary of everything that a step may change.

    Attributes:
        position: The position of the boundary.
        changed: The values that are put back; see :func:`.lightning_boundary.changed_by_step`.
        unchanged: The values that must not have changed.
        versions: How often torch has counted writes to each parameter.
        groups: The settings of the optimizer.
        logs: How far the loggers have logged.
        absent: By rank, the states that only the absent ranks whose places this process takes would know.
    """

    position: int
    changed: list[Any]
    unchanged: list[Any]
    versions: list[int]
    groups: list[dict[str, Any]]
    logs: list[LogPosition]
    absent: dict[int, dict[str, Any]]


class LastBoundary(Participant):
    """Notes the state of each boundary, and saves it after a loss.

    Args:
        session: The fit.

    Attributes:
        notes_early: Whether :meth:`before_save` notes the state, once: this rank is at a boundary where no gradients
            are accumulated, and has not left it.
    """

    def __init__(self, session: FitSession) -> None:
        self.notes_early = False
        self._session = session
        self._off: str | None = None
        self._saved_at: int | None = None
        self._is_clean = False
        self._note: _Note | None = None
        self._group = 1
        self._step_has_begun = False
        self._writer: OwnPartWriter | None = None
        self._of_absent: dict[int, tuple[OwnPartWriter, GivenState]] = {}
        self._rows: RowsWriter | None = None
        self._values: OwnValues | None = None
        self._begun: tuple[Any, Any] | None = None
        self._begun_at = self._epochs = 0
        self._constants = ""
        self._modes: dict[str, Any] = {}
        self._hook = register_optimizer_step_pre_hook(lambda _, args, kwargs: before_update(self._begin, args, kwargs))

    def _begin(self) -> None:
        """Notes that an optimizer begins to change parameters."""
        self._step_has_begun = True

    # -- every boundary ------------------------------------------------------------------------------------------------

    def after_batch(self, window_complete: bool) -> None:
        """Notes whether gradients are accumulated over this boundary."""
        self._is_clean = window_complete

    def before_save(self) -> None:
        """Notes the state of this boundary early: otherwise it would be unknown for a rank that is lost in a save."""
        if self.notes_early:
            self.notes_early = False
            self._keep_if_possible()

    def before_batch(self) -> None:
        """Notes the state of this boundary."""
        if self._is_clean:
            self._keep_if_possible()

    def _keep_if_possible(self) -> None:
        if self._off is not None:
            return
        try:
            self._keep()
        except (StateUnknown, OSError, NotImplementedError) as error:
            self._turn_off(str(error))
        except Exception as error:
            log.debug("The state of the boundary cannot be kept", exc_info=True)
            self._turn_off(repr(error))

    def _turn_off(self, reason: str) -> None:
        self._off, self._note = reason, None
        self._hook.remove()
        self._session.fit.participants.withdraw(self)
        if self._session.fit.rank == 0:
            log.info(
                "After the loss of a rank all will go back to the last checkpoint, not to the last step: %s.", reason
            )

    def _keep(self) -> None:
        session = self._session
        position, exact = session.fit.steps_counted, session.exact
        if self._writer is None:
            self._set_up()
        logs = [] if exact.logs is None else exact.logs.position()
        if self._rows is not None and exact.logs is not None:
            self._rows.put(exact.logs.new_rows(), all(each.written == each.logged for each in logs))
        if session.exact.epoch_begun is not self._begun or self._has_new_metrics():
            self._arrange(position)
        absent = exact.absent_states
        try:
            self._put(position, logs, absent)
        except (ValueError, RuntimeError, AttributeError, TypeError, KeyError, struct.error):  # they have changed
            self._arrange(position)
            self._put(position, logs, absent)
        self._step_has_begun = False
        self._note = _Note(
            position,
            [owner[key] for owner, key in self._changed],
            [owner[key] for owner, key in self._unchanged],
            [*map(_VERSION, self._parameters)],
            [group.copy() for group in self._optimizer.param_groups],
            logs,
            {rank: each.copy() for rank, each in absent.items()} if self._of_absent else {},
        )

    def _has_new_metrics(self) -> bool:
        names = lightning_boundary.names_of_metrics(self._session.fit.trainer)
        return self._values is None or names != self._values.names

    def _put(self, position: int, logs: Sequence[LogPosition], states_of_absent: Mapping[int, dict[str, Any]]) -> None:
        assert self._values is not None
        assert self._writer is not None
        for rank, (writer, state) in self._of_absent.items():
            absent = states_of_absent[rank]
            state.set(absent["now"])
            writer.put(position, 0, *self._values.read_absent(absent["worker_states"]))
        known = logs if self._rows is not None else []
        worker_states = self._session.exact.worker_states
        self._writer.put(position, self._values.layout, *self._values.read(self._begun_at, worker_states, known))

    def _arrange(self, position: int) -> None:
        """Finds out which metrics and buffers exist, and opens files that are large enough."""
        self._values = OwnValues(self._session)
        if self._writer is None or self._values.size > self._room:
            self._open(self._values.size)
        if self._of_absent.keys() != self._session.exact.absent_states.keys():
            self._close_absent()
            size = self._values.size_of_absent
            self._of_absent = {rank: self._opened(rank, size) for rank in self._session.exact.absent_states}
        if self._session.exact.epoch_begun is not self._begun:
            self._begin_epoch(position)

    def _set_up(self) -> None:
        session = self._session
        trainer, module = session.fit.trainer, session.fit.module
        if session.selector.local is None:
            raise StateUnknown("there is no LocalCheckpoint")
        if not session.selector.local.store.in_memory:
            raise StateUnknown("local checkpoints are not in node memory")
        if trainer.strategy.root_device.type != "cpu":
            raise StateUnknown(
                f"what has happened on {trainer.strategy.root_device} by the time of a loss is not known"
            )
        self._group = lightning_strategies.group_size(trainer)
        if self._group < 2 and not lightning_strategies.replicates_state(trainer):
            raise StateUnknown("ranks hold different parameters")
        if session.fit.participants.train_apart:
            raise StateUnknown("ranks train apart, and agree only where they exchange")
        if (reason := lightning_boundary.why_state_is_unknown(trainer, module)) is not None:
            raise StateUnknown(reason)
        if session.exact.has_generators():
            raise StateUnknown("a data loader has a random generator of its own")
        if own := session.fit.participants.own_states():
            raise StateUnknown(f"ranks hold different states of {', '.join(own)}")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._changed = lightning_boundary.changed_by_step(trainer)
        self._unchanged = lightning_boundary.unchanged_by_step(trainer)
        self._parameters: list[torch.Tensor] = list(module.parameters())
        if self._group > 1:
            frozen = [each for each in self._parameters if not each.requires_grad]
            self._parameters = [*lightning_strategies.trained_parameters(trainer), *frozen]
        self._optimizer: Any = trainer.optimizers[0]
        self._begun = None
        loggers = lightning_loggers.file_loggers(trainer)
        if session.exact.logs is not None and loggers and lightning_loggers.are_lightnings_own(loggers):
            self._rows = RowsWriter(self._rows_path(0), session.fit.nonce, session.exact.logs.follow_rows())
        self._arrange(session.fit.steps_counted)

    def _open(self, size: int) -> None:
        if self._writer is not None:
            self._writer.close()
        self._room = 4096 + 2 * size
        self._writer = OwnPartWriter(self._path(self._session.fit.rank), self._session.fit.nonce, self._room)

    def _opened(self, absent: int, size: int) -> tuple[OwnPartWriter, GivenState]:
        state = GivenState()
        return OwnPartWriter(self._path(absent), self._session.fit.nonce, size, state), state

    def _close_absent(self) -> None:
        for writer, _ in self._of_absent.values():
            writer.close()
        self._of_absent = {}

    @property
    def _folder(self) -> Path:
        assert self._session.selector.local is not None
        return self._session.selector.local.store.directory / "own"

    def _path(self, rank: int) -> Path:
        return path_of(self._folder, rank)

    def _rows_path(self, rank: int) -> Path:
        return self._path(rank).with_suffix(".rows")

    def _begin_epoch(self, position: int) -> None:
        """Keeps what stays the same until the next epoch."""
        session = self._session
        fit = session.fit
        self._modes = lightning_loops.train_eval_modes(fit.trainer, fit.module)
        self._constants = self._digest()
        epoch, first_batch = self._begun = session.exact.epoch_begun
        absent = {
            str(rank): {key: each[key] for key in ("epoch", "first_batch", "kept")}
            for rank, each in session.exact.absent_states.items()
        }
        kept = {"epoch": epoch, "first_batch": first_batch, "constants": self._constants, "absent": absent}
        content, missing = to_safe({**kept, "position": position, "token": fit.nonce})
        if missing:
            raise StateUnknown(f"the random state cannot be kept: {missing[0]}")
        self._epochs += 1
        self._begun_at = position
        publish(self._epoch_path(fit.rank, self._epochs), lambda file: torch.save(content, file))

    def _epoch_path(self, rank: int, number: int) -> Path:
        return self._path(rank).with_suffix(f".epoch{number % 2}")

    def _digest(self) -> str:
        """A digest of what no step changes and is too large to copy, and of what ranks do not exchange."""
        assert self._values is not None
        replicated = {id(each) for each in lightning_strategies.replicated_parameters(self._session.fit.trainer)}
        own = [each.detach() for each in self._parameters if self._group == 1 and id(each) not in replicated]
        own += self._values.constants
        if (size := sum(each.nbytes for each in own)) > _MOST_DIGESTED_BYTES:
            raise StateUnknown(f"{size >> 20} MiB of parameters and buffers are not exchanged by the ranks")
        return digest_of(own)

    # -- when no rank was lost -----------------------------------------------------------------------------------------

    def save_together(self, gone: Collection[int]) -> None:
        """Saves when all ranks leave the fit at this boundary, if the state could not be saved after a loss.

        Args:
            gone: The ranks that do not enter the fit again with the other ranks: what they know must leave their nodes.
        """
        fit = self._session.fit
        is_bad = fit.saves_paused or any(each() for each in fit.participants.implement(Participant.looks_bad))
        is_needed, are_bad = zip(*fit.gather((self._off is not None or bool(gone), is_bad)), strict=True)
        if any(is_needed) and not any(are_bad):
            policies = fit.participants.implement(Participant.save_locally)
            saved = [save_locally(RANKS_CHANGE, SAVED_TOGETHER_WITHIN_S, gone) for save_locally in policies]
            if saved and all(saved):
                self._saved_at = fit.steps_counted
                if fit.rank == 0:
                    whom = "stay" if gone else "come back"
                    log.info("Saved step %d for the ranks that %s.", fit.trainer.global_step, whom)
            elif self._saves_in_time() and self._session.saver.save(RANKS_CHANGE) is not None:
                self._saved_at = fit.steps_counted

    def _saves_in_time(self) -> bool:
        """Whether a save to the run directory is likely to take no longer than other ranks may wait; a collective."""
        fit, session = self._session.fit, self._session
        if not session.selector.uses_global:
            return False
        seconds = session.saver.last_save_s() if fit.rank == 0 else None
        return bool(fit.gather(seconds is None or 2 * seconds < SAVED_TOGETHER_WITHIN_S)[0])

    # -- after a loss --------------------------------------------------------------------------------------------------

    def save(self, lost: Collection[int]) -> None:
        """Saves the state of the last boundary, without the ranks that were lost.

        Args:
            lost: The lost ranks, and the ranks that do not continue without them; empty if ranks come back.
        """
        fit = self._session.fit
        everyone = {*range(fit.trainer.world_size)}
        is_first = fit.rank == min(everyone - {*lost}, default=None)
        fit.rank_0_may_go_ahead = True
        try:
            until = time.monotonic() + SURVIVORS_FOUND_WITHIN_S
            if self._saved_at == fit.steps_counted:
                return
            mine = self._leave_word()
            if fit.rank in lost:
                return
            standings = self._standings(mine, lost, until)
            savers, lost_by_now = _savers(standings), _lost_by_now(lost)
            # With several nodes, only a rank on the node of the first survivor is first.
            is_first = fit.rank == savers[0] and min(everyone - lost_by_now) in standings
            if fit.rank in savers:
                when = "after the loss" if lost else "for the ranks that come back"
                self._save(lost_by_now | (standings.keys() - {*savers}), is_first, when)
        except (StateUnknown, OSError, ValueError) as error:
            log.log(logging.INFO if is_first else logging.DEBUG, "Going back to the last checkpoint: %s.", error)
        except Exception:
            log.warning("Going back to the last checkpoint: a later state could not be saved.", exc_info=True)
        finally:
            fit.rank_0_may_go_ahead = False

    def _save(self, absent: Collection[int], is_first: bool, when: str) -> None:
        fit, note, local = self._session.fit, self._note, self._session.selector.local
        assert note is not None
        assert local is not None
        ranks = ranks_to_save(local.locations, absent, fit.rank, self._group)
        name = hashlib.blake2b(f"{fit.nonce} {note.position}".encode(), digest_size=4).hexdigest()
        policies = fit.participants.implement(Participant.save_after_loss)
        with fit.saving():
            saved = [
                each(name, self._put_back(note, ranks), is_first, LAST_BOUNDARY_SAVED_WITHIN_S) for each in policies
            ]
        if not all(saved):
            raise StateUnknown("not all ranks have saved the state of the same boundary")
        if is_first:
            is_all = len({each.node for each in local.locations}) == 1  # what other nodes saved is not known here
            then = ": only the next one is done again" if when == "after the loss" else ""
            log.info("Saved step %d %s%s.", fit.trainer.global_step, when, then if is_all else " on this node")

    def _leave_word(self) -> _Standing:
        """Writes to node memory where this rank is; returns that."""
        fit = self._session.fit
        mine = self._standing(SURVIVORS_FOUND_WITHIN_S)
        if self._session.selector.local is not None:
            with suppress(FileNotFoundError):  # no rank has come to a boundary
                write_json(self._standing_path(fit.rank), {"token": fit.nonce, **mine._asdict()})
        return mine

    def _standings(self, mine: _Standing, lost: Collection[int], until: float) -> dict[int, _Standing]:
        """Where each survivor of this node is, as soon as all of them have written it.

        Ranks that live but do not continue, since they have lost a rank of their group, have the other ranks save for
        them. They may still be on their way to the boundary: this rank waits until they have noted it, or written where
        they are.

        Raises:
            StateUnknown: If a rank refuses, or does not write where it is in time.
        """
        fit, local = self._session.fit, self._session.selector.local
        if mine.refusal or local is None:
            raise StateUnknown(mine.refusal)
        here = {each.rank for each in local.locations if each.node == local.locations[fit.rank].node}
        while True:
            gone = _lost_by_now(lost)
            said = {rank: mine if rank == fit.rank else self._standing_of(rank) for rank in here - _dead(lost)}
            found = {rank: each for rank, each in said.items() if each is not None}
            if refusals := [each.refusal for _, each in sorted(found.items()) if each.refusal]:
                raise StateUnknown(refusals[0])
            missing = said.keys() - found.keys()
            standings = {rank: each for rank, each in found.items() if rank not in gone}
            if missing <= gone and all(self._has_come(rank, _oldest(standings)) for rank in missing):
                return standings
            if time.monotonic() > until:
                raise StateUnknown(f"rank {min(missing)} has not left its step")
            time.sleep(0.002)

    def _has_come(self, rank: int, position: int) -> bool:
        with suppress(StateUnknown):
            return self._part_of(rank, position).position == position
        return False

    def _standing(self, within_s: float) -> _Standing:
        """Where this rank is after a loss."""
        try:
            # A save that ends later would remove older generations of this rank, and what others save for it.
            settled = [each(within_s) for each in self._session.fit.participants.implement(Participant.settle_saves)]
            if not all(settled):
                raise StateUnknown("a local save in progress is stuck")
            return _Standing(self._known().position)
        except _GoneOn:
            return _Standing(None)
        except StateUnknown as error:
            return _Standing(None, str(error))

    def _standing_of(self, rank: int) -> _Standing | None:
        """Where another rank has written that it is; ``None`` if it has not written it yet."""
        left = read_json(self._standing_path(rank))
        if left is None or left["token"] != self._session.fit.nonce:
            return None
        return _Standing(left["position"], left["refusal"])

    def _standing_path(self, rank: int) -> Path:
        return self._path(rank).with_suffix(".standing")

    def _known(self) -> _Note:
        """The note of the last boundary. Raises if its state no longer exists."""
        session, note, values = self._session, self._note, self._values
        fit, exact = session.fit, session.exact
        if note is None or values is None:
            raise StateUnknown(self._off or "there was no boundary yet")
        if self._step_has_begun or note.unchanged != [owner[key] for owner, key in self._unchanged]:
            raise _GoneOn("this rank has gone on from the last boundary")
        if exact.before_evaluation is not None:
            raise _GoneOn("this rank is in a validation")
        if exact.resumed is not None:
            raise StateUnknown("this rank has not resumed yet")
        if note.versions != [each._version for each in self._parameters]:
            raise StateUnknown("the step has written to parameters before the optimizer has")
        if not all(map(_are_same_settings, note.groups, self._optimizer.param_groups)):
            raise StateUnknown("the step has changed settings of the optimizer")
        if self._modes != lightning_loops.train_eval_modes(fit.trainer, fit.module):
            raise StateUnknown("layers were switched between training and evaluation within the epoch")
        if self._constants != self._digest():
            raise StateUnknown("buffers, or parameters that ranks do not exchange, have changed")
        if fit.replicas_differ:  # the survivors' state may be the wrong one
            raise StateUnknown("ranks that should hold the same state do not")
        bad = (looks_bad() for looks_bad in fit.participants.implement(Participant.looks_bad))
        if fit.saves_paused or any(bad):
            raise StateUnknown("the last steps were bad")
        return note

    def _put_back(self, note: _Note, ranks: Collection[int]) -> Iterator[int]:
        """Restores the state of the boundary, for each of these ranks in turn."""
        session, values = self._session, self._values
        assert values is not None
        for (owner, key), value in zip(self._changed, note.changed, strict=True):
            owner[key] = value
        lightning_boundary.forget_new_metrics(session.fit.trainer, values.names)
        if session.exact.logs is not None:
            session.exact.logs.go_back(note.logs)
        for rank in ranks:
            part = self._part_of(rank, note.position)
            begun_at, worker_states, logs = values.write(part)
            if rank == session.fit.rank:
                session.exact.put_back_absent(note.absent)
            else:
                kept = {LOGS: self._logs_of(rank, logs)} if rank == 0 and logs else {}
                epoch = self._epoch_of(rank, begun_at)
                absent = {int(each): {**of, **self._now_of(int(each), note)} for each, of in epoch["absent"].items()}
                session.exact.stand_in(epoch["epoch"], epoch["first_batch"], kept, absent, worker_states)
            part.restore_random_state()
            yield rank

    def _now_of(self, absent: int, note: _Note) -> dict[str, Any]:
        """The random states of an absent rank whose place a lost rank took, and of its data workers."""
        assert self._values is not None
        part = self._part_of(absent, note.position)
        part.restore_random_state()
        states = self._values.worker_states_of_absent(part)
        return {"now": self._session.exact.get_random_state(), "worker_states": states}

    def _part_of(self, rank: int, position: int) -> OwnPart:
        try:
            parts = read_own_parts(self._path(rank), self._session.fit.nonce)
        except (OSError, ForeignFile) as error:
            raise StateUnknown(f"rank {rank} has left nothing ({error})") from None
        found = next((part for part in parts if part.position == position), None)
        if found is None:
            raise StateUnknown(f"rank {rank} was not at the last boundary of the others")
        return found

    def _epoch_of(self, rank: int, begun_at: int) -> dict[str, Any]:
        for number in range(2):
            path = self._epoch_path(rank, number)
            if not path.exists():
                continue
            kept: dict[str, Any] = from_safe(torch.load(path, map_location="cpu", weights_only=True))
            if (kept["token"], kept["position"]) == (self._session.fit.nonce, begun_at):
                if kept["constants"] != self._constants:
                    raise StateUnknown(f"rank {rank} had other buffers")
                return kept
        raise StateUnknown(f"rank {rank} has left no begin of its epoch")

    def _logs_of(self, rank: int, logs: list[LogPosition]) -> dict[str, Any]:
        """The state of a lost rank's logs."""
        if any(math.isnan(each.logged) for each in logs):
            raise StateUnknown(f"rank {rank} has lost rows of its logs")
        try:
            names, rows = read_rows(self._rows_path(rank), self._session.fit.nonce)
            numbers = [range(int(each.written), int(each.logged)) for each in logs]
            unwritten = [[rows[log, number] for number in of_log] for log, of_log in enumerate(numbers)]
            return {name: each.state(of_log) for name, each, of_log in zip(names, logs, unwritten, strict=True)}
        except (OSError, ValueError, KeyError) as error:
            raise StateUnknown(f"rank {rank} has left other rows of its logs ({error!r})") from None

    def leave(self) -> None:
        """Called when the fit has ended."""
        self._hook.remove()
        if self._writer is not None:
            self._writer.close()
            self._writer, self._off = None, "the fit has ended"
        self._close_absent()
        if self._rows is not None:
            self._rows.close()


def ranks_to_save(locations: Sequence[RankLocation], lost: Collection[int], rank: int, group: int = 1) -> list[int]:
    """The ranks whose states ``rank`` saves after a loss: its own; the first one left on a node also saves lost ones.

    Args:
        locations: The locations of all ranks.
        lost: The lost ranks, and the ranks of this node that have left the boundary.
        rank: The rank that saves.
        group: How many ranks hold the state together: then the first one left that holds the same shard saves.

    Raises:
        StateUnknown: If all such ranks of a node were lost: no rank reads what only they knew.
    """
    alike = [(each.node, each.rank % group) for each in locations]
    left = {alike[each.rank] for each in locations if each.rank not in lost}
    if gone := {*alike} - left:
        node, number = min(gone)
        raise StateUnknown(f"no rank is left on {node}" + (f" that holds what rank {number} does" if group > 1 else ""))
    here = [each.rank for each in locations if alike[each.rank] == alike[rank]]
    is_first = rank == min(each for each in here if each not in lost)
    return [rank, *(each for each in here if each in lost and is_first)]


def _lost_by_now(lost: Collection[int]) -> set[int]:
    """The ranks in ``lost``, and the ranks that were lost, or do not continue, since then."""
    line = membership.current()
    replacement = None if line is None else line.replacement()
    return {*lost, *(() if line is None or replacement is None else line.gone(replacement))}


def _dead(lost: Collection[int]) -> set[int]:
    """The ranks that are dead, of those in ``lost`` and of those lost since then."""
    line = membership.current()
    replacement = None if line is None else line.replacement()
    return {*lost} if line is None or replacement is None else line.ranks(replacement.lost)


def _oldest(standings: Mapping[int, _Standing]) -> int:
    """The oldest boundary at which one of these survivors is.

    Raises:
        StateUnknown: If no survivor is at a boundary.
    """
    positions = [each.position for each in standings.values() if each.position is not None]
    if not positions:
        raise StateUnknown("all ranks have gone on from the last boundary")
    return min(positions)


def _savers(standings: Mapping[int, _Standing]) -> list[int]:
    """The survivors that save: those at the oldest boundary. The first of them also saves for the other ranks.

    Args:
        standings: Where each survivor is.

    Raises:
        StateUnknown: If no survivor is at a boundary.
    """
    oldest = _oldest(standings)
    return [rank for rank, each in sorted(standings.items()) if each.position == oldest]


def _are_same_settings(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a parameter group of an optimizer has kept its settings."""
    if before.keys() != now.keys():
        return False
    return all(
        before[key] is now[key] or (not isinstance(now[key], torch.Tensor) and before[key] == now[key])
        for key in before
        if key != "params"
    )
