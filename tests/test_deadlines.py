"""How the times of the launcher and of the watchdogs must fit each other."""

from __future__ import annotations

from lightning_resilience.run import deadlines as at


def test_the_launcher_ends_workers_after_they_had_time_to_end_themselves() -> None:
    assert 0 < at.TERM_MARGIN_S < at.KILL_MARGIN_S


def test_the_launch_ends_a_worker_before_it_stops_waiting_for_that() -> None:
    assert at.CHECK_NODES_EVERY_S + at.LEFTOVERS_PATIENCE_S < at.ENDED_WITHIN_S < at.OTHERS_END_WITHIN_S


def test_a_launch_that_lives_is_not_taken_for_dead() -> None:
    """It misses a beat on a busy machine, and its storage may show another one late."""
    assert at.DEAD_AFTER_BEATS > 2
    assert at.OWNER_LOST_AFTER_S > 4 * at.DEAD_AFTER_BEATS * at.BEAT_INTERVAL_S
    assert at.FIRST_NODE_WITHIN_S > at.OWNER_LOST_AFTER_S


def test_other_nodes_outlive_the_end_of_the_first_nodes_workers() -> None:
    assert at.KILL_MARGIN_S + at.LEFTOVERS_PATIENCE_S < at.OTHERS_END_WITHIN_S < at.OWNER_LOST_AFTER_S


def test_an_interrupted_process_says_why_before_c_code_ends_it_and_the_launcher_later() -> None:
    assert at.LAST_WORDS_WITHIN_S < at.EXITS_WITHIN_S <= at.TERM_MARGIN_S


def test_survivors_of_a_failed_worker_are_killed_before_the_launch_kills_all() -> None:
    assert at.EXITS_WITHIN_S < at.WORKERS_STOP_TIMEOUT_S < at.KILL_MARGIN_S


def test_nvrx_waits_for_the_diagnosis() -> None:
    assert at.DIAGNOSIS_MARGIN_S > at.CHECK_NODES_EVERY_S + at.NVRX_ANSWERS_WITHIN_S
    probe = at.BUSY_OVER_S + at.STACKS_WITHIN_S + at.ANSWER_WITHIN_S
    assert probe + 2 * at.OTHER_NODES_PROBE_WITHIN_S + 2 * at.HUNG_RANK_EXITS_WITHIN_S < at.DIAGNOSIS_MARGIN_S


def test_a_poll_of_the_watchdog_is_no_pause() -> None:
    assert at.WATCHDOG_POLL_S < at.SUSPENDED_FROM_S < at.FROZEN_AFTER_S
    assert at.WATCHDOG_POLL_S < at.CHECK_ACTIVITY_EVERY_S


def test_all_nodes_probe_their_ranks_before_the_verdict() -> None:
    probe = at.BUSY_OVER_S + at.STACKS_WITHIN_S + at.ANSWER_WITHIN_S
    assert at.CHECK_CASES_EVERY_S + probe + at.CHECK_VERDICT_EVERY_S < at.OTHER_NODES_PROBE_WITHIN_S
    assert at.STORAGE_WITHIN_S < at.OTHER_NODES_PROBE_WITHIN_S


def test_a_watchdog_that_handles_a_case_is_not_taken_for_stalled() -> None:
    case = 2 * at.OTHER_NODES_PROBE_WITHIN_S + 4 * at.STORAGE_WITHIN_S + 2 * at.HUNG_RANK_EXITS_WITHIN_S
    loss = at.FAILED_RANK_ENDS_WITHIN_S + at.SURVIVORS_SAVE_WITHIN_S + 2 * at.HUNG_RANK_EXITS_WITHIN_S
    assert max(case, loss, at.WATCHDOG_FAILS_FOR_S, 10 * at.WATCHDOG_BEAT_S) * 2 < at.WATCHDOG_STALLED_AFTER_S


def test_survivors_that_save_have_longer_than_those_that_wait() -> None:
    assert at.CHECK_SURVIVORS_EVERY_S < at.PEERS_RAISE_WITHIN_S < at.FAILED_RANK_ENDS_WITHIN_S
    assert at.FAILED_RANK_ENDS_WITHIN_S < at.SURVIVORS_SAVE_WITHIN_S


def test_one_rank_of_a_node_starts_its_watchdog() -> None:
    assert at.FIRST_STARTS_WATCHDOG_WITHIN_S < at.WATCHDOG_STARTS_WITHIN_S
    assert at.FIRST_STARTS_WATCHDOG_WITHIN_S < at.FIRST_RANK_WITHIN_S


def test_survivors_have_left_the_fit_before_all_ranks_are_restarted() -> None:
    assert at.SURVIVORS_FOUND_WITHIN_S + at.LAST_BOUNDARY_SAVED_WITHIN_S < at.SURVIVORS_LEAVE_WITHIN_S - 10.0
    assert at.NEXT_BOUNDARY_WITHIN_S < at.SURVIVORS_LEAVE_WITHIN_S
    assert at.NEXT_BOUNDARY_WITHIN_S + at.SAVED_TOGETHER_WITHIN_S < at.REPLACED_WITHIN_S / 2


def test_a_hang_behind_a_replacement_is_found_in_time() -> None:
    assert at.WATCHDOG_PUT_OFF_S + at.WATCHDOG_POLL_S < 1.5  # beside the limit


def test_a_node_that_lives_is_not_taken_for_lost() -> None:
    assert at.NODE_SILENT_AFTER_S > 4 * at.NODE_BEAT_S
    # Both nodes of a lost connection end their ranks before others are started.
    ends = at.PEERS_RAISE_WITHIN_S + at.WORKERS_STOP_TIMEOUT_S + at.LEFTOVERS_PATIENCE_S
    assert at.NODE_BEAT_S + ends < at.NODE_SILENT_AFTER_S < at.FIRST_NODE_WITHIN_S


def test_of_what_a_killed_watchdog_has_seen_a_tenth_is_lost() -> None:
    kept, age = 0.0, 0.0
    while age < 3600:
        age += 0.1
        if age - kept >= at.keep_time_after(age):
            kept = age
        assert age - kept <= max(age / 10, 1.0)
    assert age - kept <= at.KEEP_TIME_EVERY_S
