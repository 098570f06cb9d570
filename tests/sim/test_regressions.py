"""Seeds that showed a bug once, and what it was. The smallest test of each is in `tests/core/test_machine_regressions.py`,
of updates in `tests/core/test_weights.py`, of workers in `tests/core/test_worker_machine.py`.

A seed means a schedule only as long as the simulator draws in the same order: a change of that order plants each bug again and
looks for the seed that shows it now.
"""

from typing import Any

import pytest

from tests.sim.simulation import simulate

SHOWED = [
    (1, 2, "text that came during a trial waited although a worker was open again"),
    (17, 2, "a suspect waited for the worker that was kept for it although another one was idle"),
    (17, 2, "a suspect waited while a worker was idle, after what stood before it had been dispatched"),
    (44, 5, "several texts that kill their worker were never alone, so none was found guilty and no answer came"),
    (38, 7, "without batches sent again after a new registration a healthy worker was killed for being slow"),
    (1387, 4, "text was not sent again after a new registration, and a healthy worker was killed for it"),
    (739, 4, "without leases extended after a stall of the coordinator a healthy worker was killed for silence"),
    (461, 6, "the last words of a dead process, read after its end was seen, brought it back"),
]

#: with updates; seed, workers, whether workers of most groups pack
UPDATES = [
    (610357, 6, False, "work was taken back from a worker that went on with it: its weights were committed once more"),
    (410822, 33, True, "of many workers one was always being asked again, so that missing weights were never reported"),
    (900793, 7, True, "a suspect text that was harmless could not be shed any more for a request of a higher priority"),
    (312925, 7, True, "a part that came back during the hand-over was given to an engine that takes weights"),
    (9900007, 6, False, "after a stall a worker had heard its coordinator later than it was, by a rounding"),
    (71030678, 7, False, "a message right before a stall was heard after it at its old time: a healthy worker was silent"),
    (30744, 6, True, "a version that was lost was published again with other weights, so that it named two sets of them"),
]

#: with generations; seed, workers, what else
GENERATIONS = [
    (
        2082,
        3,
        ("updates", "restarts"),
        "a sequence was stopped on a link that broke, its worker read it later, and ran it next to what filled its slots",
    ),
    (2, 3, ("updates", "faulty", "starved"), "the simulator expected that engines take an update whose names they do not know"),
    (
        7032,
        1,
        ("updates", "sleeping"),
        "a simulated stager gave up staged bytes that a restore had found, although the load of their update was still to come",
    ),
    (
        76005,
        6,
        ("updates", "sleeping"),
        "generations that named version 3 went on in their engines when versions began again, and got tokens of version 2",
    ),
    (
        835217,
        2,
        ("updates", "paced"),
        "a version without a digest was committed while a link was down: an engine that kept its sequences stood still",
    ),
    (
        835508,
        5,
        ("updates", "paced"),
        "an answer was lost and dropped: the client got tokens of another run of the same request, after its end",
    ),
    (905952, 3, ("updates", "paced"), "the simulator began a load in the middle of a step, when the one before led to a pause"),
    (
        913559,
        2,
        ("updates", "restarts", "faulty"),
        "an operator restarted a worker while it started on a new checkpoint, and the update was given up for it",
    ),
    (
        939018,
        4,
        ("updates", "paced", "faulty"),
        "an operator restarted a worker in an update that had a new link and was not ready on it: the update was given up",
    ),
    (2414, 7, ("sleeping",), "a pause was confirmed although another one had failed, and let the group go on"),
    (1266, 3, ("updates", "sleeping"), "a group was called paused while a worker of an earlier coordinator might work"),
    (1664, 1, ("sleeping",), "the simulator took a request that was sent again with a whole sequence for one that had begun"),
    (1644, 5, ("updates", "sleeping"), "the simulator expected no report to a command that came again after its refusal"),
    (204057, 4, ("updates", "sleeping"), "the simulator expected that a dead engine had taken what its worker then cancelled"),
    (1850, 3, ("sleeping",), "the simulator expected that no command comes again after the group has gone on"),
    (
        1234,
        3,
        ("updates", "sleeping", "adapting"),
        "the simulator did not see that versions began again, where a new run named the same weights by the same version",
    ),
    (40895, 2, ("updates", "sleeping", "adapting"), "a worker that refused to wake while it took weights was not told again"),
    (
        50984,
        4,
        ("sleeping",),
        "sequences that stopped for rows that run alone were given the same worker again, and stopped again, without an end",
    ),
    (30372, 7, ("sleeping",), "the simulator never answered a pause whose generations were all cancelled meanwhile"),
    (10544, 1, ("sleeping",), "the simulator counted tasks that generate after all batches of rows that were sent with them"),
    (12342, 7, ("updates", "sleeping"), "the simulator held a coordinator to an external worker that it had given up"),
    (
        11791,
        8,
        ("updates", "sleeping"),
        "a worker that slept right after a restore that failed was asked for another one meanwhile",
    ),
    (440, 1, ("updates", "external"), "a suspect text that ended while it was tokenized left its payload where it had waited"),
]

#: in rarer surroundings; seed, workers, flags
OTHERS = [
    (
        178,
        3,
        ("packed", "unloadable", "crowded", "embedding"),
        "text with hidden states was told to come back without end, when its worker was given up before it was ready",
    ),
    (207004, 7, ("updates", "sleeping", "generating"), "a worker that refused to sleep during a restore was not told again"),
    (11670, 7, ("updates", "sleeping"), "a worker that slept right after its restore was asked for another one meanwhile"),
    (11215, 8, ("sleeping",), "a new client had credit in a signature whose only client had its turns in another one"),
    (3255, 8, ("crowded",), "a cancelled request cost its client a turn in another signature"),
    (
        264,
        1,
        ("generating", "adapting", "sleeping", "external", "updates"),
        "an interrupted sequence had the routed experts of a message for which its worker was lost",
    ),
    (643, 4, ("external", "stops", "sleeping"), "the simulator held a coordinator to a worker that another one had given up"),
]


@pytest.mark.parametrize(("seed", "workers"), sorted({(seed, workers) for seed, workers, _ in SHOWED}))
def test_what_failed_once_holds(seed: int, workers: int) -> None:
    assert simulate(seed, workers).events > 0


@pytest.mark.parametrize(("seed", "workers", "packed"), [one[:3] for one in UPDATES])
def test_what_failed_once_in_updates_holds(seed: int, workers: int, packed: bool) -> None:
    assert simulate(seed, workers, packed=packed, updates=True).events > 0


@pytest.mark.parametrize(("seed", "workers", "flags"), [one[:3] for one in GENERATIONS])
def test_what_failed_once_in_generations_holds(seed: int, workers: int, flags: tuple[str, ...]) -> None:
    options: dict[str, Any] = dict.fromkeys(flags, True)
    assert simulate(seed, workers, generating=True, **options).events > 0


@pytest.mark.parametrize(("seed", "workers", "flags"), [one[:3] for one in OTHERS])
def test_what_failed_once_elsewhere_holds(seed: int, workers: int, flags: tuple[str, ...]) -> None:
    options: dict[str, Any] = dict.fromkeys(flags, True)
    assert simulate(seed, workers, **options).events > 0
