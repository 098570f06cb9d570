"""Nothing lost, after any faults: thousands of random schedules with up to 8 workers, ten with 1,000.

A failure prints the seed and how to replay it. `SIM_SEED` starts the series elsewhere, to look for what these seeds do not
show.
"""

import os
from collections import Counter

import pytest

from enginepool.workers.events import RunTokenize
from tests.sim.sim_engine import SimEngine
from tests.sim.simulation import simulate

FIRST = int(os.environ.get("SIM_SEED", "1"))
CHUNKS, SEEDS = 10, 60

#: every answer that a schedule without updates can have
ANSWERS = {"result", "bad_request", "busy", "unknown_group"} | {
    "cancelled", "deadline_exceeded", "engine_error", "poisoned", "pool_down", "closed"
}  # fmt: skip
#: schedules that together show all of ANSWERS, and all of UPDATES: they are tried first; where they do not any more, others are
SHOW_ANSWERS, SHOW_UPDATES = (66, 43), (63, 8, 10)
#: ends of updates
UPDATES = {"published", "update_aborted", "publishing", "version_backwards", "weights_refused", "unsupported"}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_call_gets_exactly_one_final_answer(chunk: int) -> None:
    events = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        outcome = simulate(seed, 1 + seed % 8)
        events += outcome.events
        assert outcome.answers.keys() <= ANSWERS, outcome
    assert events > SEEDS * 100, "schedules in which nothing happens show nothing"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_an_answer_is_of_weights_that_were_committed_and_every_update_ends(chunk: int) -> None:
    events = updates = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        outcome = simulate(seed, 1 + seed % 8, updates=True)
        events += outcome.events
        updates += outcome.updates.get("published", 0)
    assert events > SEEDS * 100
    assert updates > SEEDS


@pytest.mark.parametrize("chunk", range(6))
def test_engines_that_take_weights_only_at_their_start_lose_nothing_either(chunk: int) -> None:
    events = updates = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        outcome = simulate(seed, 1 + seed % 8, packed=seed % 3 == 0, updates=True, restarts=True)
        events += outcome.events
        updates += outcome.updates.get("published", 0)
    assert events > SEEDS * 100
    assert updates > SEEDS


@pytest.mark.parametrize("chunk", range(6))
def test_workers_that_pack_some_batches_and_others_not_lose_nothing_either(chunk: int) -> None:
    events = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        events += simulate(seed, 2 + seed % 8, packed=True, updates=seed % 3 == 0).events
    assert events > SEEDS * 100


@pytest.mark.parametrize("chunk", range(4))
def test_workers_with_a_pace_lose_nothing_either(chunk: int) -> None:
    events = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        events += simulate(seed, 1 + seed % 8, packed=seed % 2 == 0, updates=seed % 3 == 0, paced=True).events
    assert events > SEEDS * 100


@pytest.mark.parametrize("chunk", range(2))
def test_engines_that_never_load_are_given_up_and_every_call_is_answered(chunk: int) -> None:
    events = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        events += simulate(seed, 1 + seed % 8, packed=seed % 2 == 0, updates=seed % 3 == 0, unloadable=True).events
    assert events > SEEDS * 100


@pytest.mark.parametrize("chunk", range(3))
def test_internal_errors_of_the_coordinator_and_planned_restarts_lose_nothing_either(chunk: int) -> None:
    events = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        packed, updates, restarts = seed % 4 == 0, seed % 2 == 0, seed % 6 == 0
        events += simulate(seed, 1 + seed % 8, packed=packed, updates=updates, restarts=restarts, faulty=True).events
    assert events > SEEDS * 100


@pytest.mark.parametrize("chunk", range(4))
def test_large_headers_and_answers_stay_within_tight_bounds(chunk: int) -> None:
    events, answers = 0, set[str]()
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        outcome = simulate(seed, 1 + seed % 8, packed=seed % 2 == 0, updates=seed % 3 == 0, wide=True)
        events += outcome.events
        answers |= outcome.answers.keys()
    assert events > SEEDS * 100
    assert {"result", "too_large"} <= answers


@pytest.mark.parametrize("chunk", range(3))
def test_requests_to_embed_and_for_logprobs_run_in_whole_batches_of_their_own(chunk: int) -> None:
    """The engine asserts that a batch is of one operation; every answer is the right one, once. Tokenizers decode meanwhile."""
    events, embedded, logprobs, decoded = 0, 0, 0, 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        outcome = simulate(seed, 1 + seed % 8, updates=seed % 2 == 0, paced=seed % 3 == 0, wide=seed % 5 == 0, embedding=True)
        events += outcome.events
        embedded += outcome.answers.get("embeddings", 0)
        logprobs += outcome.answers.get("logprobs", 0)
        decoded += outcome.answers.get("texts", 0)
    assert events > SEEDS * 100
    assert embedded > SEEDS and logprobs > SEEDS and decoded > SEEDS


@pytest.mark.parametrize("chunk", range(5))
def test_generations_go_on_with_every_token_once_whatever_fails(chunk: int) -> None:
    """Each sequence is computed again from its spans; a stream has the same tokens as its answer."""
    seen: Counter[str] = Counter()
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        seen.update(simulate(seed, 1 + seed % 8, updates=chunk > 2, generating=True).streams)
    assert seen["length"] + seen["stop"] > 10 * SEEDS, seen
    assert seen["resumed"] > SEEDS and seen["stopped"] > SEEDS / 2, seen
    missing = {
        "interrupted",
        "sent again",
        "sent to another coordinator",
        "several workers",
        "waited for its reader",
        "hidden states",
        "routed experts",
    } - seen.keys()
    assert not missing, f"no schedule shows {missing}"
    assert chunk <= 2 or seen.keys() >= {"several versions", "in_place", "retract"}, seen


def test_the_turns_of_conversations_are_right_and_go_where_their_history_is() -> None:
    """Turns follow answers while things fail; in the quiet afterwards each one finds its history at its engine."""
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        seen.update(simulate(seed, 1 + seed % 8, updates=seed % 2 == 0, generating=True, talking=True).streams)
    assert seen["next turn"] > SEEDS and seen["found its history"] > 2 * SEEDS, seen


@pytest.mark.parametrize("chunk", range(2))
def test_adapters_are_changed_in_all_workers_or_in_none_and_answers_name_the_version_of_each_token(chunk: int) -> None:
    seen: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        updates, external, sleeping = seed % 2 == 0, seed % 3 == 0, seed % 4 == 1
        outcome = simulate(
            seed, 1 + seed % 8, generating=True, adapting=True, updates=updates, external=external, sleeping=sleeping
        )
        seen.update(outcome.streams)
        changed.update(outcome.changes)
    assert changed[""] > SEEDS, changed
    assert min(changed[code] for code in ("busy", "update_aborted", "engine_error", "deadline_exceeded")) > 0, changed
    assert seen["adapter not loaded"] and seen["several versions of an adapter"], seen


@pytest.mark.parametrize("chunk", range(3))
def test_a_command_has_one_final_answer_with_one_outcome_for_each_worker(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        updates, external, stops = seed % 2 == 0, seed % 3 == 0, seed % 5 == 0
        outcome = simulate(seed, 1 + seed % 8, commanding=True, updates=updates, external=external, stops=stops)
        seen.update(outcome.commands)
    assert seen[""] > SEEDS, "most workers run most commands"
    assert seen.keys() >= {"", "pool_down", "engine_error", "deadline_exceeded", "unknown_group", "busy"}


@pytest.mark.parametrize("chunk", range(3))
def test_no_engine_works_while_it_sleeps_and_no_request_is_lost(chunk: int) -> None:
    """Workers and coordinators die meanwhile. At the end all is woken, and every call has its answer."""
    seen: Counter[str] = Counter()
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        generating, updates, external, stops = seed % 2 == 0, seed % 3 == 0, seed % 5 == 0, seed % 7 == 0
        outcome = simulate(
            seed, 1 + seed % 8, sleeping=True, generating=generating, updates=updates, external=external, stops=stops
        )
        seen.update(outcome.commands)
    assert seen[""] > 2 * SEEDS, "most workers sleep and wake"
    assert seen.keys() >= {"", "pool_down", "publishing", "bad_request"}, seen


@pytest.mark.parametrize("chunk", range(4))
def test_external_workers_whose_links_fail_come_back_with_their_models(chunk: int) -> None:
    events = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        events += simulate(seed, 1 + seed % 8, updates=seed % 2 == 0, external=True).events
    assert events > SEEDS * 100


@pytest.mark.parametrize("chunk", range(2))
def test_a_coordinator_that_is_stopped_on_purpose_costs_no_call(chunk: int) -> None:
    events = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        events += simulate(seed, 1 + seed % 8, packed=seed % 2 == 0, updates=seed % 3 == 0, stops=True).events
    assert events > SEEDS * 100


@pytest.mark.parametrize("chunk", range(2))
def test_engines_that_run_out_of_memory_lose_nothing_and_are_started_again(chunk: int) -> None:
    halvings = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        halvings += simulate(seed, 1 + seed % 8, starved=True).halvings
    assert halvings > SEEDS / 4


def test_engines_that_run_out_of_memory_lose_no_sequence() -> None:
    halvings = 0
    for seed in range(FIRST, FIRST + SEEDS // 2):
        halvings += simulate(seed, 1 + seed % 8, generating=True, starved=True).halvings
    assert halvings > SEEDS / 8


def test_the_schedules_show_every_answer_that_there_is() -> None:
    seen: set[str] = set()
    for seed in (*SHOW_ANSWERS, *range(1, 121)):
        seen |= simulate(seed, 1 + seed % 8).answers.keys()
        if seen >= ANSWERS:
            return
    pytest.fail(f"no schedule shows {ANSWERS - seen}")


def test_the_schedules_show_every_end_of_an_update_that_there_is() -> None:
    seen: set[str] = set()
    for seed in (*SHOW_UPDATES, *range(1, 121)):
        seen |= simulate(seed, 1 + seed % 8, updates=True).updates.keys()
        if seen >= UPDATES:
            return
    pytest.fail(f"no schedule shows {UPDATES - seen}")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 10))
def test_with_a_thousand_workers_too(seed: int) -> None:
    assert simulate(seed, 1000, updates=seed % 5 != 0).events > 10_000


@pytest.mark.parametrize("chunk", range(2))
def test_a_queue_that_is_too_small_for_all_loses_nothing_either(chunk: int) -> None:
    answers = 0
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        outcome = simulate(seed, 1 + seed % 8, packed=seed % 2 == 0, updates=seed % 3 == 0, crowded=True)
        answers += outcome.answers.get("result", 0)
    assert answers > SEEDS * 50


@pytest.mark.parametrize("chunk", range(3))
def test_texts_of_which_many_are_long_are_tokenized_next_to_each_other_and_lose_nothing_either(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, tokenize, long = 0, SimEngine.tokenize, list[bool]()

    def counted(engine: SimEngine, run: RunTokenize) -> None:
        long.append(run.task.long)
        tokenize(engine, run)

    monkeypatch.setattr(SimEngine, "tokenize", counted)
    for seed in range(FIRST + chunk * SEEDS, FIRST + (chunk + 1) * SEEDS):
        outcome = simulate(seed, 1 + seed % 8, updates=seed % 3 == 0, stops=seed % 4 == 0, lengthy=True)
        answers += outcome.answers.get("result", 0)
    assert answers > SEEDS * 30
    assert min(long.count(True), long.count(False)) > SEEDS, "many of both kinds"
