"""One trainer, so many receivers, one model: the processes of the weights benchmark, and what is measured on them in turn.

All of them start at once, because engines take their time; while one kind is measured the others wait.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.processes import Child, free_port
from bench.score.contestants import watch
from bench.score.workloads import Shape
from bench.table import Row
from bench.weights.figures import (
    FLAT,
    LOADED,
    OURS_DIRECT,
    OURS_STAGED,
    PER_TENSOR,
    RAW,
    Answer,
    Passed,
    Update,
    gigabytes,
    load_rows,
    longest_gap_ms,
    size_of,
    update_rows,
    wrong_versions,
)
from enginepool.config import GroupConfig, PoolConfig, encode_config

#: seconds for engines to start, and for one order to be carried out
START_S, ORDER_S = 300.0, 60.0
#: load runs so long before the first update
STEADY_S = 2.0


@dataclass(frozen=True)
class Burden:
    """Load during updates: requests of `shape`, so many unanswered at a time, for so many updates."""

    name: str
    shape: Shape
    in_flight: int
    updates: int


@dataclass(frozen=True)
class Scale:
    """How much is measured. `bare`: SGLang's own updates too; `engine`, `options`: of the pool's group."""

    buckets: tuple[int, ...]
    burdens: tuple[Burden, ...]
    idle: int = 5
    direct: int = 4
    bare: bool = True
    engine: str = "sglang"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Field:
    """Starts the processes, and hands them to the stack, which stops them."""

    def __init__(
        self,
        setting: str,
        model: Path,
        device: str,
        gpus: list[str],
        receivers: int,
        scale: Scale,
        scratch: Path,
        stack: ExitStack,
        say: Callable[[str], None],
    ) -> None:
        self.rows: list[Row] = []
        self._setting = setting
        self._model = model
        self._device = device
        self._gpus = gpus
        self._count = receivers
        self._scale = scale
        self._scratch = scratch
        self._stack = stack
        self._say = say
        self._backend = "nccl" if device == "cuda" else "gloo"
        self._raw: dict[int, float] = {}
        self._scores: dict[str, Any] = {}
        self._version = 0
        self._groups = 0
        self._began = time.monotonic()
        self._started_s = 0.0
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._trainer = self._child(["-m", "bench.weights.trainer", device, str(model)], 0)
        self._receivers = [self._child(["-m", "bench.weights.raw", device], 1 + i) for i in range(receivers)]
        self._bare: list[Child] = []
        if scale.bare:
            wanted = {"model": str(model), "device": device, "options": dict(scale.options)}
            argv = ["-m", "bench.peers.bare_updates", msgspec.json.encode(wanted).decode()]
            self._bare = [self._child(argv, 1 + i) for i in range(receivers)]
        self._daemon = self._pool()
        self._load = self._child(["-m", "bench.weights.load", self.address], None)
        self.nbytes = int(self._heard(self._trainer.hear(START_S))["bytes"])
        self._listening: str = self._ask(self._trainer, do="listen")["address"]
        for receiver in self._receivers:
            receiver.hear(START_S)
        self._load.hear(START_S)

    def _child(self, argv: list[str], rank: int | None) -> Child:
        env = {"CUDA_VISIBLE_DEVICES": "" if rank is None else self._gpus[rank]} if self._device == "cuda" else {}
        child = Child(argv, scratch=self._scratch, env=env)
        watch(self._stack, child, None)
        return child

    def _pool(self) -> Child:
        scale = self._scale
        group = GroupConfig(model=str(self._model), device=self._device, options=dict(scale.options), workers=self._count)
        if self._device == "cuda":
            group = msgspec.structs.replace(group, gpus=self._gpus[1 : 1 + self._count])
        group = msgspec.structs.replace(group, engine=scale.engine)
        config = PoolConfig(groups={"score": group}, listen=self.address, state_dir=str(self._scratch / "state"))
        env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
        daemon = Child(["-m", "enginepool.coordinator.daemon"], scratch=self._scratch, env=env, speaks=False)
        watch(self._stack, daemon, signal.SIGTERM)
        return daemon

    # --- talking --------------------------------------------------------------------------------------------------------

    def _ask(self, child: Child, timeout: float = ORDER_S, **order: object) -> Any:
        return self._heard(child.ask(order, timeout))

    def _heard(self, answer: Any) -> Any:
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(str(answer["error"]))  # pyright: ignore[reportUnknownArgumentType]
        return answer  # pyright: ignore[reportUnknownVariableType]

    def _add(self, what: str, who: str, value: float, unit: str, ratio: float | None = None) -> None:
        self._keep([Row(f"{self._setting}, {what}", who, value, unit, ratio)])

    def _keep(self, rows: list[Row]) -> None:
        for row in rows:
            ratio = "" if row.ratio is None else f" ({row.ratio:.3g} x)"
            self._say(f"  {row.what}, {row.who}: {row.value:.4g} {row.unit}{ratio}")
        self.rows += rows

    def _join(self, children: list[Child], *, engines: bool = False) -> str:
        self._groups += 1
        name, world = f"group-{self._groups}", 1 + len(children)
        for rank, child in enumerate(children, 1):
            child.tell({
                "do": "join", "address": self._listening, "name": name, "world": world, "rank": rank, "backend": self._backend,
            })  # fmt: skip
        self._ask(self._trainer, do="join", name=name, world=world, backend=self._backend, engines=engines)
        for child in children:
            self._heard(child.hear(ORDER_S))
        return name

    def ready(self) -> None:
        """Wait until all is started: nobody who still starts disturbs a measurement."""
        ready = self._ask(self._load, START_S, do="connect", workers=self._count)
        self._started_s = ready["at"] - self._began
        self._add("start of the pool", OURS_STAGED, self._started_s, "s")
        self._ask(self._trainer, do="connect", address=self.address)
        self._scores["pool, as loaded"] = self._score()
        for engine in self._bare:
            engine.hear(START_S)

    # --- the others -----------------------------------------------------------------------------------------------------

    def raw(self) -> None:
        """The same bytes, broadcast in the same buckets."""
        name = self._join(self._receivers)
        for bucket in self._scale.buckets:
            order = {"nbytes": self.nbytes, "bucket_bytes": bucket, "times": 6}
            for receiver in self._receivers:
                receiver.tell({"do": "receive"} | order)
            took: list[list[float]] = [self._ask(self._trainer, do="raw", name=name, **order)["seconds"]]
            took += [self._heard(receiver.hear(ORDER_S))["seconds"] for receiver in self._receivers]
            seconds = float(np.median(np.max(took, axis=0)[1:]))
            speed = self._raw[bucket] = gigabytes(self.nbytes, seconds)
            self._add(f"{size_of(bucket)}, repeated: transfer", RAW, speed, "GB/s", 1.0)
            self._add(f"{size_of(bucket)}, repeated: transfer takes", RAW, 1000 * seconds, "ms")
        self._ask(self._trainer, do="leave", name=name)
        for receiver in self._receivers:
            self._ask(receiver, do="leave")
            receiver.stop()

    def bare(self) -> None:
        """SGLang's own updates, into engines without a pool."""
        self._scores["bare, as loaded"] = self._ask(self._bare[0], do="score", shape=self._shape())["scores"]
        name = self._join(self._bare, engines=True)
        which = "other"
        for who, bucket, flat in [(PER_TENSOR, 0, False), *((FLAT, bucket, True) for bucket in self._scale.buckets)]:
            calls = self._ask(self._trainer, do="calls", bucket_bytes=bucket)["calls"]
            took: list[float] = []
            for _ in range(1 + self._scale.idle):
                for engine in self._bare:
                    engine.tell({"do": "update", "group": name, "calls": calls, "flat": flat})
                self._ask(self._trainer, do="send", name=name, which=which, bucket_bytes=bucket, flat=flat)
                took.append(max(self._heard(engine.hear(ORDER_S))["seconds"] for engine in self._bare))
                if which == "other" and "bare, other" not in self._scores:
                    self._scores["bare, other"] = self._ask(self._bare[0], do="score", shape=self._shape())["scores"]
                which = "first" if which == "other" else "other"
            for kind, seconds in (("first", took[0]), ("repeated", float(np.median(took[1:])))):
                speed = gigabytes(self.nbytes, seconds)
                raw = self._raw.get(bucket or self._scale.buckets[0])
                self._add(f"{size_of(bucket)}, {kind}: transfer", who, speed, "GB/s", speed / raw if raw else None)
                self._add(f"{size_of(bucket)}, {kind}: transfer takes", who, 1000 * seconds, "ms")
        self._ask(self._trainer, do="leave", name=name)
        for engine in self._bare:
            self._ask(engine, do="end")
            engine.stop()

    # --- the pool -------------------------------------------------------------------------------------------------------

    def staged(self) -> None:
        """Updates of a pool that nobody asks anything, and what its engines say then."""
        for bucket in self._scale.buckets:
            updates = [self._publish("staged", bucket) for _ in range(1 + self._scale.idle)]
            self._keep(update_rows(self._setting, self.nbytes, Passed(OURS_STAGED, bucket, updates), self._raw.get(bucket)))
            if "pool, other" not in self._scores:
                self._scores["pool, other"] = self._score_after("other", bucket)
                self._scores["pool, first"] = self._score_after("first", bucket)
                self._same("weights published again, against those loaded by the same engine", "pool, first", "pool, as loaded")
                self._same("other weights, against SGLang's own update", "pool, other", "bare, other")
                self._same("weights published, against those loaded by another engine", "pool, first", "bare, as loaded")
                self._differ()

    def loaded(self) -> None:
        """Updates under load."""
        bucket = self._scale.buckets[0]
        for burden in self._scale.burdens:
            before = self._version
            shape = msgspec.to_builtins(burden.shape)
            self._ask(self._load, do="begin", shape=shape, in_flight=burden.in_flight)
            time.sleep(STEADY_S)  # what is measured is a length of time
            updates = [self._publish("staged", bucket) for _ in range(burden.updates)]
            time.sleep(1.0)
            answers, failures = self._stopped()
            phases: dict[int, dict[str, int]] = dict(self._ask(self._load, do="history")["phases"])
            updates = [msgspec.structs.replace(update, phases=phases[update.version]) for update in updates]
            # The group has formed already: none of these is a first one.
            passed = Passed(LOADED, bucket, [updates[0], *updates])
            whole = f"{self._setting}, {burden.name}"
            rows = update_rows(whole, self.nbytes, passed, self._raw.get(bucket))
            self._keep([row for row in rows if ", first: " not in row.what])
            self._keep(load_rows(whole, answers, failures, updates, before))

    def direct(self) -> None:
        """Straight into the engines."""
        bucket = self._scale.buckets[0]
        updates = [self._publish("direct", bucket) for _ in range(1 + self._scale.direct)]
        self._keep(update_rows(self._setting, self.nbytes, Passed(OURS_DIRECT, bucket, updates), self._raw.get(bucket)))

    def digests(self) -> None:
        """What every engine holds now is what was sent last."""
        sent = self._publish("staged", self._scale.buckets[0]).digest
        held = self._ask(self._load, do="digests")["digests"]
        wrong = sum(digest != sent for digest in held) + self._count - len(held)
        self._add("engines with another digest than was sent", OURS_STAGED, wrong, "")

    def kill(self) -> None:
        """A worker dies in the middle of an update: who goes on, and when is it back?"""
        bucket, burden = self._scale.buckets[0], self._scale.burdens[0]
        # Of what went straight into the engines nobody keeps a copy.
        self._publish("staged", bucket)
        committed = self._version
        self._ask(self._load, do="begin", shape=msgspec.to_builtins(burden.shape), in_flight=burden.in_flight)
        time.sleep(STEADY_S)
        self._ask(self._trainer, do="start", version=committed + 1, which="other", bucket_bytes=bucket)
        victim = next(pid for pid, stage, _ in self._workers() if stage == "ready")
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        ended = self._trainer.ask({"do": "finish"}, ORDER_S)
        self._say(f"  the update ended: {ended}")
        self._add("worker killed: the update was aborted after", OURS_STAGED, time.monotonic() - killed, "s")
        while not self._back(victim, committed):
            if time.monotonic() - killed > START_S:
                raise RuntimeError(f"the killed worker is not back: {self._workers()}")
            time.sleep(0.1)
        back = time.monotonic()
        again = self._publish("staged", bucket)
        answers, failures = self._stopped()
        self._add("the killed worker is back on the committed weights after", OURS_STAGED, back - killed, "s")
        later = back - killed - self._started_s
        self._add("the killed worker is back after more than its start", OURS_STAGED, later, "s")
        gap = longest_gap_ms(answers, (killed, back))
        self._add("worker killed: longest time without an answer of the pool", OURS_STAGED, gap, "ms")
        self._add("worker killed: requests without an answer", OURS_STAGED, failures, "")
        self._add("worker killed: answers of a wrong version", OURS_STAGED, wrong_versions(answers, [again], committed), "")
        self._add("worker killed: the next update takes", OURS_STAGED, again.ended - again.began, "s")

    # --- pieces ---------------------------------------------------------------------------------------------------------

    def _shape(self) -> object:
        return msgspec.to_builtins(self._scale.burdens[0].shape)

    def _score(self) -> Any:
        return self._ask(self._load, do="score", shape=self._shape())["scores"]

    def _score_after(self, which: str, bucket: int) -> Any:
        self._publish("staged", bucket, which)
        return self._score()

    def _publish(self, transfer: str, bucket: int, which: str = "") -> Update:
        version = self._version + 1
        which = which or ("other", "first")[version % 2]
        said = self._ask(self._trainer, do="publish", version=version, which=which, transfer=transfer, bucket_bytes=bucket)
        self._version = version
        record = said["record"]
        self._say(f"  version {version}, {transfer}: {record.get('phases')} {record.get('message', '')}")
        return Update(said["began"], said["flowing"], said["ended"], version, record["phases"], record.get("digest", ""))

    def _stopped(self) -> tuple[list[Answer], int]:
        said = self._ask(self._load, do="stop")
        for failure in said["failures"][:3]:
            self._say(f"  a request failed: {failure}")
        return msgspec.convert(said["answers"], list[Answer]), len(said["failures"])

    def _workers(self) -> list[tuple[int, str, int | None]]:
        return self._ask(self._load, do="workers")["workers"]

    def _back(self, victim: int, version: int) -> bool:
        ready = [pid for pid, stage, holds in self._workers() if stage == "ready" and holds == version]
        return victim not in ready and len(ready) == self._count

    def _same(self, what: str, mine: str, theirs: str) -> None:
        if mine in self._scores and theirs in self._scores:
            difference = float(np.abs(np.subtract(self._scores[mine], self._scores[theirs])).max())
            self._add(f"largest difference of scores: {what}", OURS_STAGED, difference, "")

    def _differ(self) -> None:
        difference = float(np.abs(np.subtract(self._scores["pool, other"], self._scores["pool, first"])).max())
        self._add("largest difference of scores: the other weights, against the first", OURS_STAGED, difference, "")
