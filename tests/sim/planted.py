"""Bugs that are planted on purpose: the simulator must find each of them."""

from collections.abc import Callable, Iterable

import pytest

from tests.sim.simulation import Failed

#: plants a bug
Mutate = Callable[[pytest.MonkeyPatch], None]

#: Of bugs that few schedules show: a seed that does. It is tried first. Where it does not show the bug any more, all are tried.
SHOWN_BY = {
    "a_worker_that_was_ready_is_given_up_like_one_that_never_was": 260,
    "a_silent_link_is_held_against_the_worker": 20,
    "a_new_incarnation_takes_the_work_of_the_old_one_along": 260,
    "labels_are_not_counted_in_headers": 14,
    "kept_answers_make_no_room": 55,
    "epochs_that_clients_have_heard_do_not_matter": 16,
    "rows_without_a_separator_pass": 11,
    "texts_are_never_pairs": 27,
    "texts_are_first_in_first_out": 177,
    "short_rows_weigh_their_tokens_alone": 583,
    "digests_are_not_compared": 15,
    "versions_may_go_back": 224,
    "late_workers_finish_old_work": 95,
    "only_the_version_counts": 121,
    "a_lease_lasts_for_ever": 143,
    "a_drain_has_no_end": 68,
    "nothing_is_asked_again_on_a_new_link": 22,
    "answers_are_said_once": 22,
    "a_process_group_is_kept_whoever_is_in_it": 1671,
    "a_publisher_that_lends_is_believed": 28,
    "nobody_says_where_lent_memory_is": 28,
    "a_command_has_no_time_limit": 363,
    "work_enters_an_engine_that_sleeps": 819,
    "a_worker_says_ready_while_it_goes_to_sleep": 1800,
    "a_restarted_worker_answers_before_the_commit": 62,
    "generations_outlive_their_link": 339,
    "a_load_drops_generations": 94,
    "an_engine_without_a_commit_stays_paused": 39,
    "a_drain_never_keeps_generations": 89,
    "generations_that_stand_still_are_late": 292,
    "prompts_keep_their_logprobs_when_their_sequences_begin_again": 613,
    "another_coordinator_replaces_the_logprobs_of_a_prompt": 47,
    "a_resumed_sequence_has_as_many_new_tokens_as_at_first": 13,
    "what_waits_for_credit_is_sent_before_the_tokens_of_the_turn": 86,
    "what_names_an_exact_version_outlives_it": 22,
    "no_group_starts_again_after_its_engines_ran_out_of_memory": 37,
    "rows_and_sequences_wait_for_each_other": 18,
    "batches_count_next_to_sequences": 1816,
    "rows_that_hang_have_time_while_tokens_arrive": 58,
    "a_resumed_sequence_names_its_last_version_alone": 13,
    "a_worker_never_says_what_it_loaded_for_an_earlier_coordinator": 30,
    "a_change_that_is_delivered_twice_runs_twice": 21,
    "a_new_link_gets_tokens_before_its_request": 57,
    "processes_are_started_while_their_group_sleeps": 43,
    "generations_stay_where_they_are": 38,
    "a_pause_is_confirmed_before_generations_are_taken_back": 42,
    "weights_that_sleep_are_updated": 33,
    "routed_experts_are_kept_by_the_numbers_of_their_task": 22,
    "requests_outlive_their_adapter": 16,
    "a_version_is_unloaded_while_sequences_use_it": 11,
    "a_successor_forgets_what_sleeps": 51,
    "what_changes_nothing_is_answered_at_once": 88,
    "a_paused_group_begins_what_comes": 14,
    "lanes_are_not_built_anew_where_more_can_be_packed": 54,
    "whole_rows_of_other_labels_are_believed_to_share_a_sequence": 26,
}


def find(mutate: Mutate, patch: pytest.MonkeyPatch, seeds: Iterable[int], schedule: Callable[[int], object]) -> str:
    """Plant a bug, and run the schedules of `seeds` until one fails. How it fails; it is an error that none does."""
    mutate(patch)
    first = SHOWN_BY.get(mutate.__name__)
    order = list(seeds) if first is None else [first, *(seed for seed in seeds if seed != first)]
    for seed in order:
        try:
            schedule(seed)
        except Failed as failed:
            return str(failed)
    pytest.fail(f"{len(order)} schedules did not show it")
