"""When prompts are handed to SGLang's scheduler, so that prefills and decodes take turns. Pure but for asyncio: no SGLang here.

SGLang runs a prefill whenever a prompt waits in its queue, before any decode. That has two costs:

- Prompts that arrive together are prefilled one forward after the other, before one of them decodes. Sequences of one length
  then also end together, and their successors wait for each other in the same way.
- Prompts that arrive one by one get a forward each, and each stops all sequences that decode.

So prompts wait here and are handed over in rounds: what one prefill forward takes, and the next round once that has been
computed and a few decodes have run. Sequences of a lower priority do not delay a round. While those of a higher priority
decode, rounds are shorter and fewer: each stops all of them for as long as it takes.

Media and grammars of a prompt are prepared after it was handed over, which may take a minute. No other prompt waits for more
than PREPARED_S of that.
"""

import asyncio
import heapq
from collections import Counter
from typing import Literal

#: Decodes between two prefills, if the second does not fill its forward: one for each `_DECODING` sequences that decode.
MOST_STEPS, _DECODING = 4, 8
#: By what the tokens of a round are divided while a higher priority decodes. MOST_STEPS decodes are between two such rounds.
SHORT = 4
#: A prompt whose media or grammar are prepared counts as one of its round for so many seconds; most are computed by then.
PREPARED_S = 0.5


class PrefillAdmission:
    """Prompts that wait for their prefill, and the sequences that decode meanwhile.

    Args:
        room: tokens of prompts that SGLang computes in one forward.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        #: tokens of prompts that were handed over and have no first token yet, by priority; not those prepared for long
        self._inside = Counter[int]()
        #: sequences that have a first token, and not their last, by priority
        self._decoding = Counter[int]()
        #: decodes since the last prefill; whether the forward that is being read was a prefill
        self._steps, self._began = 0, False
        #: (−priority, order of arrival, sequence); those that were given up are dropped when they are first
        self._waiting: list[tuple[int, int, Prefill]] = []
        self._waiting_tokens = 0
        self._arrived = 0

    def forward_done(self) -> None:
        """A forward of the engine is over, and `began` was called for each of its sequences that has its first token."""
        self._steps = 0 if self._began else self._steps + 1
        self._began = False
        self._admit()

    def wait(self, one: "Prefill") -> None:
        """The prompt of a sequence waits."""
        self._arrived += 1
        heapq.heappush(self._waiting, (-one.priority, self._arrived, one))
        self._waiting_tokens += one.tokens
        self._admit()

    def began(self, one: "Prefill") -> None:
        """A sequence whose prompt was handed over has its first token."""
        self._take_out(one)
        self._decoding[one.priority] += 1
        self._began = True
        one.state = "decodes"

    def over(self, one: "Prefill") -> None:
        """A sequence has ended, or is not wanted any more."""
        self._take_out(one)
        one.state = "over"
        self._admit()

    def _count_no_longer(self, one: "Prefill") -> None:
        """What is prepared for a prompt takes long."""
        if one.state == "inside":
            self._take_out(one)
            one.inside = 0
            self._admit()

    def _take_out(self, one: "Prefill") -> None:
        if one.state == "waits":
            self._waiting_tokens -= one.tokens
        elif one.state != "over":
            counts, count = (self._inside, one.inside) if one.state == "inside" else (self._decoding, 1)
            counts[one.priority] -= count
            if not counts[one.priority]:
                del counts[one.priority]

    def _admit(self) -> None:
        """Hand over what may be handed over now: the highest priority first, then in the order of arrival."""
        opened = False
        while self._waiting:
            one = self._waiting[0][2]
            if one.state == "waits" and not one.turn.done():  # a task that was cancelled calls `over` a turn of the loop later
                inside = _from(self._inside, one.priority)
                room = self._room_for(one.priority, inside, opened)
                if inside + one.tokens > room and (inside or not room):
                    return
                opened = True
                self._take_out(one)
                self._inside[one.priority] += one.inside
                one.state = "inside"
                one.turn.set_result(None)
                if one.prepared:
                    asyncio.get_running_loop().call_later(PREPARED_S, self._count_no_longer, one)
            heapq.heappop(self._waiting)

    def _room_for(self, priority: int, inside: int, opened: bool) -> int:
        """Tokens that may be inside once a prompt of this priority is handed over; 0: it waits for the next round.

        Args:
            inside: those that are there now, of this priority and higher ones.
            opened: a round has just begun.
        """
        decoding = _from(self._decoding, priority)
        if not decoding:
            return 2 * self._room  # while one forward runs, the prompts of the next one wait in SGLang's queue
        if not opened and inside:
            return 0
        if _from(self._decoding, priority + 1) and not (opened and _from(self._inside, priority + 1)):
            # A round that prompts of a higher priority have opened is filled up by lower ones.
            return max(1, self._room // SHORT) if opened or self._steps >= MOST_STEPS else 0
        enough = self._steps >= min(MOST_STEPS, decoding // _DECODING)
        return self._room if opened or enough or self._waiting_tokens >= self._room else 0


class Prefill:
    """One sequence, from before its prompt is handed over until it has ended; `over` must be called then.

    prepared: it has media or a grammar. inside: its tokens, as long as they count once it is handed over.
    """

    __slots__ = ("_admission", "inside", "prepared", "priority", "state", "tokens", "turn")

    def __init__(self, admission: PrefillAdmission, tokens: int, priority: int, *, prepared: bool = False) -> None:
        self._admission, self.tokens, self.priority = admission, tokens, priority
        self.inside, self.prepared = tokens, prepared
        self.state: Literal["waits", "inside", "decodes", "over"] = "waits"
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        admission.wait(self)

    def began(self) -> None:
        """It has its first token."""
        if self.state == "inside":
            self._admission.began(self)

    def over(self) -> None:
        """It has ended, or is not wanted any more. Idempotent."""
        self._admission.over(self)


def _from(counts: Counter[int], priority: int) -> int:
    """The sum of all of this priority and higher ones."""
    return sum(count for one, count in counts.items() if one >= priority)
