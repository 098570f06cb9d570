"""Conversations: calls whose prompt is the history of the call before, as those of a client's session.

While things fail, turns follow calls that were answered, and the oracle checks each turn by itself. Once all is quiet, several
conversations are held at once, and each turn must go to the engine that has its history.
"""

from array import array
from collections.abc import Generator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

from enginepool.client.session.events import Answer, Fail
from enginepool.coordinator.core.worker import Worker
from enginepool.protocol import prefix_blocks
from enginepool.protocol.messages import FrameSpec, Generate, Generated, Sampling
from tests.sim.generating import Generating
from tests.sim.traffic import CALLS, FILLER, POISON, REFUSED, Call, mark_of

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

#: of prefixes, in the coordinator and in engines: histories are short here
BLOCK = 4
#: at once, and turns of each, in the quiet
CONVERSATIONS, TURNS = 3, 4


@contextmanager
def short_blocks() -> Generator[None]:
    """The coordinator's affinity is by blocks of a few tokens."""
    usual, prefix_blocks.BLOCK = prefix_blocks.BLOCK, BLOCK
    try:
        yield
    finally:
        prefix_blocks.BLOCK = usual


class Conversations:
    """The conversations of one schedule."""

    def __init__(self, simulation: "Simulation", random: Random) -> None:
        self._simulation = simulation
        self._random = random
        #: of calls that were answered: prompt and output, and how many tokens of the prompt were cached
        self._answers: dict[int, tuple[bytes, int]] = {}

    def answered(self, call: Call, effect: Answer | Fail, *, go_on: bool) -> None:
        """A call has its final answer: perhaps its caller goes on."""
        if not isinstance(effect, Answer) or not isinstance(effect.message, Generated) or len(call.generating.brought) > 1:
            return
        history = call.prompts[0] + call.generating.brought[0] + bytes(effect.frames[0])
        self._answers[call.uid] = history, effect.message.usage.cached_tokens
        simulation = self._simulation
        if go_on and not call.cancelled and self._random.random() < 0.6:
            name = call.score.group or next(iter(simulation.plan.kinds))
            following = self._turn(call.uid, call.client, name, history)
            if following is not None:
                following.cancel_at = None
                following.score.min_version = call.score.min_version
                simulation.oracle.stream("next turn")
                following.arrival = simulation.world.now + self._random.choice((0.0, 0.1, 2.0))
                simulation.oracle.add(following)
                simulation.world.at(following.arrival, simulation.clients[call.client].submit, following)

    def _turn(self, uid: int, client: int, group: str, history: bytes) -> Call | None:
        """The call that goes on after `history`; None: there is no room for one."""
        random, can = self._random, self._simulation.plan.capabilities[group]
        new = array("i", [random.randrange(*FILLER) for _ in range(random.randint(1, 4))]).tobytes()
        prompt = history + new
        tokens = random.randint(1, 6)
        inside = array("i", prompt)
        if len(inside) + tokens > min(can.context, can.inflight_tokens) or {POISON, REFUSED} & {*inside}:
            return None
        call = Call(uid, client, self._simulation.world.now)
        specs = [FrameSpec("items", "int32", (len(inside),)), FrameSpec("item_lengths", "uint32", (1,))]
        request = Generate(0, specs, group, 1, Sampling(max_new_tokens=tokens, temperature=0.0), random.random() < 0.5)
        call.score, call.prompts, call.tokens = request, [prompt], len(inside)
        call.frames = (prompt, array("I", [len(inside)]).tobytes())
        call.generating = Generating(request, [b""], 0.0)
        return call

    # --- in the quiet ------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Nothing fails any more, and no one else asks: every turn finds its history."""
        for name, can in self._simulation.plan.capabilities.items():
            if "generate" in can.operations:
                self._hold(name)

    def _hold(self, group: str) -> None:
        simulation, oracle = self._simulation, self._simulation.oracle
        client = next((client for client in simulation.clients if not client.gone), None)
        first = max(oracle.calls, default=-1) + 1
        workers = self._able(group)
        uids = list(range(first, min(first + min(len(workers), CONVERSATIONS), CALLS)))
        if client is None:
            return
        histories = {uid: array("i", mark_of(uid)).tobytes() for uid in uids}
        before = dict[int, object]()
        for turn in range(TURNS):
            calls = [self._turn(uid, client.index, group, history) for uid, history in histories.items()]
            self._random.shuffle(calls)
            asked = [call for call in calls if call is not None]
            for call in asked:
                oracle.add(call)
                client.submit(call)
            simulation.settle()
            if any(call.outcome != "result" for call in asked) or self._able(group) != workers:
                return
            for call in asked if turn else ():
                # A worker may have room for one of them only. What runs a second time is no next turn.
                if list(before.values()).count(before[call.uid]) == 1 and call.generating.sends == 1:
                    assert oracle.ran[call.uid] is before[call.uid], f"{call}: turn {turn} is not where its history is"
                    cached, whole = self._answers[call.uid][1], len(histories[call.uid]) // 4 // BLOCK * BLOCK
                    assert cached >= whole, f"{call}: {cached} tokens were cached, of a history of {whole}"
                    oracle.stream("found its history")
            before = {call.uid: oracle.ran[call.uid] for call in asked}
            histories = {call.uid: self._answers[call.uid][0] for call in asked}

    def _able(self, group: str) -> list[Worker]:
        workers = self._simulation.coordinator.machine.core.groups[group].workers.values()
        return [one for one in workers if one.open and one.capabilities and "generate" in one.capabilities.operations]
