"""Takes one guard of the package away at a time, and sees a test fail: a test that cannot fail guards nothing.

    python -m tests.mutations [--jobs 2] [WORD ...]

Only guards with one of the words in their description are tried; by default all. ``test_mutations.py`` holds that every
text is there.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WITHIN_S = 900


class Guard(NamedTuple):
    """A condition that keeps something from going wrong.

    Attributes:
        what: It sees to.
        file: Below ``lightning_resilience``.
        text: Of the guard; it is there once.
        without: What stands there when the guard is taken away.
        test: That fails then.
    """

    what: str
    file: str
    text: str
    without: str
    test: str


GUARDS = [
    Guard(
        "a module that is restored twice does not write into what it is restored from",
        "checkpoint/at_hand.py",
        "each.clone() if index in self.copied else each",
        "each",
        "tests/test_local_checkpoint.py::test_what_a_rank_has_saved_and_still_has_it_does_not_read[nothing]",
    ),
    Guard(
        "a state that a rank still has is used only as it was saved",
        "checkpoint/at_hand.py",
        'if not replicated_digest.endswith(f"-{digest_of(self.tensors)}"):',
        "if False:",
        "tests/test_local_checkpoint.py::test_what_a_rank_has_saved_and_still_has_it_does_not_read[a parameter]",
    ),
    Guard(
        "what was written to open files is there after a failed worker has ended",
        "launch/worker.py",
        "    flush.start()\n",
        "    return os._exit(1)\n",
        "tests/test_launch.py::test_a_crash_is_restarted_inside_the_job",
    ),
    Guard(
        "a lost connection to storage is no lost peer, for which nobody would wait",
        "fit/session.py",
        "says_peer_is_lost(reason) and not isinstance(exception, OSError)",
        "says_peer_is_lost(reason)",
        "tests/test_participant.py::test_a_failure_says_whether_others_are_to_be_waited_for",
    ),
    Guard(
        "copies on other nodes that are on their way are waited for, though a rank is lost",
        "checkpoint/local.py",
        "if self._replicas is not None or not peer_is_lost:",
        "if not peer_is_lost:",
        "tests/test_local_checkpoint.py::test_who_has_lost_a_peer_ends_no_round_but_publishes_its_own",
    ),
    Guard(
        "restarted ranks are judged before their first step",
        "fit/hang_watch.py",
        '''        """Training begins."""
        self._judge_node()
''',
        '''        """Training begins."""
''',
        "tests/test_fault_tolerance.py::test_a_sick_node_is_named_before_it_joins",
    ),
    Guard(
        "clean removes only the very files that it has listed",
        "launch/cleaning.py",
        "if _seen(path.lstat()) == seen:",
        "if True:",
        "tests/test_clean.py::test_what_has_changed_since_it_was_listed_stays",
    ),
    Guard(
        "clean touches no run that an attempt has taken over meanwhile",
        "launch/cleaning.py",
        "if self.directory.attempt != self.token:",
        "if False:",
        "tests/test_clean.py::test_a_run_in_use_is_not_touched",
    ),
    Guard(
        "clean does not take storage that is not mounted for runs that are gone",
        "checkpoint/local_folders.py",
        "return path if _place(path) == place else None",
        "return path",
        "tests/test_clean.py::test_storage_that_is_not_mounted_is_not_gone",
    ),
    Guard(
        "a checkpoint file whose bytes have changed is not loaded",
        "checkpoint/checkpoint_file.py",
        "if trailer[-_DIGEST_SIZE - len(_CLOSING) :] != hasher.hexdigest().encode() + _CLOSING:",
        "if False:",
        "tests/test_checkpoint_file.py::test_every_flipped_bit_is_noticed",
    ),
    Guard(
        "a checkpoint folder whose marker is damaged is not loaded",
        "checkpoint/checkpoint_file.py",
        "if _digest_of(marker) != digest:",
        "if False:",
        "tests/test_checkpoint_file.py::test_every_flipped_bit_in_a_directory_is_noticed",
    ),
    Guard(
        "a file of a checkpoint folder that has changed is found",
        "checkpoint/checkpoint_file.py",
        "if found != expected[name]:",
        "if False:",
        "tests/test_checkpoint_file.py::test_every_flipped_bit_in_a_directory_is_noticed",
    ),
    Guard(
        "an exchanged file is verified again before it is loaded",
        "checkpoint/checkpoint_file.py",
        "if not verified or verified != _which(file):",
        "if False:",
        "tests/test_checkpoint_file.py::test_what_a_process_has_verified_another_one_loads_without_hashing_it",
    ),
    Guard(
        "a shard whose tensor has changed is not loaded",
        "checkpoint/shard.py",
        "if digest != header.checksums[index]:",
        "if False:",
        "tests/test_shard.py::test_in_whatever_pieces_it_is_read",
    ),
    Guard(
        "a shard whose header has changed is not loaded",
        "checkpoint/shard.py",
        "if _digest(preamble, header, place) != digest:",
        "if False:",
        "tests/test_shard.py::test_the_campaign_depends_on_the_checksums_of_tensors",
    ),
    Guard(
        "a shard of another run is not loaded",
        "checkpoint/shard.py",
        "if foreign := _foreign(found.identity, expected):",
        "if (foreign := _foreign(found.identity, expected)) and False:",
        "tests/test_shard.py::test_a_foreign_shard_is_refused_with_what_is_foreign",
    ),
    Guard(
        "a truncated shard is called truncated",
        "checkpoint/shard.py",
        "if not footer.endswith(_END_MAGIC):",
        "if False:",
        "tests/test_shard.py::test_reasons_say_what_is_wrong",
    ),
    Guard(
        "a state that contains itself is left out",
        "checkpoint/safe_serialization.py",
        "if id(container) in self._open or len(self._open) == _DEEPEST:",
        "if False:",
        "tests/test_safe_serialization.py::test_what_contains_itself_is_left_out",
    ),
    Guard(
        "a tensor that a damaged structure names is checked",
        "checkpoint/safe_serialization.py",
        "if type(index) is not int or not 0 <= index < len(tensors):",
        "if False:",
        "tests/test_safe_serialization.py::test_a_malformed_skeleton_is_a_value_error",
    ),
    Guard(
        "a planted object in DCP's metadata is not made",
        "checkpoint/dcp.py",
        "if (key := (module, name)) not in _RECORDS and key not in _CALLS:",
        "if (key := (module, name)) and False:",
        "tests/test_dcp.py::test_torch_loads_it_without_unpickling_and_is_as_before_afterwards",
    ),
    Guard(
        "a file outside of the checkpoint is not read by DCP's metadata",
        "checkpoint/dcp.py",
        "if Path(name).name != name or not (directory / name).is_file():",
        "if False:",
        "tests/test_dcp.py::test_descriptions_that_lead_elsewhere_are_refused",
    ),
    Guard(
        "a local checkpoint of an abandoned course is not used",
        "checkpoint/recovery.py",
        "elif not is_on_course(forks, each.course, each.step):",
        "elif False:",
        "tests/test_courses.py::test_a_state_of_before_a_rollback_does_not_come_back_from_another_node",
    ),
    Guard(
        "shards that contradict each other are not put together",
        "checkpoint/generations.py",
        "if _COMMON(one) == _COMMON(each):",
        "if True:",
        "tests/test_generations.py::test_parts_that_contradict_each_other_are_not_put_together",
    ),
    Guard(
        "node memory that was cleaned up is claimed anew",
        "checkpoint/node_store.py",
        "if not self._claim.holds():",
        "if False:",
        "tests/test_node_store.py::test_the_folder_is_removed_while_in_use",
    ),
    Guard(
        "the name of a shard cannot lead out of the store",
        "checkpoint/node_store.py",
        "if _SHARD_NAME.fullmatch(name) is None:",
        "if False:",
        "tests/test_node_store.py::test_names_of_parts",
    ),
    Guard(
        "a file exchanged while it was written is not published",
        "checkpoint/node_store.py",
        "if mapped is None or not mapped.is_file(os.fstat(fd)):",
        "if False:",
        "tests/test_node_store.py::test_a_file_that_is_exchanged_while_it_is_written",
    ),
    Guard(
        "a received replica whose bytes differ is refused",
        "checkpoint/replication.py",
        "elif closing.digest != digest:",
        "elif False:",
        "tests/test_replication.py::test_transfer_damaged_on_the_way",
    ),
    Guard(
        "a message of replication that was damaged is refused",
        "checkpoint/replication.py",
        "if magic != _MAGIC or checksum != xxhash.xxh3_64_digest(content[:-_CHECKSUM_SIZE]) or size < -1:",
        "if magic != _MAGIC or size < -1:",
        "tests/test_replication.py::test_a_damaged_message_ends_the_connection",
    ),
    Guard(
        "replicas that do not fit in memory are refused",
        "checkpoint/capacity.py",
        "if memory > available.memory.nbytes:",
        "if False:",
        "tests/test_capacity.py::test_what_is_said",
    ),
    Guard(
        "a tensor that was written while it was copied makes the snapshot bad",
        "checkpoint/snapshot.py",
        "if touched:",
        "if False:",
        "tests/test_snapshot.py::test_each_of_what_shares_memory_is_watched",
    ),
    Guard(
        "no optimizer steps before the copy is there",
        "checkpoint/snapshot.py",
        "if not self._copied.is_set():",
        "if False:",
        "tests/test_snapshot.py::test_the_optimizer_waits_and_forward_and_backward_do_not",
    ),
    Guard(
        "a copied run directory is told from its original",
        "run/run_directory.py",
        "if isinstance(place, dict) and self._is_copy(found, place):",
        "if False:",
        "tests/test_copies.py::test_a_copy_goes_on_from_its_global_checkpoints_and_touches_no_local_ones",
    ),
    Guard(
        "a half-written line of the ledger is read when it is whole",
        "run/ledger.py",
        'if found is None and not line.endswith(b"\\n"):',
        "if False:",
        "tests/test_ledger_simulation.py::test_all_who_read_agree_and_nothing_is_lost",
    ),
    Guard(
        "temporary files of processes that live stay",
        "_files.py",
        "if not is_abandoned(path):",
        "if False:",
        "tests/test_checkpoint_file.py::test_leftovers_of_killed_writers",
    ),
    Guard(
        "storage that does not answer never begins a run anew",
        "fit/checkpoint_selector.py",
        "if unread:",
        "if False:",
        "tests/test_storage_fails.py::test_what_is_unreadable_on_the_node_is_not_lost",
    ),
    Guard(
        "a loss above the threshold is a spike",
        "detect/numerics/numerics.py",
        "return math.isfinite(loss) and abs(loss) >= self.threshold",
        "return False",
        "tests/test_numerics.py::test_the_rule_of_megatron",
    ),
    Guard(
        "the culprit is named only where there is a majority",
        "detect/numerics/divergence.py",
        "if 2 * len(self.groups[0]) <= sum(map(len, self.groups)):",
        "if False:",
        "tests/test_replica_check.py::test_the_majority_names_the_rank",
    ),
    Guard(
        "a rerun on the same device again says nothing",
        "detect/numerics/reruns.py",
        "if suspect.devices != tuple(devices):",
        "if False:",
        "tests/test_reruns.py::test_bad_on_other_devices_too_is_a_correct_result",
    ),
    Guard(
        "a rollback that was planned before the last one is dropped",
        "detect/numerics/rollback_history.py",
        "return last is None or last.step < loaded_step or (window.epoch, window.begin) < (last.epoch, last.begin)",
        "return True",
        "tests/test_rollback_history.py::test_a_state_from_which_the_training_has_come_far_enough_is_not_to_blame",
    ),
    Guard(
        "ranks that wait are no culprits",
        "detect/hangs/verdict.py",
        "if rank in self.waits:",
        "if False:",
        "tests/test_hangs_verdict.py::test_every_kind",
    ),
    Guard(
        "timeouts of another layout are not taken",
        "detect/hangs/timeouts.py",
        "if differences:",
        "if False:",
        "tests/test_timeouts.py::test_another_layout_is_named",
    ),
    Guard(
        "a disk without room fails the health check",
        "detect/health.py",
        "if free < needed_bytes:",
        "if False:",
        "tests/test_health.py::test_too_little_space_says_how_much_there_is_and_how_much_is_needed",
    ),
    Guard(
        "with short steps not every step is timed",
        "detect/stragglers/step_timer.py",
        "if now < self._began + self._distance:",
        "if False:",
        "tests/test_straggler_scores.py::test_of_short_steps_as_many_are_timed_as_a_report_needs",
    ),
    Guard(
        "processes that are meant to outlive their ranks stay",
        "launch/processes.py",
        "if is_of_mine or process in living or OUTLIVES_RANKS_VARIABLE in environment:",
        "if is_of_mine or process in living:",
        "tests/test_left_behind.py::test_what_a_killed_rank_had_started_is_gone_when_it_is_started_again",
    ),
    Guard(
        "what follows from a lost peer is no cause",
        "run/failures.py",
        'if fault.kind == "hang" or not (says_peer_is_lost(reason) or (hung and _TIMED_OUT.search(reason))):',
        "if True:",
        "tests/test_failures.py::test_a_diagnosed_hang_is_the_failure_and_not_what_its_peers_ran_into",
    ),
    Guard(
        "a signal delivered twice is one signal",
        "signals.py",
        "if now - self._first_at >= SECOND_SIGNAL_AFTER_S:",
        "if True:",
        "tests/test_preemption.py::test_a_second_signal_ends_the_run_at_once",
    ),
    Guard(
        "a participant that has withdrawn is not called",
        "fit/participant.py",
        "active = self._all if name in _UNTIL_THE_END else [p for p in self._all if p not in self._withdrawn]",
        "active = self._all",
        "tests/test_participant.py::test_who_joins_or_leaves_while_an_event_comes_is_known_for_the_next_one",
    ),
    Guard(
        "a shard of the other byte order is refused",
        "checkpoint/shard.py",
        'if document["byteorder"] != sys.byteorder:',
        "if False:",
        "tests/test_shard.py::test_a_header_that_makes_no_sense_is_refused_though_its_digest_is_right",
    ),
    Guard(
        "replicas are kept on another node",
        "checkpoint/replication.py",
        "if jump < 1 or world_size % jump != 0:",
        "if False:",
        "tests/test_replication.py::test_every_rank_has_a_partner_on_another_node",
    ),
    Guard(
        "a file of another size is not sent as a replica",
        "checkpoint/replication.py",
        "if (size := os.fstat(file.fileno()).st_size) == transfer.size:",
        "if size := os.fstat(file.fileno()).st_size:",
        "tests/test_replication.py::test_parts_are_brought_where_they_are_needed",
    ),
    Guard(
        "a container's own cgroup is its root",
        "checkpoint/capacity.py",
        'if ".." in names:',
        "if False:",
        "tests/test_capacity.py::test_a_container_sees_its_own_group_as_the_root",
    ),
    Guard(
        "two limits for one section are refused",
        "detect/hangs/timeouts.py",
        "if name in timeouts:",
        "if False:",
        "tests/test_timeouts.py::test_what_cannot_be_parsed_is_named",
    ),
    Guard(
        "few steps make no calculated timeout",
        "detect/hangs/timeouts.py",
        "if train_iterations >= MIN_TRAIN_ITERATIONS:",
        "if True:",
        "tests/test_timeouts.py::test_what_may_be_calculated",
    ),
    Guard(
        "a mismatch of collectives is named",
        "detect/hangs/verdict.py",
        "if wait.group is not None and (odd := self._blame_mismatch(wait.group)):",
        "if False:",
        "tests/test_hangs_verdict.py::test_a_mismatch_explains_a_circle",
    ),
    Guard(
        "many ranks are named in short",
        "detect/hangs/verdict.py",
        "if 0 < holes <= 3 and len(ranks) > 8:",
        "if False:",
        "tests/test_hangs_verdict.py::test_many_ranks_are_named_briefly",
    ),
    Guard(
        "a loss that is not finite is no reference for spikes",
        "detect/numerics/numerics.py",
        "if not math.isfinite(loss):",
        "if False:",
        "tests/test_numerics.py::test_the_rule_of_megatron",
    ),
    Guard(
        "bad luck is no straggler",
        "detect/stragglers/stragglers.py",
        "at_least = (of_step / (1 - _CERTAINTY * self.noise).clamp(min=1e-9)).clamp(max=1)",
        "at_least = of_step",
        "tests/test_straggler_scores.py::test_a_rank_is_slow_only_beyond_the_noise_of_its_steps",
    ),
    Guard(
        "kernels are compared with those of the same name",
        "detect/stragglers/stragglers.py",
        "found = [(index, positions[each]) for index, each in enumerate(theirs.tolist()) if each in positions]",
        "found = [(i, i) for i in range(min(len(theirs), len(own)))]",
        "tests/test_straggler_scores.py::test_scores_are_those_of_nvrx",
    ),
    Guard(
        "job retries end",
        "launch/budget.py",
        "if job_spent and counts.job_retries >= self.job_retries:",
        "if False:",
        "tests/test_budget.py::test_two_retries_are_three_jobs_of_four_groups_each",
    ),
    Guard(
        "a peer that takes too long is given up",
        "agreement_protocol.py",
        "if waited <= timeout:",
        "if True:",
        "tests/test_agreement_simulation.py::test_those_that_have_finished_do_not_wait_for_one_that_is_gone",
    ),
    Guard(
        "a remapped row that failed fails the health check",
        "detect/health.py",
        "if failed:",
        "if False:",
        "tests/test_health.py::test_nvml_facts_that_fail_name_the_gpu",
    ),
    Guard(
        "a rank that waits for its device is not busy, though its host spins",
        "detect/hangs/verdict.py",
        "if is_running and not process.device_works:",
        "if is_running:",
        "tests/test_watchdog.py::test_a_rank_that_waits_for_its_device_is_not_busy",
    ),
    Guard(
        "what a library draws after the script's seed rules spare processes out",
        "launch/imports.py",
        "if (seeded is not None and random.getstate() != seeded) or _torch_has_drawn():",
        "if _torch_has_drawn():",
        "tests/test_spares.py::test_what_a_library_draws_when_it_is_imported_counts_after_the_seed",
    ),
    Guard(
        "what a library draws before the script's seed does not",
        "launch/imports.py",
        "if generator.getstate()[1][:_WORDS] == now[1][:_WORDS]:",
        "if False:",
        "tests/test_spares.py::test_what_a_library_draws_when_it_is_imported_counts_after_the_seed",
    ),
    Guard(
        "more failures than a day may have end the run",
        "launch/budget.py",
        "if today > self.max_failures_per_day:",
        "if False:",
        "tests/test_budget.py::test_failures_per_day_hold_whatever_the_progress",
    ),
    Guard(
        "a node that was left out stays out",
        "launch/nodes.py",
        "if self.node in nodes:",
        "if False:",
        "tests/test_left_out_nodes.py::test_whether_a_run_can_do_without",
    ),
    Guard(
        "a handler of the script is called too",
        "signals.py",
        "if handler is None or not _is_of_the_script(handler):",
        "if True:",
        "tests/test_signals.py::test_a_handler_of_the_script_is_called_and_given_back",
    ),
    Guard(
        "a signal that is ignored for a terminal (nohup) stays ignored",
        "signals.py",
        "if signum in _TERMINALS and signal.getsignal(signum) is signal.SIG_IGN:",
        "if False:",
        "tests/test_terminal.py::test_what_is_ignored_for_a_terminal_stays_ignored",
    ),
    Guard(
        "the tensors of a shard end where its header begins",
        "checkpoint/shard.py",
        "if _end_of(found.tensors) != start:",
        "if False:",
        "tests/test_shard.py::test_a_table_that_makes_no_sense_is_refused_though_its_digest_is_right",
    ),
    Guard(
        "a type that this torch does not know is refused",
        "checkpoint/shard.py",
        "if spec.dtype not in _DTYPES:",
        "if False:",
        "tests/test_shard.py::test_a_table_that_makes_no_sense_is_refused_though_its_digest_is_right",
    ),
    Guard(
        "tensors that share their memory share it again",
        "checkpoint/safe_serialization.py",
        "if _is_same(self.tensors[index], value):",
        "if False:",
        "tests/test_safe_serialization.py::test_arrays_of_any_size",
    ),
    Guard(
        "replication needs two nodes",
        "checkpoint/replication.py",
        "if nodes < 2:",
        "if False:",
        "tests/test_replication.py::test_impossible_cliques_say_what_to_set",
    ),
    Guard(
        "storage without room is refused before a save",
        "checkpoint/capacity.py",
        "if needed.files > available.files.nbytes:",
        "if False:",
        "tests/test_capacity.py::test_a_small_shared_memory_is_left_to_the_data_loaders",
    ),
    Guard(
        "timeouts of a later version are refused",
        "detect/hangs/timeouts.py",
        "if isinstance(version, int) and version != _VERSION:",
        "if False:",
        "tests/test_timeouts.py::test_what_is_of_no_use_is_ignored_for_a_stated_reason_and_replaced",
    ),
    Guard(
        "of a circle of waits the one rank that is at fault is named",
        "detect/hangs/verdict.py",
        "if len(culprits) == 1:",
        "if False:",
        "tests/test_hangs_verdict.py::test_a_rank_that_left_a_collective_out",
    ),
    Guard(
        "a process in the kernel is told from one that sleeps",
        "detect/hangs/verdict.py",
        'if process.state == "uninterruptible" and not is_saving:',
        "if False:",
        "tests/test_hangs_verdict.py::test_every_kind",
    ),
    Guard(
        "an idle data loader is no culprit",
        "detect/hangs/verdict.py",
        "if not each.workers:",
        "if False:",
        "tests/test_hangs_verdict.py::test_every_kind",
    ),
    Guard(
        "complex numbers are checked too",
        "detect/numerics/numerics.py",
        "return (dtype.is_floating_point or dtype.is_complex) and dtype is not torch.float4_e2m1fn_x2",
        "return dtype.is_floating_point",
        "tests/test_numerics.py::test_numbers_of_four_bits_are_finite",
    ),
    Guard(
        "a rank that was slow once is no straggler",
        "detect/stragglers/stragglers.py",
        "return [each for each in slow if self._counts[each.rank, each.kind] >= self._minimum]",
        "return list(slow)",
        "tests/test_straggler_scores.py::test_twice_in_a_row",
    ),
    Guard(
        "the past of another device is forgotten",
        "detect/stragglers/stragglers.py",
        'if state["device"] == self.device and len(state["sections"]) == len(SECTIONS):',
        'if len(state["sections"]) == len(SECTIONS):',
        "tests/test_straggler_scores.py::test_what_is_remembered_is_plain_and_comes_back_on_the_same_device",
    ),
    Guard(
        "a typical step is not that of a lucky moment",
        "detect/stragglers/step_timer.py",
        "means = means[means.sum(dim=1).argsort(stable=True)]  # as whole steps, so that the sections belong together",
        "pass",
        "tests/test_straggler_scores.py::test_healthy_ranks_whose_steps_vary_are_not_slow",
    ),
    Guard(
        "what is marked bad is left out",
        "checkpoint/generations.py",
        "if each.generation in without:",
        "if False:",
        "tests/test_generations.py::test_what_is_condemned_is_left_out",
    ),
    Guard(
        "a checkpoint file ends where it did when it was written",
        "checkpoint/checkpoint_file.py",
        "if stamp.size != start + position + _END_RECORD_SIZE:",
        "if False:",
        "tests/test_checkpoint_file.py::test_bytes_before_the_trailer_are_noticed",
    ),
    Guard(
        "a checkpoint of the run directory of an abandoned course is not used",
        "fit/checkpoint_selector.py",
        "if reason is None and not is_on_course(self.forks, course, resume.step_of(path)):",
        "if False:",
        "tests/test_courses.py::test_a_global_one_that_has_come_from_a_condemned_state_is_not_resumed_from",
    ),
    Guard(
        "a copy that somebody keeps of a checkpoint is none of the run",
        "checkpoint/resume.py",
        "(name := CHECKPOINT_NAME.fullmatch(path.name))",
        "(name := CHECKPOINT_NAME.match(path.name))",
        "tests/test_auto_resume.py::test_only_what_is_named_as_a_checkpoint_is_one",
    ),
    Guard(
        "a forked child does not end the fit of its parent",
        "fit/session.py",
        "        if os.getpid() != self._pid:",
        "        if False:",
        "tests/test_fits.py::test_a_forked_child_that_raises_ends_no_fit_of_its_parent",
    ),
    Guard(
        "a model of other shapes is another fit",
        "fit/identity.py",
        'if recorded.get("parameters") not in (mine["parameters"], _digest(here)):',
        "if False:",
        "tests/test_fits.py::test_a_model_of_other_shapes_is_another_fit",
    ),
    Guard(
        "an outcome of another version is none",
        "run/run_directory.py",
        'if content is None or content.get("status") not in get_args(Status):',
        "if content is None:",
        "tests/test_fits.py::test_an_outcome_that_this_version_does_not_know_is_none",
    ),
    Guard(
        "what is missing for good is not waited for",
        "_files.py",
        "return error.errno in _LASTING or is_kernels",
        "return is_kernels",
        "tests/test_storage_fails.py::test_patience_has_an_end_for_all_reads_together",
    ),
    Guard(
        "a record of progress that is being written is read again",
        "detect/hangs/progress.py",
        "if is_whole and ticks == valid > 0",
        "if ticks == valid > 0",
        "tests/test_progress.py::test_what_was_written_while_it_was_read_is_read_again",
    ),
    Guard(
        "a busy rank is not ended where nothing would start it again",
        "detect/hangs/watchdog.py",
        "    if not self._is_started_again:",
        "    if False:",
        "tests/test_watchdog.py::test_a_busy_rank_gets_more_time_where_its_end_would_help_nobody",
    ),
    Guard(
        "who writes is busy",
        "detect/hangs/verdict.py",
        "    if _rate(process) >= _WRITES_FROM:",
        "    if False:",
        "tests/test_hangs_verdict.py::test_every_kind",
    ),
    Guard(
        "a pickle that asks for a huge memo is refused",
        "checkpoint/dcp.py",
        'if opcode.name == "LONG_BINPUT" and (argument or 0) > puts:',
        "if False:",
        "tests/test_dcp.py::test_a_huge_memo_is_refused_before_there_is_any",
    ),
    Guard(
        "a shard that another process removes meanwhile is none",
        "checkpoint/node_store.py",
        "                with contextlib.suppress(FileNotFoundError):\n                    status = entry.stat",
        "                with contextlib.suppress():\n                    status = entry.stat",
        "tests/test_node_store.py::test_shards_that_another_process_removes_after_they_were_listed",
    ),
    Guard(
        "a bad shard that cannot be moved is passed over",
        "checkpoint/recovery.py",
        "with suppress(OSError):  # another rank of this node may have moved it",
        "with suppress():",
        "tests/test_local_checkpoint.py::test_a_bad_shard_that_cannot_be_moved_is_passed_over",
    ),
    Guard(
        "no rank trains on into a save for which another is not ready",
        "checkpoint/save_coordinator.py",
        'return self._get(f"round/{number}/ready") is not None',
        "return not self.over",
        "tests/test_save_simulation.py::test_a_generation_counts_where_every_rank_has_it_and_no_rank_waits_forever",
    ),
    Guard(
        "a message of which a part is missing is none",
        "checkpoint/store_messages.py",
        "if len(self._received) < len(self._keys):",
        "if False:",
        "tests/test_store_messages.py::test_who_says_nothing_is_not_waited_for",
    ),
    Guard(
        "a counter of interruptions waits until it is known what followed",
        "launch/metrics.py",
        'if each["time"] < settled_until]',
        "]",
        "tests/test_monitoring.py::test_a_counter_waits_until_it_is_known_what_followed",
    ),
    Guard(
        "an error of monitoring does not end its thread",
        "launch/monitor.py",
        """        except Exception as error:
            if who not in self._said:""",
        """        except ImportError as error:
            if who not in self._said:""",
        "tests/test_monitoring.py::test_a_port_in_use_is_said_once_and_tried_again",
    ),
    Guard(
        "a command of --on-event has a time limit",
        "launch/on_event.py",
        "return now > began + self._limit_s or (ending is not None and now > ending[0])",
        "return False",
        "tests/test_on_event.py::test_one_that_hangs_is_killed_with_what_it_has_started",
    ),
    Guard(
        "a command of --on-event leaves no process behind",
        "launch/on_event.py",
        """        _kill(process)
        with suppress(subprocess.TimeoutExpired):""",
        """        with suppress(subprocess.TimeoutExpired):""",
        "tests/test_on_event.py::test_one_that_ends_leaves_nothing_behind",
    ),
    Guard(
        "at the end, commands that hang leave the last event its time",
        "launch/on_event.py",
        "(ending is not None and now > ending[0])",
        "False",
        "tests/test_on_event.py::test_the_end_of_the_run_is_told_although_those_before_hang",
    ),
    Guard(
        "an event is told once",
        "launch/notices.py",
        "self._seen.add(key)",
        "pass",
        "tests/test_on_event.py::test_each_event_is_told_once_also_if_it_turns_up_late",
    ),
    Guard(
        "a thread that only reads a ledger does not move the order of what another one records",
        "run/ledger.py",
        "if new and self._moves_order:",
        "if new:",
        "tests/test_ledger.py::test_what_is_only_read_moves_no_order",
    ),
    Guard(
        "absent ranks: random numbers are their own",
        "fit/absent_ranks.py",
        '        self._set_random_state(state["now"])\n',
        "",
        "tests/test_absent_ranks.py::test_steps_are_those_of_the_run_as_it_was_begun",
    ),
    Guard(
        "absent ranks: buffers are those of rank 0 at the begin of the step",
        "fit/absent_ranks.py",
        "                    buffer.copy_(begun)\n",
        "                    pass\n",
        "tests/test_absent_ranks.py::test_steps_are_those_of_the_run_as_it_was_begun",
    ),
    Guard(
        "absent ranks: what a repeated batch logs counts for nothing",
        "fit/absent_ranks.py",
        "lightning_metrics.nothing_logged(self._trainer, self._trainer.lightning_module)",
        "contextmanager(lambda: iter([None]))()",
        "tests/test_absent_ranks.py::test_steps_are_those_of_the_run_as_it_was_begun",
    ),
    Guard(
        "absent ranks: a repeated batch has no gradient",
        "_lightning/lightning_micro_batches.py",
        "0.0 if batch is None else share",
        "share",
        "tests/test_absent_ranks.py::test_steps_are_those_of_the_run_as_it_was_begun",
    ),
    Guard(
        "absent ranks: all ranks count alike",
        "_lightning/lightning_micro_batches.py",
        "return scaled(step(), share)",
        "return step()",
        "tests/test_absent_ranks.py::test_steps_are_those_of_the_run_as_it_was_begun",
    ),
    Guard(
        "absent ranks: batches begin behind those that were trained on",
        "fit/absent_ranks.py",
        "done if self._is_resuming else 0",
        "0",
        "tests/test_absent_ranks.py::test_steps_are_those_of_the_run_as_it_was_begun",
    ),
    Guard(
        "absent ranks: what they had logged is kept",
        "fit/exact_state.py",
        'lightning_metrics.merged_metric_states(*fit, resumed["metrics"])',
        'resumed["metrics"][0]',
        "tests/test_absent_ranks.py::test_steps_are_those_of_the_run_as_it_was_begun",
    ),
    Guard(
        "absent ranks: who comes back knows what others have logged",
        "fit/absent_ranks.py",
        'lightning_metrics.counts_for_nothing(trainer, trainer.lightning_module, mine["metrics"])',
        "dict(lightning_metrics.NOTHING_LOGGED)",
        "tests/test_absent_ranks.py::test_who_comes_in_the_midst_of_an_epoch_knows_what_others_have_logged",
    ),
    Guard(
        "absent ranks: who comes back has logged nothing",
        "_lightning/lightning_metrics.py",
        '_emptied(each) if each["sync"]["should"] else each',
        "each",
        "tests/test_absent_ranks.py::test_who_comes_in_the_midst_of_an_epoch_knows_what_others_have_logged",
    ),
    Guard(
        "more ranks: their batches are as much smaller",
        "_lightning/lightning_micro_batches.py",
        "        if self.share != 1:\n",
        "        if False:\n",
        "tests/test_absent_ranks.py::test_more_ranks_have_smaller_batches",
    ),
    Guard(
        "more ranks: an epoch that one rank has begun keeps its order",
        "_lightning/lightning_micro_batches.py",
        "if is_of_one(order) and type(sampler)",
        "if False and type(sampler)",
        "tests/test_absent_ranks.py::test_more_ranks_have_smaller_batches[1-4-2]",
    ),
    Guard(
        "more ranks: a restart in that epoch keeps it, too",
        "_lightning/lightning_micro_batches.py",
        "if isinstance(sampler, _BegunByOne) and sampler.epoch == sampler.begun:",
        "if False:",
        "tests/test_absent_ranks.py::test_more_ranks_have_smaller_batches[1-4-4-1]",
    ),
    Guard(
        "more ranks: what is made of a CombinedLoader's loaders does not take their place",
        "_lightning/lightning_data.py",
        "copy.copy(found) if isinstance(found, combined_loader) else found",
        "found",
        "tests/test_absent_ranks.py::test_more_ranks_with_what_else_there_is[a CombinedLoader]",
    ),
    Guard(
        "more ranks: what a rank has not logged is what another one has",
        "_lightning/lightning_metrics.py",
        ' if each["sync"]["should"] else each for key',
        " for key",
        "tests/test_absent_ranks.py::test_who_comes_in_the_midst_of_an_epoch_knows_what_others_have_logged",
    ),
    Guard(
        "more ranks: their share of a batch is known at the next restart",
        "fit/exact_state.py",
        '"batch_share": str(self.batch_share)',
        '"batch_share": "1"',
        "tests/test_absent_ranks.py::test_more_ranks_have_smaller_batches[3-4-4-3]",
    ),
    Guard(
        "another number of ranks: each reads the states of all its places",
        "checkpoint/generations.py",
        "range(rank, self.places or self.world_size, world_size)",
        "range(rank, rank + 1)",
        "tests/test_generations.py::test_every_place_is_taken_once_by_who_has_its_state",
    ),
    Guard(
        "another number of ranks: a local checkpoint is refused where they cannot go on",
        "checkpoint/recovery.py",
        "if generation.places != now and",
        "if False and",
        "tests/test_local_checkpoint.py::test_another_number_of_ranks_that_cannot_go_on",
    ),
    Guard(
        "another number of ranks: a bad shard of one that is no more is replaced by its copy",
        "checkpoint/recovery.py",
        "for name in (*ranks, *generation.replicated):",
        "for name in (*list(ranks)[:1], *generation.replicated):",
        "tests/test_local_checkpoint.py::test_a_damaged_shard_of_a_rank_that_is_no_more",
    ),
    Guard(
        "the memory of a shard that was fetched from another node is not kept for ever",
        "checkpoint/node_store.py",
        "            if not is_copy:\n",
        "            if True:\n",
        "tests/test_node_store.py::test_copies_give_their_memory_back",
    ),
    Guard(
        "saved after a loss: not a state whose parameters the step has written to",
        "fit/last_boundary.py",
        "if note.versions != [each._version for each in self._parameters]:",
        "if False:",
        "tests/test_last_boundary.py::test_a_step_that_has_changed_more_is_not_saved",
    ),
    Guard(
        "saved after a loss: not a state with other modes of layers",
        "fit/last_boundary.py",
        "if self._modes != lightning_loops.train_eval_modes(fit.trainer, fit.module):",
        "if False:",
        "tests/test_last_boundary.py::test_a_step_that_has_changed_more_is_not_saved",
    ),
    Guard(
        "saved after a loss: not a state with buffers that are too large to be kept, and have changed",
        "fit/last_boundary.py",
        "if self._constants != self._digest():",
        "if False:",
        "tests/test_last_boundary.py::test_a_step_that_has_changed_more_is_not_saved",
    ),
    Guard(
        "saved after a loss: a lost rank was at the same boundary",
        "fit/last_boundary.py",
        "(part for part in parts if part.position == position)",
        "(part for part in parts)",
        "tests/test_last_boundary.py::test_of_another_position_token_or_layout_a_lost_rank_has_left_nothing",
    ),
    Guard(
        "saved after a loss: that of the oldest boundary",
        "fit/last_boundary.py",
        "    return min(positions)\n",
        "    return max(positions)\n",
        "tests/test_last_boundary.py::test_the_first_survivor_at_the_oldest_boundary_saves_for_the_others",
    ),
    Guard(
        "saved after a loss: who lives and does not go on has come to its boundary",
        "fit/last_boundary.py",
        "if missing <= gone and all(self._has_come(rank, _oldest(standings)) for rank in missing):",
        "if missing <= gone:",
        "tests/test_last_boundary.py::test_the_first_survivor_at_the_oldest_boundary_saves_for_the_others",
    ),
    Guard(
        "saved after a loss: a rank that comes to the boundary later notes it",
        "fit/session.py",
        "                last_boundary.before_save()\n            raise",
        "                pass\n            raise",
        "tests/test_replacement.py::test_the_last_boundary_is_saved_after_a_loss"
        "[survivors that come to the boundary after the loss, one of two and both]",
    ),
    Guard(
        "saved after a loss: a boundary is noted before it is saved to node memory",
        "fit/local_saves.py",
        "                before_save()\n",
        "                pass\n",
        "tests/test_last_boundary.py::test_a_boundary_is_noted_before_the_state_is_saved",
    ),
    Guard(
        "saved after a loss: a boundary is noted before it is saved to the run directory",
        "fit/saving.py",
        "            before_save()\n",
        "            pass\n",
        "tests/test_last_boundary.py::test_a_boundary_is_noted_before_the_state_is_saved",
    ),
    Guard(
        "saved after a loss: a boundary is noted before an event is acted on",
        "fit/session.py",
        "                last_boundary.before_save()  # to act on them may take long, and change the state\n",
        "                pass\n",
        "tests/test_last_boundary.py::test_a_boundary_is_noted_before_an_event_is_acted_on",
    ),
    Guard(
        "saved after a loss: what an event has changed is noted before it is saved",
        "fit/session.py",
        "                last_boundary.notes_early = is_whole  # what they have changed\n",
        "                pass\n",
        "tests/test_last_boundary.py::test_what_an_event_has_changed_is_noted_before_it_is_saved",
    ),
    Guard(
        "saved after a loss: once before all saves of a boundary",
        "fit/last_boundary.py",
        "            self.notes_early = False\n",
        "",
        "tests/test_last_boundary.py::test_a_boundary_is_noted_before_the_state_is_saved",
    ),
    Guard(
        "ledger: another file with the same name is read anew",
        "run/ledger.py",
        "if os.fstat(file.fileno()).st_size < read.size or not begin.startswith(read.begin):",
        "if os.fstat(file.fileno()).st_size < read.size:",
        "tests/test_ledger.py::test_a_ledger_that_has_taken_the_place_of_another_is_read_anew",
    ),
    Guard(
        "ledger: what an interrupted read had read is read again",
        "run/ledger.py",
        "                except BaseException as error:  # also of a signal's handler\n",
        "                except (OSError, _Another) as error:\n",
        "tests/test_ledger.py::test_a_handler_that_raises_in_the_middle_of_a_read_costs_no_event",
    ),
    Guard(
        "ledger: what an interrupted fold had folded is folded again",
        "run/history.py",
        "            self._order = None  # if a signal's handler raises, all is folded again\n",
        "",
        "tests/test_ledger.py::test_a_handler_that_raises_in_the_middle_of_a_read_costs_no_event",
    ),
    Guard(
        "ledger: a process reads each line once",
        "run/ledger.py",
        "    return _readers.setdefault(os.fspath(folder), Reader(folder))\n",
        "    return Reader(folder)\n",
        "tests/test_ledger.py::test_each_line_is_read_once_in_a_process",
    ),
    Guard(
        "ledger: a spare has read it ahead",
        "launch/park.py",
        "        _read_ahead(self._environment)\n",
        "",
        "tests/test_spares.py::test_a_spare_takes_the_place_of_its_worker_and_is_as_if_just_started",
    ),
    Guard(
        "saved after a loss: nothing if another rank knows why not",
        "fit/last_boundary.py",
        "                raise _Unknown(refusals[0])\n",
        "                pass\n",
        "tests/test_last_boundary.py::test_the_first_survivor_at_the_oldest_boundary_saves_for_the_others",
    ),
    Guard(
        "saved after a loss: where others are now, not after an earlier loss",
        "fit/last_boundary.py",
        'if left is None or left["token"] != self._session.fit.nonce:',
        "if left is None:",
        "tests/test_last_boundary.py::test_the_first_survivor_at_the_oldest_boundary_saves_for_the_others",
    ),
    Guard(
        "saved after a loss: not while a save in progress may remove it",
        "fit/last_boundary.py",
        "if not all(settled):",
        "if False:",
        "tests/test_last_boundary.py::test_the_first_survivor_at_the_oldest_boundary_saves_for_the_others",
    ),
    Guard(
        "saved after a loss: counters are those of the boundary",
        "fit/last_boundary.py",
        "            owner[key] = value\n",
        "            pass\n",
        "tests/test_last_boundary.py::test_the_state_in_a_step_is_that_of_the_boundary_before",
    ),
    Guard(
        "saved after a loss: what the step has logged first is left out",
        "fit/last_boundary.py",
        "        lightning_boundary.forget_new_metrics(session.fit.trainer, values.names)\n",
        "",
        "tests/test_last_boundary.py::test_the_state_in_a_step_is_that_of_the_boundary_before",
    ),
    Guard(
        "saved after a loss: not while saves wait because of bad steps",
        "fit/last_boundary.py",
        "if fit.saves_paused or any(bad):",
        "if any(bad):",
        "tests/test_last_boundary.py::test_a_step_that_has_changed_more_is_not_saved",
    ),
    Guard(
        "elastic: settings of the optimizer are those of the boundary",
        "fit/last_boundary.py",
        "if not all(map(_are_same_settings, note.groups, self._optimizer.param_groups)):",
        "if False:",
        "tests/test_last_boundary.py::test_a_step_that_has_changed_more_is_not_saved",
    ),
    Guard(
        "elastic: the begin of an epoch is that of the same start",
        "fit/last_boundary.py",
        'if (kept["token"], kept["position"]) == (self._session.fit.nonce, begun_at):',
        'if kept["position"] == begun_at:',
        "tests/test_last_boundary.py::test_the_begin_of_an_epoch_is_taken_from_the_same_start_and_epoch_of_a_lost_rank",
    ),
    Guard(
        "elastic: a lost rank had the same buffers",
        "fit/last_boundary.py",
        'if kept["constants"] != self._constants:',
        "if False:",
        "tests/test_last_boundary.py::test_of_another_position_token_or_layout_a_lost_rank_has_left_nothing",
    ),
    Guard(
        "elastic: a lost rank had the same metrics",
        "fit/last_boundary.py",
        "if part.layout != self.layout:",
        "if False:",
        "tests/test_last_boundary.py::test_of_another_position_token_or_layout_a_lost_rank_has_left_nothing",
    ),
    Guard(
        "elastic: random states are put back",
        "fit/last_boundary.py",
        "            part.restore_random_state()\n",
        "",
        "tests/test_last_boundary.py::test_the_state_in_a_step_is_that_of_the_boundary_before",
    ),
    Guard(
        "elastic: random states of absent ranks are put back",
        "fit/last_boundary.py",
        "                session.exact.put_back_absent(note.absent)\n",
        "                pass\n",
        "tests/test_last_boundary.py::test_what_the_step_of_an_absent_rank_has_changed_is_put_back_here_and_for_a_lost_rank",
    ),
    Guard(
        "elastic: absent ranks whose places a lost one took are at the boundary",
        "fit/last_boundary.py",
        "{**of, **self._now_of(int(each), note)}",
        '{**of, "now": of["first_batch"]}',
        "tests/test_last_boundary.py::test_what_the_step_of_an_absent_rank_has_changed_is_put_back_here_and_for_a_lost_rank",
    ),
    Guard(
        "absent ranks: an epoch begins at its first boundary",
        "fit/exact_state.py",
        "            self._absent.at_boundary()\n",
        "            pass\n",
        "tests/test_last_boundary.py::test_what_the_step_of_an_absent_rank_has_changed_is_put_back_here_and_for_a_lost_rank",
    ),
    Guard(
        "elastic: no boundary is kept within an accumulation of gradients",
        "fit/last_boundary.py",
        "        if self._is_clean:\n",
        "        if True:\n",
        "tests/test_last_boundary.py::test_the_state_in_a_step_is_that_of_the_boundary_before",
    ),
    Guard(
        "elastic: no boundary is kept where ranks have states of their own",
        "fit/last_boundary.py",
        "        if own := session.fit.participants.own_states():",
        "        if (own := session.fit.participants.own_states()) and False:",
        "tests/test_last_boundary.py::test_where_the_state_of_a_lost_rank_would_not_be_known_the_last_boundary_is_not_kept",
    ),
    Guard(
        "elastic: a save after a loss is not published while parameters are written to",
        "fit/local_saves.py",
        "        if self._saves is None or self._saves.sees_writes:\n            return False\n        started",
        "        if self._saves is None:\n            return False\n        started",
        "tests/test_last_boundary.py::test_a_save_after_a_loss_is_recorded_when_all_have_saved",
    ),
    Guard(
        "the place in the data: a worker that has drawn random numbers is known",
        "checkpoint/reading_traces.py",
        " or self._random != _random_state()",
        "",
        "tests/test_reading_traces.py::test_what_leaves_traces_is_known_by_the_workers[draws from torch's-False]",
    ),
    Guard(
        "the place in the data: what has another object in its place has changed",
        "checkpoint/reading_traces.py",
        "return isinstance(other, _Same) and other._thing is self._thing",
        "return isinstance(other, _Same)",
        "tests/test_reading_traces.py::test_what_leaves_traces_is_known_by_the_workers[keeps the latest-False]",
    ),
    Guard(
        "the place in the data: what an iterator has given is not known",
        "checkpoint/reading_traces.py",
        "or (isinstance(each, Iterator) and not isinstance(each, io.IOBase))",
        "or False",
        "tests/test_reading_traces.py::test_an_object_is_looked_at_within_bounds",
    ),
    Guard(
        "the place in the data: workers that go on into the next epoch have a past",
        "checkpoint/reading_traces.py",
        "        and not loader.persistent_workers\n",
        "",
        "tests/test_reading_traces.py::test_of_what_is_not_watched_nothing_is_known[persistent workers]",
    ),
    Guard(
        "the place in the data: the next batch is of the worker whose turn it is",
        "_lightning/lightning_data.py",
        "asked, turn = inner._send_idx, batches % loader.num_workers",
        "asked, turn = inner._send_idx, 0",
        "tests/test_reading_traces.py::test_the_place_is_found_with_hardly_any_reading[2]",
    ),
    Guard(
        "the place in the data: batches keep their numbers",
        "_lightning/lightning_data.py",
        "    inner._send_idx += left_out  #",
        "    #",
        "tests/test_reading_traces.py::test_the_place_is_found_with_hardly_any_reading[2]",
    ),
    Guard(
        "the place in the data: of a rank that is lost it is known whether its workers have left traces",
        "fit/exact_state.py",
        "self._kept_of_lost, self._traceless_of_lost = extra_state, reads_without_traces",
        "self._kept_of_lost, self._traceless_of_lost = extra_state, True",
        "tests/test_replacement.py::test_data_are_read_again_only_where_workers_leave_traces[True]",
    ),
    Guard(
        "elastic: the own part of another start is refused",
        "elastic/own_part.py",
        "if owner != _digest_of(token):",
        "if False:",
        "tests/test_own_part.py::test_what_no_rank_of_this_fit_has_written_is_refused",
    ),
    Guard(
        "elastic: a half-written own part is left out",
        "elastic/own_part.py",
        "if xxhash.xxh3_128_digest(slot[_DIGEST_SIZE : begin + size]) != slot[:_DIGEST_SIZE]:",
        "if False:",
        "tests/test_own_part.py::test_a_slot_that_was_being_written_is_left_out_and_the_others_are_whole",
    ),
    Guard(
        "elastic: a forked child leaves the own part alone",
        "elastic/own_part.py",
        "        if os.getpid() != self._pid:\n            return  # a forked child",
        "        if False:\n            return  # a forked child",
        "tests/test_own_part.py::test_a_forked_child_writes_nothing",
    ),
    Guard(
        "elastic: only the worker that has ended loses its channel",
        "launch/spares.py",
        "            for worker in workers:\n                worker.channel.close()",
        "            for worker in [*workers, *self._workers.values()]:\n                worker.channel.close()",
        "tests/test_spares.py::test_a_worker_is_replaced_by_its_spare_while_the_others_live",
    ),
    Guard(
        "elastic: who connects to a store that is closed leaves it",
        "elastic/group.py",
        "            while True:\n                self._check_not_over()\n",
        "            while True:\n",
        "tests/test_replacement.py::test_a_store_that_is_closed_while_a_rank_connects_is_left",
    ),
    Guard(
        "elastic: callbacks of survivors begin as those of a new process",
        "_lightning/lightning_reentry.py",
        "            vars(callback).clear()\n",
        "            continue\n",
        "tests/test_replacement.py::test_a_survivor_begins_the_fit_with_what_a_replacement_has",
    ),
    Guard(
        "elastic: garbage of before the fit does not stay",
        "fit/reentry.py",
        "    gc.collect()  # what is garbage now would stay until the fit ends\n",
        "",
        "tests/test_replacement.py::test_garbage_of_before_the_fit_does_not_stay",
    ),
    Guard(
        "elastic: no fewer ranks than asked for go on without the others",
        "launch/loss_policy.py",
        "if len(left) < self._min_ranks:",
        "if False:",
        "tests/test_going_on.py::test_the_others_wait_for_a_replacement",
    ),
    Guard(
        "elastic: restarts are not used up where the ranks advance",
        "launch/loss_policy.py",
        "self._max_restarts = self.restarts + self._ranks.restarts_left()",
        "pass",
        "tests/test_going_on.py::test_more_restarts_are_left_where_the_ranks_have_advanced",
    ),
    Guard(
        "elastic: a survivor that is slow to hear of the next generation is not fenced off by it",
        "fit/context.py",
        "                membership.check_is_of_generation()\n",
        "                pass\n",
        "tests/test_last_boundary.py::test_a_survivor_that_has_not_heard_of_the_next_generation_leaves_for_it",
    ),
    Guard(
        "elastic: a survivor whose wait gloo does not end is not waited for",
        "fit/reentry.py",
        "elif DEFAULT.may_forget:",
        "elif False:",
        "tests/test_replacement.py::test_a_survivor_that_gloo_has_forgotten_ends_and_is_replaced_too",
    ),
    Guard(
        "elastic: groups that spread over several nodes wait for the replacement",
        "fit/reentry.py",
        "if any(len(node) % group for node in self._line.nodes):",
        "if False:",
        "tests/test_replicas_of_shards.py::test_groups_that_spread_over_nodes_wait_for_the_replacement",
    ),
    Guard(
        "elastic: a mesh whose sizes Lightning has chosen follows the number of ranks",
        "_lightning/lightning_reentry.py",
        "if all(type(size) is int for size in sizes):",
        "if False:",
        "tests/test_replicas_of_shards.py::test_the_groups_of_other_nodes_train_on_while_a_node_is_away_and_take_its_"
        "groups_in[killed, sizes that Lightning chooses]",
    ),
    Guard(
        "elastic: a node that is told to stop leaves whole groups behind",
        "launch/loss_policy.py",
        "left = self._in_whole_groups(slot for slot in self.members if slot not in leaving)",
        "left = [slot for slot in self.members if slot not in leaving]",
        "tests/test_going_on.py::test_a_node_that_leaves_with_a_part_of_a_group_leaves_whole_groups_behind",
    ),
    Guard(
        "elastic: a survivor that stands in a backward pass is not waited for as long as in a collective",
        "elastic/stuck.py",
        "startswith(_BACKWARD)",
        "startswith(())",
        "tests/test_replacement.py::test_only_a_rank_that_waits_in_torch_has_been_forgotten[in a backward pass]",
    ),
    Guard(
        "elastic: a rank that computes and gets no core is not taken for one that gloo has forgotten",
        "elastic/stuck.py",
        "waited_ns / 1e9",
        "0 * waited_ns",
        "tests/test_replacement.py::test_a_rank_that_computes_and_gets_hardly_any_core_has_not_been_forgotten",
    ),
    Guard(
        "elastic: who waits for a store to listen looks in time whether another rank is lost",
        "_torch.py",
        "min(_LISTENS_WITHIN_S, timeout.total_seconds())",
        "_LISTENS_WITHIN_S",
        "tests/test_replacement.py::test_a_store_that_is_closed_while_a_rank_connects_is_left[when it listens]",
    ),
    Guard(
        "elastic: a slow rank leaves when no other is in the agreement on it any more",
        "fit/straggler_reports.py",
        "step > self._makes_room_behind",
        "step >= self._makes_room_behind",
        "tests/test_replace_stragglers.py::test_a_slow_process_is_replaced_by_another_one[1]",
    ),
    Guard(
        "elastic: a slow process is replaced once in its place",
        "fit/straggler_reports.py",
        "elif isinstance(event, StragglersReplaced):",
        "elif False:",
        "tests/test_replace_stragglers.py::test_a_place_that_is_slow_is_given_up_once",
    ),
    Guard(
        "elastic: a slow rank that cannot be replaced is not ended",
        "fit/straggler_reports.py",
        "why = self.session.replaceability.why_not",
        "why = None",
        "tests/test_replace_stragglers.py::test_who_cannot_be_replaced_is_not_ended",
    ),
    Guard(
        "elastic: newcomers that come when the fit is over do not hold up its end",
        "launch/loss_policy.py",
        "elif self._are_too_late(seconds):",
        "elif False:",
        "tests/test_going_on.py::test_newcomers_that_are_taken_in_when_the_fit_is_over_are_turned_away",
    ),
    Guard(
        "elastic: a newcomer that fails by itself is not started again",
        "launch/newcomers.py",
        "            if not is_replaceable(each.exit_code):\n",
        "            if False:\n",
        "tests/test_going_on.py::test_a_newcomer_that_fails_is_given_up_and_the_others_go_on",
    ),
    Guard(
        "elastic: nobody listens where a newcomer would open a group of its own",
        "launch/elastic.py",
        '"MASTER_PORT": str(door.getsockname()[1])',
        '"MASTER_PORT": str(self._port)',
        "tests/test_going_on.py::test_two_ranks_go_on_without_the_third",
    ),
    Guard(
        "elastic: to take newcomers in is no failure of the budget",
        "run/history.py",
        "before < each <= restarts for each in grown",
        "False for each in grown",
        "tests/test_budget.py::test_to_take_ranks_in_again_is_no_failure",
    ),
    Guard(
        "elastic: no newcomer is started on a node that is lost",
        "launch/newcomers.py",
        "away = {slot for slot in slots if self._ranks.lost_node(slot) is not None}",
        "away = set[int]()",
        "tests/test_going_on.py::test_the_others_go_on_without_a_lost_node_and_take_its_ranks_in_when_it_is_back",
    ),
    Guard(
        "elastic: a restart does not wait for a node without which the others can go on",
        "launch/loss_policy.py",
        "return there if can else self._slots",
        "return self._slots",
        "tests/test_going_on.py::test_a_restart_does_not_wait_for_a_lost_node",
    ),
    Guard(
        "elastic: what the fit can is known of a rank that is started again",
        "launch/loss_policy.py",
        "fewer=last.fewer, tasks=last.tasks)",
        "fewer=None, tasks=None)",
        "tests/test_going_on.py::test_a_restart_does_not_wait_although_a_rank_was_started_again",
    ),
    Guard(
        "elastic: the policy knows how many ranks hold the state together",
        "fit/reentry.py",
        'tasks=tasks or "", group=group)',
        'tasks=tasks or "", group=1)',
        "tests/test_replacement_simulation.py::test_every_run_of_groups_ends_as_the_undisturbed_one",
    ),
    Guard(
        "elastic: half a group is not taken in",
        "launch/newcomers.py",
        "return in_whole_groups(self.waiting, self.group)",
        "return self.waiting",
        "tests/test_going_on.py::test_whole_groups_go_on_and_who_has_lost_a_rank_of_its_group_waits_with_its_process",
    ),
    Guard(
        "elastic: who goes on does not wait for who has lost a rank of its group",
        "launch/membership.py",
        "return self.ranks([*replacement.lost, *apart])",
        "return self.ranks(replacement.lost)",
        "tests/test_replacement.py::test_who_does_not_go_on_is_not_waited_for",
    ),
    Guard(
        "elastic: the state of a lost rank's shard is saved by who holds the same",
        "fit/last_boundary.py",
        "alike = [(each.node, each.rank % group) for each in locations]",
        "alike = [(each.node, 0) for each in locations]",
        "tests/test_elastic_nodes.py::test_of_groups_the_first_that_holds_the_same_saves_for_those_that_are_lost",
    ),
    Guard(
        "elastic: ranks of groups agree where they leave when others come back",
        "fit/reentry.py",
        "            self._line.leave_together = self._ask_to_leave",
        "            pass",
        "tests/test_replacement_simulation.py::test_every_run_of_groups_ends_as_the_undisturbed_one",
    ),
    Guard(
        "elastic: where all leave together, what is not known after a loss is saved",
        "fit/last_boundary.py",
        "        if any(is_off for is_off, _ in found)",
        "        if all(is_off is None for is_off, _ in found)",
        "tests/test_last_boundary.py::test_where_all_leave_together_what_is_not_known_after_a_loss_is_saved",
    ),
    Guard(
        "saved after a loss: not what may differ from that of the lost",
        "fit/last_boundary.py",
        "        if fit.replicas_differ:",
        "        if False:",
        "tests/test_last_boundary.py::test_a_rank_that_validates_or_has_seen_bad_steps_does_not_save",
    ),
    Guard(
        "elastic: they have a store to agree in",
        "launch/loss_policy.py",
        "        if not together:\n",
        "        if True:\n",
        "tests/test_going_on.py::test_the_store_in_which_ranks_agree_where_they_leave_is_there_until_they_have",
    ),
    Guard(
        "elastic: a loss cuts them at once",
        "launch/membership.py",
        'if leave is None or not message.fields.get("together", False):',
        "if leave is None:",
        "tests/test_replacement.py::test_ranks_that_leave_together_are_cut_where_they_do_not_or_another_one_is_lost",
    ),
    Guard(
        "elastic: who has left is not cut when others are late",
        "launch/membership.py",
        "if self.leave_together is leave and not self.is_over:",
        "if True:",
        "tests/test_replacement.py::test_ranks_that_leave_together_are_cut_where_they_do_not_or_another_one_is_lost",
    ),
    Guard(
        "of an absent group each rank has the shard of its own part",
        "checkpoint/generations.py",
        "first = rank if rank < self.world_size else rank % group",
        "first = rank if rank < self.world_size else 0",
        "tests/test_generations.py::test_what_ranks_need",
    ),
    Guard(
        "elastic: a node that has lost the first one joins again",
        "launch/follower.py",
        "is not None or self._has_stopped:",
        "is not None or True:",
        "tests/test_elastic_nodes.py::test_all_are_started_again_when_a_lost_node_is_back",
    ),
    Guard(
        "elastic: nobody is looked for who has another plan, or shows no sign of life",
        "launch/nodes.py",
        "if plan is not None and (plan.run_id != self._run_id or plan.exit_code is not None):",
        "if False:",
        "tests/test_elastic_nodes.py::test_a_first_node_that_was_lost_is_looked_for_as_long_as_it_lives",
    ),
    Guard(
        "ranks that train apart save only behind an exchange",
        "fit/exchanges.py",
        "        return self._steps == 0\n",
        "        return True\n",
        "tests/test_local_sgd.py::test_a_disturbed_run_ends_as_the_undisturbed_one",
    ),
    Guard(
        "what optimizers keep is the same on all ranks behind an exchange",
        "fit/exchanges.py",
        "                tensors[name] = value\n",
        "                pass\n",
        "tests/test_local_sgd.py::test_ranks_train_apart_and_meet",
    ),
    Guard(
        "buffers are those of rank 0 behind an exchange",
        "fit/exchanges.py",
        "        take_from_rank_0(lightning_strategies.broadcast_buffers(trainer), device)\n",
        "",
        "tests/test_local_sgd.py::test_ranks_train_apart_and_meet",
    ),
    Guard(
        "the outer optimizer goes on with what it has kept",
        "callbacks/local_sgd.py",
        "            exchanges.loaded = checkpoint.get(_STATE)\n",
        "            pass\n",
        "tests/test_local_sgd.py::test_a_disturbed_run_ends_as_the_undisturbed_one",
    ),
    Guard(
        "another callback saves what all ranks have trained",
        "fit/exchanges.py",
        "        if not self.session.fit.trainer.interrupted:\n            self._exchange()\n",
        "",
        "tests/test_local_sgd.py::test_ranks_train_apart_and_meet",
    ),
    Guard(
        "all ranks evaluate the same weights",
        "fit/exchanges.py",
        '        """All ranks evaluate the same weights."""\n        self._exchange()\n',
        '        """All ranks evaluate the same weights."""\n',
        "tests/test_local_sgd.py::test_ranks_train_apart_and_meet",
    ),
    Guard(
        "in manual optimization, too, no gradients are reduced",
        "_lightning/lightning_strategies.py",
        '    patches.set(redirection, "on_after_outer_forward", lambda *modules: None)\n',
        "",
        "tests/test_local_sgd.py::test_ranks_train_apart_and_meet",
    ),
    Guard(
        "ranks exchange ahead of time for a stop that cannot wait",
        "fit/stop_on_signal.py",
        "                hurry(self._listener.seconds_left)\n",
        "                pass\n",
        "tests/test_local_sgd.py::test_a_stop_that_cannot_wait_exchanges_ahead_of_time",
    ),
    Guard(
        "a bad step of one rank that trains apart is known to be its own",
        "detect/numerics/step_guard.py",
        "        result.is_here |= self.alone and result.problem is not None\n",
        "",
        "tests/test_local_sgd.py::test_bad_steps_of_one_rank_roll_all_back",
    ),
    Guard(
        "ranks that train apart meet at the same step",
        "averaging.py",
        "if largest[:2] != smallest[:2]:",
        "if False:",
        "tests/test_local_sgd.py::test_ranks_wait_for_each_other_and_look_whether_they_belong_together",
    ),
    Guard(
        "ranks with different tensors do not reduce them",
        "averaging.py",
        "    if largest != smallest:",
        "    if False:",
        "tests/test_local_sgd.py::test_ranks_wait_for_each_other_and_look_whether_they_belong_together",
    ),
    Guard(
        "what optimizers keep is averaged by parameter, not by which had its first gradient first",
        "averaging.py",
        "enumerate(parameters):",
        "enumerate(optimizer.state):",
        "tests/test_local_sgd.py::test_whatever_ranks_hold_is_the_same_behind_an_exchange",
    ),
    Guard(
        "frozen parameters that a module changes are averaged",
        "fit/exchanges.py",
        "*differing(rest, device)",
        "",
        "tests/test_local_sgd.py::test_whatever_ranks_hold_is_the_same_behind_an_exchange",
    ),
    Guard(
        "a buffer that was assigned anew is taken from rank 0",
        "_lightning/lightning_strategies.py",
        "each for name, each in ddp.module.named_buffers() if",
        "each for name, each in ddp.named_module_buffers.items() if",
        "tests/test_local_sgd.py::test_whatever_ranks_hold_is_the_same_behind_an_exchange",
    ),
    Guard(
        "numbers that optimizers keep are averaged",
        "fit/exchanges.py",
        "        average_numbers(numbers, device)\n",
        "",
        "tests/test_local_sgd.py::test_whatever_ranks_hold_is_the_same_behind_an_exchange",
    ),
    Guard(
        "averages of weights are averaged",
        "fit/exchanges.py",
        "enumerate(lightning_strategies.averaged_tensors(trainer))",
        "()",
        "tests/test_local_sgd.py::test_whatever_ranks_hold_is_the_same_behind_an_exchange",
    ),
    Guard(
        "an outer optimizer leaves alone what is frozen",
        "averaging.py",
        "None if torch.equal(anchor, mean) else anchor - mean",
        "anchor - mean",
        "tests/test_local_sgd.py::test_an_outer_optimizer_moves_only_what_was_trained",
    ),
    Guard(
        "who waits for an exchange does not hang",
        "averaging.py",
        "        waiting()\n        time.sleep",
        "        time.sleep",
        "tests/test_local_sgd.py::test_who_waits_long_for_the_others_does_not_hang",
    ),
    Guard(
        "who waits for others to act does not hang",
        "agreement.py",
        "            waiting()\n            return self._member.arrived()",
        "            return self._member.arrived()",
        "tests/test_local_sgd.py::test_who_waits_long_for_the_others_does_not_hang",
    ),
    Guard(
        "a stop is looked at again after each step",
        "fit/exchanges.py",
        "elif self._stop_by is not None:",
        "elif False:",
        "tests/test_local_sgd.py::test_a_stop_that_cannot_wait_exchanges_ahead_of_time",
    ),
    Guard(
        "ranks exchange what a skipped step has left",
        "fit/session.py",
        "            for before_batch_end in calls.before_batch_end:",
        "            for before_batch_end in ():",
        "tests/test_local_sgd.py::test_ranks_exchange_what_a_skipped_step_has_left",
    ),
    Guard(
        "what ranks that train apart do together is saved before one makes room",
        "fit/straggler_reports.py",
        '                save_locally("replacement", _SAVES_WITHIN_S)\n',
        "                pass\n",
        "tests/test_replace_stragglers.py::test_ranks_that_train_apart_lose_nothing_by_it",
    ),
    Guard(
        "ranks that exchange only because of a limit save nothing there that a longer fit goes on from",
        "fit/session.py",
        "self._ending.end_of_epoch(would_agree)",
        "self._ending.end_of_epoch(True)",
        "tests/test_local_sgd.py::test_a_fit_that_a_limit_has_ended_goes_on_from_an_exchange_that_was_due",
    ),
    Guard(
        "a signal to all processes of a node is for that node alone",
        "fit/stop_on_signal.py",
        "if self._line is None or not self._line.is_told_who_stops or signum not in (signal.SIGTERM, signal.SIGINT):",
        "if True:",
        "tests/test_elastic_nodes.py::test_the_first_node_trains_on_while_the_other_is_away_and_takes_its_ranks_in"
        "[all its processes are told to stop, as by Slurm]",
    ),
    Guard(
        "a run that has a state does not wait for all nodes",
        "launch/other_nodes.py",
        "if None not in places or is_enough:",
        "if None not in places:",
        "tests/test_elastic_nodes.py::test_a_run_that_has_a_state_does_not_wait_for_all_nodes",
    ),
    Guard(
        "of two callbacks of a kind the last one acts",
        "fit/joining.py",
        "acts = of_user[-1] if of_user else same_kind[0]",
        "acts = of_user[0] if of_user else same_kind[0]",
        "tests/test_contract.py::test_of_two_the_last_one_acts",
    ),
    Guard(
        "what was resumed from node memory is not safe",
        "run/history.py",
        "            if not isinstance(event, Resumed):\n                self._safe",
        "            if True:\n                self._safe",
        "tests/test_monitoring.py::test_what_a_ledger_says",
    ),
    Guard(
        "checkpoints that are gone are not safe",
        "run/history.py",
        "return step if steps is None else max(steps, default=None)",
        "return step",
        "tests/test_auto_resume.py::test_checkpoints_that_are_gone_are_missed_and_no_longer_safe",
    ),
    Guard(
        "a fit whose last steps are all bad has not finished",
        "fit/numerics_policy.py",
        "if is_lost or (goes_back and len(windows) >= self._options.max_consecutive):",
        "if is_lost:",
        "tests/test_nan_guard.py::test_a_fit_whose_last_steps_are_all_bad_has_not_finished[1]",
    ),
    Guard(
        "a stop that one rank was asked for outlasts the loss of another",
        "launch/membership.py",
        "            self.is_stopping = True\n            self.stop()\n",
        "            self.stop()\n",
        "tests/test_elastic_nodes.py::test_a_stop_of_one_rank_is_not_forgotten_when_another_one_is_lost",
    ),
]


def run_tests(tests: list[str], copy: Path) -> subprocess.CompletedProcess[str]:
    """Runs tests of a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=WITHIN_S)


def is_missed(guard: Guard, copy: Path) -> bool:
    """Whether the guard's test fails without it."""
    path = copy / "lightning_resilience" / guard.file
    source = path.read_text()
    path.write_text(source.replace(guard.text, guard.without))
    try:
        return run_tests([guard.test], copy).returncode == 1
    except subprocess.TimeoutExpired:
        return True  # it waits for what the guard would have refused
    finally:
        path.write_text(source)


def copy_project(to: Path) -> Path:
    """A copy of what the tests need, to be changed."""
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "_build", "runs", "*.egg-info")
    return Path(shutil.copytree(ROOT, to, ignore=unwanted, symlinks=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    guards = [each for each in GUARDS if not arguments.words or any(word in each.what for word in arguments.words)]
    began, kept = time.monotonic(), []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(copy_project(Path(directory, str(number))))

        def try_one(guard: Guard) -> bool:
            copy = copies.get()
            try:
                return is_missed(guard, copy)
            finally:
                copies.put(copy)

        whole = copies.get()
        healthy = run_tests(sorted({each.test for each in guards}), whole)
        copies.put(whole)
        if healthy.returncode != 0:
            sys.exit(f"The tests fail with all guards in place:\n{healthy.stdout[-4000:]}")
        for guard, missed in zip(guards, pool.map(try_one, guards), strict=True):
            print(f"{'missed' if missed else 'NOT MISSED':11} {guard.what}  [{guard.file}; {guard.test}]", flush=True)
            kept += [] if missed else [guard]
    print(f"{len(guards)} guards, {len(kept)} that no test misses, {time.monotonic() - began:.0f} s")
    sys.exit(bool(kept))


if __name__ == "__main__":
    main()
