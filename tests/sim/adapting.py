"""Adapters that publishers load, replace and unload in a simulation: what they ask, what they may hear, and what is committed.

- A change has exactly one final answer, which is true, or an error that is justified.
- A version that an answer names was committed, and computed the tokens that the answer says.
- What is asked after a version was said to be loaded is of no earlier one.
- A request that names an adapter is refused for that only if it was not loaded at some time meanwhile.
"""

from random import Random
from zlib import crc32

from enginepool.client.session.events import Answer, Fail
from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.protocol.adapters import adapter_digest
from enginepool.protocol.messages import FrameSpec
from enginepool.protocol.messages.adapters import AdapterReport, LoadAdapter, UnloadAdapter
from tests.sim.generating import ADAPTERS

#: of every adapter that comes as tensors
FILES = (b"{}", b"tensors")
#: those that are loaded while engines run; the last one is never unloaded
LATER = ("x", "y", "z")


class SimChange:
    """What one publisher wants. `version` 0: that the adapter is unloaded. `bad`: the code that it must be refused with."""

    def __init__(self, client: int, group: str, name: str, version: int, at: float, timeout: float | None) -> None:
        self.client = client
        self.group = group
        self.name = name
        self.version = version
        self.at = at
        self.timeout = timeout
        self.bad = "bad_request" if name in ADAPTERS else ""
        self.tensors = version % 2 == 1
        #: when it was asked; negative before that
        self.asked = -1.0
        self.outcome = ""

    def question(self, id: int) -> tuple[LoadAdapter | UnloadAdapter, tuple[bytes, ...]]:
        """The message, and its frames."""
        if not self.version:
            return UnloadAdapter(id, self.name, self.group), ()
        message = LoadAdapter(id, self.name, self.version, self.group)
        if not self.tensors:
            message.path = f"/adapters/{self.name}-{self.version}"
            return message, ()
        message.digest = adapter_digest(*FILES)
        specs = zip(("config", "tensors"), FILES, strict=True)
        message.frames = [FrameSpec(name, "uint8", (len(data),)) for name, data in specs]
        return message, FILES

    def __repr__(self) -> str:
        who = f"client={self.client} asked={self.asked:.3f} {self.outcome}"
        return f"<SimChange {self.group}: {self.name}@{self.version} {who}>"


def make_changes(random: Random, groups: list[str], clients: int, span: float) -> list[SimChange]:
    """In the order in which they are asked, versions grow. Version 1 is committed before."""
    times = sorted(1.0 + span * random.random() for _ in range(random.randint(3, 24)))
    changes: list[SimChange] = []
    for number, at in enumerate(times):
        name = "a" if random.random() < 0.05 else random.choice(LATER)
        unload = name != LATER[-1] and random.random() < 0.15
        timeout = random.choice((None, None, 0.5, 20.0))
        group = random.choice(groups)
        changes.append(SimChange(random.randrange(clients), group, name, 0 if unload else number + 2, at, timeout))
    return changes


def first_versions() -> list[AdapterVersion]:
    """What is committed when a schedule begins."""
    return [AdapterVersion(name, 1, digest_of(path := f"/adapters/{name}-1"), path) for name in LATER]


def digest_of(path: str) -> str:
    """Of what lies there."""
    return f"{crc32(path.encode()):032x}"


class AdapterOracle:
    """What is committed, and what publishers may hear."""

    def __init__(self) -> None:
        self.open: list[SimChange] = []
        #: by group and name: (when, version) of each commit; version 0: it was unloaded
        self.history: dict[tuple[str, str], list[tuple[float, int]]] = {}
        #: by group and name: the highest version that a publisher heard to be loaded
        self._heard: dict[tuple[str, str], int] = {}
        #: loads that engines refused, or died of
        self.refused = 0
        self.closed: set[int] = set()
        #: outcomes of changes, by code; "" counts those that succeeded
        self.counts: dict[str, int] = {}

    def committed(self, now: float, group: str, adapters: list[AdapterVersion]) -> None:
        """The journal says so."""
        present = {one.name: one.version for one in adapters}
        for name in {*present, *(name for of, name in self.history if of == group)}:
            history = self.history.setdefault((group, name), [])
            before, version = history[-1][1] if history else 0, present.get(name, 0)
            assert not version or version >= before, f"{name} of {group} goes from version {before} to {version}"
            if version != before:
                history.append((now, version))

    def during(self, group: str, name: str, since: float, now: float) -> set[int]:
        """The versions that were committed at some time between these; 0: none was."""
        versions = [0]
        for at, version in self.history.get((group, name), []):
            versions = [*versions, version] if at >= since else [version]
            if at > now:
                break
        return set(versions)

    def floor(self, group: str, name: str) -> int:
        """The earliest version of what is asked now, of an adapter that is never unloaded."""
        return self._heard.get((group, name), 0) if name == LATER[-1] else 0

    def forget(self, change: SimChange) -> None:
        """The publisher is gone and hears no answer."""
        if change in self.open:
            self.open.remove(change)

    def finished(self, now: float, change: SimChange, effect: Answer | Fail, *, gentle: bool, excused: set[str]) -> None:
        """The publisher hears its final answer. `gentle`: no worker and no coordinator fails. `excused`: codes of the world."""
        assert not change.outcome, f"{change}: a second final answer: {effect}"
        assert change.asked >= 0, f"{change}: answered before it was asked"
        self.forget(change)
        if isinstance(effect, Fail):
            change.outcome = effect.failure.code
            self._count(change.outcome)
            self._justified(now, change, effect, gentle, excused)
            return
        change.outcome = "done"
        self._count("")
        report = effect.message
        # Without a worker that was ready, it is not known with what engines start.
        assert isinstance(report, AdapterReport) and not (change.bad and change.version), f"{change}: {report}"
        assert (report.group, report.name, report.version) == (change.group, change.name, change.version), f"{change}: {report}"
        versions = self.during(change.group, change.name, change.asked, now)
        assert change.version in versions, f"{change}: {report}; committed meanwhile: {versions}"
        key = change.group, change.name
        self._heard[key] = max(self._heard.get(key, 0), change.version)

    def _justified(self, now: float, change: SimChange, effect: Fail, gentle: bool, excused: set[str]) -> None:
        code, told = effect.failure.code, f"{change}: {effect.failure.code}: {effect.failure.message}"
        if code == "deadline_exceeded":
            assert change.timeout is not None and now >= change.asked + change.timeout, told
        elif code == "version_backwards":
            latest = max(self.during(change.group, change.name, 0.0, now))
            assert change.version <= latest, told
        elif code == "engine_error":
            assert self.refused and "refused" in effect.failure.message, told
        elif code == "update_aborted":
            why = effect.failure.message
            known = (
                "ready",
                "awake",
                "MemoryError",
                "it starts on weight version",
                "the engine starts with them again",
                "drained",
            )
            expected = any(one in why for one in known)
            assert not gentle or self.refused or expected, told
        elif code == "closed":
            assert change.client in self.closed, told
        else:
            assert code in (change.bad, "busy", *excused), told

    def _count(self, code: str) -> None:
        self.counts[code] = self.counts.get(code, 0) + 1
