"""One trainer, so many receivers, one model: the processes of the weights benchmark, and how they are spoken to.

All but SGLang's own engines start at once, because engines take their time; while one kind is measured the others wait.
"""

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
from bench.weights.figures import OURS_STAGED, Answer, Update
from enginepool.config import Device, GroupConfig, PoolConfig
from enginepool.config_loader import encode_config

#: seconds for engines to start, and for one order to be carried out
START_S, ORDER_S = 300.0, 60.0
#: how often workers that start are looked at
LOOK_S = 0.1
#: of a worker, while its engine starts
ENGINE_STARTS = ("loading", "compiling")


@dataclass(frozen=True)
class Burden:
    """Load during updates: requests of `shape`, so many unanswered at a time, for so many updates."""

    name: str
    shape: Shape
    in_flight: int
    updates: int


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    `continuous_s`: seconds for which updates follow each other without pause. `engine`, `options`: of the pool's group.
    """

    buckets: tuple[int, ...]
    burdens: tuple[Burden, ...]
    idle: int = 5
    direct: int = 4
    continuous_s: float = 3.0
    engine: str = "sglang"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Field:
    """Starts the processes, and hands them to the stack, which stops them."""

    def __init__(
        self,
        setting: str,
        model: Path,
        device: Device,
        gpus: list[str],
        receivers: int,
        scale: Scale,
        scratch: Path,
        stack: ExitStack,
        say: Callable[[str], None],
    ) -> None:
        self.rows: list[Row] = []
        self.setting = setting
        self.scale = scale
        self.count = receivers
        self.say = say
        self.scores: dict[str, Any] = {}
        #: of each worker: what it does, and since when
        self._stages: dict[str, tuple[str, float]] = {}
        #: of each worker: when its engine began to start
        self._loading: dict[str, float] = {}
        #: of each worker: seconds that the last start of its engine took
        self.engine_s: dict[str, float] = {}
        self.version = 0
        self.backend = "nccl" if device == "cuda" else "gloo"
        self._model = model
        self._device: Device = device
        self._gpus = gpus
        self._scratch = scratch
        self._stack = stack
        self._groups = 0
        self._began = time.monotonic()
        self.started_s = 0.0
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.trainer = self._child(["-m", "bench.weights.trainer", device, str(model)], 0)
        self.receivers = [self._child(["-m", "bench.peers.receiver", device], 1 + i) for i in range(receivers)]
        self._daemon = self._pool()
        self.load = self._child(["-m", "bench.weights.load", self.address], None)
        self.nbytes = int(self.heard(self.trainer.hear(START_S))["bytes"])
        self._listening: str = self.ask(self.trainer, do="listen")["address"]
        for receiver in self.receivers:
            receiver.hear(START_S)
        self.load.hear(START_S)

    def _child(self, argv: list[str], rank: int | None) -> Child:
        env = {"CUDA_VISIBLE_DEVICES": "" if rank is None else self._gpus[rank]} if self._device == "cuda" else {}
        child = Child(argv, scratch=self._scratch, env=env)
        watch(self._stack, child, None)
        return child

    def _pool(self) -> Child:
        scale = self.scale
        group = GroupConfig(
            model=str(self._model), device=self._device, options=dict(scale.options), workers=self.count, reserve_staging=True
        )
        if self._device == "cuda":
            group = msgspec.structs.replace(group, gpus=self._gpus[1 : 1 + self.count])
        group = msgspec.structs.replace(group, engine=scale.engine)
        state = str(self._scratch / "state")
        config = PoolConfig(groups={"score": group}, listen=self.address, insecure_loopback=True, state_dir=state)
        env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
        daemon = Child(["-m", "enginepool.coordinator.shell.daemon"], scratch=self._scratch, env=env, speaks=False)
        watch(self._stack, daemon, signal.SIGTERM)
        return daemon

    def engines(self) -> list[Child]:
        """SGLang's engines without a pool, one on the GPU of each of its workers, once they have started."""
        wanted = {"model": str(self._model), "device": self._device, "options": dict(self.scale.options)}
        argv = ["-m", "bench.peers.bare_updates", msgspec.json.encode(wanted).decode()]
        started = [self._child(argv, 1 + i) for i in range(self.count)]
        for engine in started:
            engine.hear(START_S)
        return started

    def ready(self) -> None:
        """Wait until all is started, so that no start disturbs a measurement."""
        self.ask(self.load, START_S, do="connect")
        while len(self.workers(0)) < self.count:
            if time.monotonic() - self._began > START_S:
                raise RuntimeError(f"{self.count} workers are not ready after {START_S:.0f} s")
            time.sleep(LOOK_S)
        self.started_s = time.monotonic() - self._began
        self.add("start of the pool", OURS_STAGED, self.started_s, "s")
        self.ask(self.trainer, do="connect", address=self.address)
        self.scores["pool, as loaded"] = self.score()

    # --- talking --------------------------------------------------------------------------------------------------------

    def ask(self, child: Child, timeout: float = ORDER_S, **order: object) -> Any:
        """The answer to an order. Raises RuntimeError: it failed."""
        return self.heard(child.ask(order, timeout))

    def heard(self, answer: Any) -> Any:
        """An answer. Raises RuntimeError: it tells of a failure."""
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(str(answer["error"]))  # pyright: ignore[reportUnknownArgumentType]
        return answer  # pyright: ignore[reportUnknownVariableType]

    def join(self, children: list[Child], *, engines: bool = False, copies: bool = False) -> str:
        """Form a group of the trainer and these; its name. Engines join in SGLang's own way; `copies`: as a pool's."""
        self._groups += 1
        name, world = f"group-{self._groups}", 1 + len(children)
        for rank, child in enumerate(children, 1):
            child.tell({
                "do": "join", "address": self._listening, "name": name, "world": world, "rank": rank, "backend": self.backend,
            })  # fmt: skip
        self.ask(self.trainer, do="join", name=name, world=world, backend=self.backend, engines=engines, copies=copies)
        for child in children:
            self.heard(child.hear(ORDER_S))
        return name

    def publish(self, transfer: str, bucket: int, which: str = "") -> Update:
        """One update of the pool."""
        version = self.version + 1
        which = which or ("other", "first")[version % 2]
        said = self.ask(self.trainer, do="publish", version=version, which=which, transfer=transfer, bucket_bytes=bucket)
        self.version = version
        record = said["record"]
        self.say(f"  version {version}, {transfer}: {record.get('phases')} {record.get('message', '')}")
        return Update(said["began"], said["flowing"], said["ended"], version, record["phases"], record.get("digest", ""))

    def begin(self, burden: Burden) -> None:
        """Ask without pause from now on."""
        self.ask(self.load, do="begin", shape=msgspec.to_builtins(burden.shape), in_flight=burden.in_flight)

    def stopped(self) -> tuple[list[Answer], int]:
        """Ask no more; every answer, and how many requests failed."""
        said = self.ask(self.load, do="stop")
        for failure in said["failures"][:3]:
            self.say(f"  a request failed: {failure}")
        return msgspec.convert(said["answers"], list[Answer]), len(said["failures"])

    def workers(self, version: int) -> dict[str, int]:
        """The processes of the workers that are ready with this version, by the workers' names. Told is what each does."""
        now = time.monotonic()
        ready: dict[str, int] = {}
        for name, process, stage, its in self.ask(self.load, do="workers")["workers"]:
            before, since = self._stages.get(name, ("", now))
            if stage != before:
                self.say(f"  {name}: {stage}" + (f" after {now - since:.1f} s of {before}" if before else ""))
                self._stages[name] = (stage, now)
            if stage in ENGINE_STARTS:
                self._loading.setdefault(name, now)
            elif name in self._loading:
                self.engine_s[name] = now - self._loading.pop(name)
            if (stage, its) == ("ready", version):
                ready[name] = process
        return ready

    # --- figures --------------------------------------------------------------------------------------------------------

    def add(self, what: str, who: str, value: float, unit: str, ratio: float | None = None) -> None:
        """Keep one figure."""
        self.keep([Row(f"{self.setting}, {what}", who, value, unit, ratio)])

    def keep(self, rows: list[Row]) -> None:
        """Keep rows, and tell them at once."""
        for row in rows:
            ratio = "" if row.ratio is None else f" ({row.ratio:.3g} x)"
            self.say(f"  {row.what}, {row.who}: {row.value:.4g} {row.unit}{ratio}")
        self.rows += rows

    def shape(self) -> object:
        """Of the request whose scores are compared."""
        return msgspec.to_builtins(self.scale.burdens[0].shape)

    def score(self) -> Any:
        """What the pool answers to it now."""
        return self.ask(self.load, do="score", shape=self.shape())["scores"]

    def same(self, what: str, mine: str, theirs: str) -> None:
        """How far apart two of the scores are that were kept."""
        if mine in self.scores and theirs in self.scores:
            difference = float(np.abs(np.subtract(self.scores[mine], self.scores[theirs])).max())
            self.add(f"largest difference of scores: {what}", OURS_STAGED, difference, "")
