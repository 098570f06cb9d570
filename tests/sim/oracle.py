"""What every caller may hear: exactly one final answer a call, the right one, or an error that is justified.

The oracle knows what was asked and what went wrong in the world; it knows nothing of how the coordinator decides.
"""

import re

from enginepool.client.session.events import Answer, Fail
from enginepool.config import Limits
from enginepool.protocol.messages import Decode, ErrorReply, Generate, Generated, Result
from enginepool.protocol.messages.weights import Published
from tests.sim.adapting import AdapterOracle, SimChange
from tests.sim.commands import CommandOracle
from tests.sim.generated import Known, Weights, check_generated, passed
from tests.sim.leases import Leases
from tests.sim.offers import Offer
from tests.sim.traffic import Call

#: nothing in a simulation justifies these
NEVER = frozenset({"malformed", "unsupported", "protocol_version", "hello_required", "unauthorized", "superseded", "id_reused"})


class Oracle:
    """All calls of a simulation, and the world's record of what may be told to whom."""

    def __init__(self, max_attempts: int, bounded: bool) -> None:
        self.max_attempts = max_attempts
        #: the pool's bounds are so tight that `busy` is justified
        self.bounded = bounded
        self.limits = Limits()
        self.calls: dict[int, Call] = {}
        self.open: dict[int, Call] = {}
        #: by group: what was ever committed, and what engines were told to answer from without a commit, oldest first
        self.weights: dict[str, list[Weights]] = {}
        #: by group: how often a new run began
        self.runs: dict[str, int] = {}
        #: by group: why its weights were nowhere, once they were
        self.needed: set[str] = set()
        self.updates: dict[str, int] = {}
        self.leases = Leases()
        self.commands = CommandOracle()
        self.adapters = AdapterOracle()
        #: nothing goes wrong but links: an update that is right succeeds, if its publisher is not cut off for a whole lease
        self.gentle = False
        #: calls that an engine refused, or cut, because it was told to
        self.wronged: set[int] = set()
        self.cut: set[int] = set()
        #: workers that were lost while they ran only this call, by call
        self.trials_lost: dict[int, int] = {}
        self.workers_lost = 0
        self.down: set[str] = set()
        self.draining = False
        #: coordinators are stopped on purpose
        self.stops = False
        #: clients whose owner closed them
        self.closed: set[int] = set()
        self.counts: dict[str, int] = {}
        #: the engine that was last given a generation of a call, by the number of the call
        self.ran: dict[int, object] = {}
        #: the workers, by name, whose engines were given a part of a call, by the number of the call
        self.worked: dict[int, set[str]] = {}
        #: what happened to sequences that were generated, by kind
        self.streams: dict[str, int] = {}

    def add(self, call: Call) -> None:
        self.calls[call.uid] = call
        self.open[call.uid] = call

    def forget(self, call: Call) -> None:
        """The caller is gone: no one reads the answer."""
        self.open.pop(call.uid, None)

    def finished(self, now: float, call: Call, effect: Answer | Fail) -> None:
        """The caller hears its final answer."""
        assert not call.outcome, f"{call}: a second final answer: {effect}"
        assert call.submitted >= 0, f"{call}: answered before it was asked"
        call.outcome = "result" if isinstance(effect, Answer) else effect.failure.code
        self.open.pop(call.uid, None)
        self.counts[call.outcome] = self.counts.get(call.outcome, 0) + 1
        if isinstance(effect, Answer):
            if isinstance(effect.message, Generated):
                self._generated(call, effect)
                return
            if call.names[0] != "scores":
                self.counts[call.names[0]] = self.counts.get(call.names[0], 0) + 1
            assert isinstance(effect.message, Result)
            frames = [bytes(frame) for frame in effect.frames]
            if isinstance(call.score, Decode):
                self._decoded(call, effect.message, frames)
            else:
                self._right(call, effect.message, frames)
        else:
            self._justified(now, call, effect)

    def _right(self, call: Call, result: Result, frames: list[bytes]) -> None:
        assert not (call.bad or call.poison or call.choking or call.refused), f"{call}: answered, and should not be"
        weights = self.weights[self._name(call.score.group)]
        of_version = [i for i, one in enumerate(weights) if one.version == result.version]
        assert of_version, f"{call}: version {result.version}"
        right = [i for i in of_version if frames == call.expected(weights[i].content)]
        assert right, f"{call}: wrong scores"
        assert right[-1] >= call.floor or not weights[right[-1]].committed, f"{call}: version {result.version} is of yesterday"
        assert result.version >= call.score.min_version, f"{call}: version {result.version}"
        assert call.score.version in (None, result.version), f"{call}: version {result.version}, asked for {call.score.version}"
        assert [spec.name for spec in result.frames] == call.names, f"{call}: {result.frames}"
        assert result.frames[0].shape == (len(call.prompts), len(call.columns)), f"{call}: {result.frames}"
        assert sum(map(len, frames)) <= self.limits.max_message_bytes, f"{call}: an answer over the size limit"
        assert result.usage == (result.usage.__class__)(len(call.prompts), call.tokens), f"{call}: {result.usage}"
        assert result.forwards and (set(result.forwards) == {1} or call.uid in self.cut), f"{call}: {result.forwards}"
        assert result.workers, f"{call}: no worker"
        self._named(call, result)
        assert result.timings.queued_us >= 0 and result.timings.run_us >= 0, f"{call}: {result.timings}"

    def _decoded(self, call: Call, result: Result, frames: list[bytes]) -> None:
        assert frames == call.texts and [spec.name for spec in result.frames] == call.names, f"{call}: {result.frames}"
        assert result.usage == (result.usage.__class__)(len(call.prompts), call.tokens), f"{call}: {result.usage}"
        assert not result.forwards and len(result.workers) == 1, f"{call}: {result}"
        self._named(call, result)

    def _generated(self, call: Call, answer: Answer) -> None:
        assert isinstance(answer.message, Generated)
        # Weights of an exact version may pass before an engine has seen what is wrong with a sequence.
        passes = call.score.version is not None and any(end.reason == "interrupted" for end in answer.message.ended)
        wrong = call.bad or ((call.poison or call.choking or call.refused) and not passes)
        assert not wrong, f"{call}: answered, and should not be"
        weights = self.weights[self._name(call.score.group)]
        self._named(call, answer.message)
        assert call.generating is not None
        adapter, floor = call.generating.request.adapter, call.generating.floor
        known = Known(self._name(call.score.group), adapter, self.adapters.history, floor)
        for kind in check_generated(call, answer, weights, known):
            self.stream(kind)

    def works(self, uid: int, worker: str) -> None:
        """The engine of a worker was given a part of a call."""
        self.worked.setdefault(uid, set()).add(worker)

    def _named(self, call: Call, answer: Result | Generated) -> None:
        """An answer names workers that had a part of the call, each once. A worker that was given up has a longer name."""
        names = [name.partition("+")[0] for name in answer.workers]
        assert len({*answer.workers}) == len(names) and {*names} <= self.worked[call.uid], f"{call}: {names}"

    def stream(self, kind: str) -> None:
        """Something happened to a sequence that is generated."""
        self.streams[kind] = self.streams.get(kind, 0) + 1

    def sends(self, call: Call, request: Generate, epoch: int) -> None:
        """A client sends a request to generate, perhaps once more, to the coordinator of this epoch."""
        generating = call.generating
        generating.sends += 1
        generating.epoch = generating.epoch or epoch
        if len(request.frames) > len(generating.request.frames):
            self.stream("sent again" if generating.epoch == epoch else "sent to another coordinator")

    def _justified(self, now: float, call: Call, effect: Fail) -> None:
        failure = effect.failure
        code = failure.code
        told = f"{call}: {code}: {failure.message} {failure.evidence}"
        assert code not in NEVER, told
        if code == "busy":
            assert self.bounded and (not call.retry_busy or call.deadline is not None), told
        elif code == "too_large":
            # Its text as ids, its answer, or the two of them together; the package says how they count.
            answer, kept = 512 + len(call.prompts) * (2 + 4 * (len(call.columns) + call.hidden)), 1
            if call.generating is not None:
                sequences = len(call.prompts) * call.score.n
                new = sequences * call.score.sampling.max_new_tokens
                answer = 512 + sequences * (128 + 4 * call.score.columns) + 4 * call.score.prompt_columns
                answer += (
                    8 * new * call.score.hidden_states + 4 * (call.score.n * call.tokens + new) * call.score.routed_experts
                )
                kept = 2  # its tokens as they came, and the answer
            text = 4 * (call.tokens + len(call.prompts))
            message = 512 + 5 * len(call.columns) + sum(map(len, call.frames))
            whole = kept * answer + text + 2048 + 40 * len(call.columns) + sum(map(len, call.frames))
            limits = self.limits
            large = max(answer, message) > limits.max_message_bytes or text > 2 * limits.max_message_bytes
            assert large or whole > limits.window_bytes, told
        elif code == "deadline_exceeded":
            assert call.deadline is not None and now >= call.deadline, told
        elif code == "cancelled":
            assert call.cancelled, told
        elif code == "poisoned":
            assert len(failure.evidence) == self.max_attempts, told
            guilty = call.poison or call.choking
            assert guilty or self.trials_lost.get(call.uid, 0) >= self.max_attempts, f"{told}: innocent"
        elif code == "engine_error":
            assert call.refused or call.uid in self.wronged, told
        elif code == "pool_down":
            assert self._name(call.score.group) in self.down, told
        elif code == "needs_weights":
            assert self._name(call.score.group) in self.needed, told
        elif code == "version_passed":
            assert call.score.version is not None and passed(call.score.version, self.weights[self._name(call.score.group)]), (
                told
            )
        elif code == "bad_request" and failure.field == "adapter":
            assert call.generating is not None
            group, adapter = self._name(call.score.group), call.generating.request.adapter
            assert 0 in self.adapters.during(group, adapter, call.submitted, now), told
            self.stream("adapter not loaded")
        elif code in ("bad_request", "unknown_group"):
            assert call.bad == code, told
        elif code == "closed":
            assert call.client in self.closed, told
        else:
            raise AssertionError(told)

    def changed(self, now: float, change: SimChange, effect: Answer | Fail) -> None:
        """A publisher hears what became of an adapter."""
        excused = {"pool_down"} if change.group in self.down else set[str]()
        excused |= {"shutting_down"} if self.draining or self.stops else set()
        gentle = self.gentle and not self.stops
        self.adapters.finished(now, change, effect, gentle=gentle, excused=excused)

    def adapter_floor(self, group: str, adapter: str) -> int:
        """The earliest version of an adapter for what is asked now."""
        return self.adapters.floor(self._name(group), adapter)

    # --- weights -------------------------------------------------------------------------------------------------------

    def _name(self, group: str) -> str:
        return group or next(iter(self.weights))

    def may_answer(self, group: str, version: int) -> None:
        """Engines answer from other weights, although they were never committed."""
        self.weights[group].append(Weights(version, version, False))

    def commit(self, group: str, version: int, content: int, digest: str, *, run: int) -> None:
        """The journal says so. Within a run versions grow; the same one may come again with the same weights."""
        before = self.latest(group)
        told = f"version {version} of {group!r} with digest {digest!r}, after {before}"
        assert run > self.runs.get(group, 0) or version >= before.version, f"{told}: backwards"
        if run == self.runs.get(group, 0) and version == before.version and before.digest:
            assert digest == before.digest, f"{told}: one name for two sets of weights"
        self.runs[group] = run
        self.weights[group].append(Weights(version, content, True, digest, run))

    def floor(self, group: str) -> int:
        """The number of the latest commit."""
        weights = self.weights.get(self._name(group), [])
        return max((i for i, one in enumerate(weights) if one.committed), default=0)

    def latest(self, group: str) -> Weights:
        return self.weights[group][self.floor(group)]

    def published(self, offer: Offer, version: int, message: Published) -> None:
        """A publisher hears that its update is committed."""
        told = f"{offer}: {message}"
        assert not offer.flaw, told
        assert offer.fate == "commit", told
        assert message.version == version, told
        assert any(one.committed and one.version == version for one in self.weights[offer.group]), told
        # No worker may run on it yet: the one that loaded it may have died since, and its successor has it from the stager.
        assert message.record.outcome == "committed", told
        self._count("published")

    def known_as_published(self, offer: Offer, version: int, digest: str) -> None:
        """A publisher finds that its update is committed: by the journal, after a restart of the coordinator."""
        found = [one for one in self.weights[offer.group] if one.committed and one.version == version]
        if offer.transfer != "set_version" and not offer.partial:
            found = [one for one in found if one.digest == digest]
        assert found, f"{offer}: version {version} with {digest} was not committed"
        self._count("found published")

    def update_failed(self, offer: Offer, failure: ErrorReply, *, lapsed: bool) -> None:
        """A publisher hears that its update is not. `lapsed`: nothing of it reached the coordinator for a whole lease."""
        code, told = failure.code, f"{offer}: {failure.code}: {failure.message}"
        justified = code in ("publishing", "version_backwards") or "is ready" in failure.message
        alone = "has no stager" in failure.message  # `Watch.goes_on_without` asserts when that may be
        justified |= alone
        justified |= lapsed and re.search("publisher (is gone, or|was) silent", failure.message) is not None
        assert justified or not self.gentle or self.draining or self.stops, told
        if code == "weights_refused":
            assert offer.flaw in ("nan", "zero", "unknown", "missing", "shape"), told
        elif code == "bad_request":
            assert offer.transfer == "checkpoint" and offer.flaw == "unknown", told
        elif code == "unsupported":
            assert offer.flaw == "elsewhere" or alone, told
        elif code == "shutting_down":
            assert self.draining or self.stops, told
        elif code == "pool_down":
            assert offer.group in self.down, told
        else:
            assert code in ("publishing", "version_backwards", "update_aborted"), told
        self._count(code)

    def _count(self, outcome: str) -> None:
        self.updates[outcome] = self.updates.get(outcome, 0) + 1
