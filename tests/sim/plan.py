"""What a seed means: the pool, its bounds, its network, its clients, their calls, and every fault with its time."""

from random import Random

import msgspec

from enginepool.client.session.settings import SessionSettings
from enginepool.config import GroupConfig, Limits, PoolConfig, RestartConfig, Timing
from enginepool.coordinator.core.context import HEADER_BYTES
from enginepool.protocol.adapters import LOADS_ADAPTERS
from enginepool.protocol.messages import Capabilities
from tests.sim.adapting import SimChange, make_changes
from tests.sim.commands import SimCommand
from tests.sim.generating import ADAPTERS, GenerationMix
from tests.sim.network import Conditions
from tests.sim.offers import Offer, keep_generations, make_offer
from tests.sim.packing_bounds import BOUNDS, USUAL
from tests.sim.sleeping import some_wish
from tests.sim.traffic import SEPARATOR, TOKEN_BYTES, Mix

#: fault -> the largest number of times in one schedule
FAULTS = {
    "worker_kill": 6,
    "worker_stop": 4,
    "worker_block": 4,
    "worker_drain": 3,
    "worker_partition": 3,
    "worker_link": 8,
    "worker_link_cut_by_coordinator": 2,
    "engine_crash": 4,
    "engine_hang": 2,
    "engine_slow": 4,
    "engine_error": 4,
    "engine_wrong_rows": 3,
    "engine_two_forwards": 4,
    "client_link": 8,
    "client_outbox": 4,
    "client_stall": 4,
    "client_partition": 4,
    "client_vanish": 1,
    "client_close": 1,
    "coordinator_stall": 3,
    "coordinator_kill": 3,
    "new_weights": 1,
    "status": 5,
}


#: what goes wrong with updates
UPDATE_FAULTS = {
    "stager_kill": 3,
    "stager_damage": 2,
    "take_error": 3,
    "take_crash": 3,
    "publisher_link": 3,
    "publisher_stall": 2,
    "publisher_vanish": 1,
    "journal_full": 1,
}


#: what strikes while engines that generate take weights
LOAD_FAULTS = (
    "coordinator_kill", "coordinator_stall", "journal_full", "take_error", "take_crash", "worker_kill", "worker_stop",
    "worker_link", "stager_kill", "publisher_vanish",
)  # fmt: skip

#: what strikes schedules that generate more often
GENERATION_FAULTS = (
    "worker_kill", "worker_stop", "worker_link", "engine_error", "engine_wrong_rows", "client_link", "client_stall",
    "client_outbox", "coordinator_kill", "engine_rows_hang",
)  # fmt: skip


class Plan:
    """Everything that is decided before the first event. Draws from `random` in a fixed order."""

    def __init__(
        self,
        random: Random,
        workers: int,
        packed: Random | None = None,
        updates: Random | None = None,
        paced: Random | None = None,
        unloadable: Random | None = None,
        restarts: Random | None = None,
        wide: Random | None = None,
        external: Random | None = None,
        stops: Random | None = None,
        faulty: Random | None = None,
        crowded: Random | None = None,
        starved: Random | None = None,
        embedding: Random | None = None,
        commanding: Random | None = None,
        generating: Random | None = None,
        sleeping: Random | None = None,
    ) -> None:
        self.random = random
        self.workers = workers
        many = workers > 50
        two = workers > 1 and not many and random.random() < 0.3
        self.kinds = {"a": random.choice(("causal", "causal", "classifier"))}
        if two:
            self.kinds["b"] = random.choice(("causal", "classifier"))
        self.counts = dict.fromkeys(self.kinds, 0)
        for i in range(workers):
            name = list(self.kinds)[i % len(self.kinds)] if i < len(self.kinds) else random.choice(list(self.kinds))
            self.counts[name] += 1
        #: of each group, workers that dial in
        #: how probably such a worker has no stager
        self.unstaged = 0.0
        self.external = {name: random.randint(1, count) if random.random() < 0.2 else 0 for name, count in self.counts.items()}
        self.capabilities = {name: self._capabilities(kind) for name, kind in self.kinds.items()}
        self.versions = {name: random.choice((0, 0, 3)) for name in self.kinds}
        self.bounded = random.random() < 0.3
        #: what the parts of a batch may add to its header, and how often a request has many labels; drawn from another source
        self.header_bytes = HEADER_BYTES
        self.wide = 0.0
        self.retires = random.random() < 0.12
        self.config = self._config()
        self.conditions = self._conditions()
        self.settings = SessionSettings(
            silence_s=random.choice((1.0, 3.0)),
            hello_s=random.choice((0.3, 1.0)),
            resend_s=random.choice((2.0, 8.0)),
            cancel_wait_s=random.choice((0.2, 1.0)),
            ack_delay_s=random.choice((0.0, 0.1)),
        )
        self.clients = random.randint(1, 4)
        self.span = random.choice((1.0, 5.0, 15.0))
        self.calls = random.randint(500, 2500) if many else random.randint(30, 130)
        self.mix = Mix(random)
        if many:
            # Trials come one after the other: thousands of calls with as much poison would take hours.
            self.mix.poison /= 10
            self.mix.choking /= 10
        #: calls come in bursts
        self.bursts = random.choice((1, 3, 1000))
        self.faults = self._faults(many)
        self.turn_s = random.choice((0.0, 0.0005, 0.02))
        self.drain_early = random.random() < 0.1
        self.unusable = 0.1 if self.retires and random.random() < 0.5 else 0.0
        # Drawn from another source, so that a seed means the same with and without it.
        self.packing = USUAL
        if packed is not None:
            self._pack(packed)
        #: who publishes what; which faults strike when a transaction enters a phase; how often a call wants later weights
        self.publishers = 0
        self.offers: list[tuple[int, Offer]] = []
        self.triggers: list[tuple[str, str, float]] = []
        self.early = 0.0
        #: nothing but links breaks
        self.gentle = False
        if updates is not None:
            self._publish(updates)
        if paced is not None:
            self._pace(paced)
        #: of a group, the first so many places have an engine that never loads; with `strict`, nothing else befalls workers
        self.unloadable: dict[str, int] = {}
        self.strict = False
        if unloadable is not None:
            self._break(unloadable)
        #: engines take weights only at their start; how probably such a start fails
        self.only_at_start = False
        self.unstartable = 0.0
        if restarts is not None:
            self._restart(restarts)
        if wide is not None:
            self._widen(wide)
        if external is not None:
            self._detach(external)
        if stops is not None:
            self._stop(stops)
        if faulty is not None:
            self._err(faulty)
        if crowded is not None:
            self._crowd(crowded)
        #: of a group, how many rows at a time an engine has memory for
        self.memory: dict[str, int] = {}
        #: and how often its budgets are halved until all that it is given fits
        self.halvings: dict[str, int] = {}
        if starved is not None:
            self._starve(starved)
        #: how often a call embeds
        self.embed = 0.0
        if embedding is not None:
            self._embed(embedding)
        self.commands: list[SimCommand] = []
        #: of adapters; what one takes at most at an engine, and how often a load fails there
        self.changes: list[SimChange] = []
        self.adapter_s, self.adapter_fails = 0.1, 0.0
        if commanding is not None:
            self._command(commanding)
        #: how calls generate, where some do; what a step of an engine takes
        self.generate: GenerationMix | None = None
        self.step_s = 0.01
        if generating is not None:
            self._generate(generating)
        #: engines are put to sleep; whether their weights are lost then
        self.sleeps = self.sleep_loses_weights = False
        if sleeping is not None:
            self._sleep(sleeping)

    def _detach(self, random: Random) -> None:
        """Let other programs start most workers, and let the links of workers fail, for long enough to lose them."""
        groups: dict[str, GroupConfig] = {}
        for name, group in self.config.groups.items():
            self.external[name] = random.choice((self.counts[name], random.randint(1, self.counts[name])))
            groups[name] = msgspec.structs.replace(group, workers=self.counts[name] - self.external[name])
        self.config = msgspec.structs.replace(self.config, groups=groups)
        span = self.span + 10.0
        kinds = ("worker_partition", "worker_partition", "worker_link", "worker_link_cut_by_coordinator")
        # In a gentle schedule links break, and no worker is lost for that.
        for kind in () if self.gentle else kinds:
            self.faults += [(span * random.random(), kind) for _ in range(random.randint(0, 3))]
        self.faults.sort()
        self.unstaged = random.choice((0.0, 0.5, 0.9))

    def _embed(self, random: Random) -> None:
        """Let workers embed, give log-probabilities and decode as well as score, and calls ask for any of them."""
        self.embed = random.choice((0.2, 0.5, 0.9))
        for name, can in self.capabilities.items():
            if can.separator is None:
                size = random.choice((2, 6, 40))
                operations = ("score", "embed", "logprobs") if can.kind == "causal" else ("score", "embed")
                self.capabilities[name] = msgspec.structs.replace(
                    can, operations=operations, embedding=size, token_bytes=TOKEN_BYTES
                )

    def _generate(self, random: Random) -> None:
        """Let workers generate as well, in few slots, and most calls ask for that."""
        self.generate = GenerationMix(random)
        self.step_s = random.choice((0.005, 0.02, 0.08, 0.2))
        self.calls = random.randint(10, 40)
        for name, can in self.capabilities.items():
            rows = random.choice((1, 2, 4))
            slots = int(rows * random.choice((1.0, 1.5, 2.0, 4.0)))
            self.capabilities[name] = msgspec.structs.replace(
                can, kind="causal", labels=0, hidden=2, separator=None, operations=(*can.operations, "generate"), max_item=0,
                batch_rows=rows, inflight_rows=slots, features=("logit_processors",), adapters=ADAPTERS, experts=(2, 1),
                sequences=slots, sequence_tokens=can.inflight_tokens, sequence_context=min(can.context, can.inflight_tokens),
            )  # fmt: skip
            if name in self.memory:
                self.memory[name] = 2 * max(1, slots >> self.halvings[name])
        self.faults = [fault for fault in self.faults if fault[1] != "new_weights"]
        for kind in () if self.gentle else GENERATION_FAULTS:
            if random.random() < 0.3:
                self.faults += [(self.span * random.random(), kind) for _ in range(random.randint(1, 3))]
        self.faults.sort()
        for _, offer in self.offers:
            if not self.only_at_start:  # those refuse it
                keep_generations(random, offer)
        for kind in () if self.gentle or not self.offers else random.sample(LOAD_FAULTS, random.choice((0, 1, 3))):
            self.triggers.append(("load", kind, random.choice((0.0, 0.02, 0.06))))

    def adapt(self, random: Random) -> None:
        """Let publishers change adapters of the groups that generate."""
        groups = [name for name, can in self.capabilities.items() if "generate" in can.operations]
        self.changes = make_changes(random, groups, self.clients, self.span + 2.0) if groups else []
        self.adapter_s = random.choice((0.01, 0.1, 1.0, 3.0))
        self.adapter_fails = 0.0 if self.gentle else random.choice((0.0, 0.0, 0.1, 0.4))
        for name in groups:
            can = self.capabilities[name]
            self.capabilities[name] = msgspec.structs.replace(can, features=(*can.features, LOADS_ADAPTERS))
        roots = {name: msgspec.structs.replace(one, adapter_roots=["/adapters"]) for name, one in self.config.groups.items()}
        self.config = msgspec.structs.replace(self.config, groups=roots)

    def _command(self, random: Random) -> None:
        """Let callers flush groups, often enough that a client asks again before all workers have answered."""
        timing = msgspec.structs.replace(self.config.timing, update_inspect_s=random.choice((2.0, 4.0, 8.0)))
        self.config = msgspec.structs.replace(self.config, timing=timing)
        self.settings = msgspec.structs.replace(self.settings, question_s=random.choice((0.5, 2.0, 30.0)))
        for _ in range(random.choice((1, 4, 20))):
            client, at = random.randrange(self.clients), 1.0 + self.span * random.random()
            group = random.choice(list(self.kinds)) if len(self.kinds) > 1 or random.random() < 0.5 else ""
            bad = "unknown_group" if random.random() < 0.1 else ""
            timeout = random.choice((None, None, 0.5, 5.0))
            self.commands.append(SimCommand(client, "no such group" if bad else group, at, timeout, bad))

    def _sleep(self, random: Random) -> None:
        """Let callers put engines to sleep and wake them, while all else happens; and kill workers that sleep."""
        self.sleeps, self.sleep_loses_weights = True, random.random() < 0.5
        timing = msgspec.structs.replace(self.config.timing, update_inspect_s=random.choice((2.0, 8.0)))
        self.config = msgspec.structs.replace(self.config, timing=timing)
        self.settings = msgspec.structs.replace(self.settings, question_s=random.choice((0.5, 2.0, 30.0)))
        for _ in range(random.choice((1, 3, 8))):
            client, at = random.randrange(self.clients), 1.0 + self.span * random.random()
            group = random.choice(list(self.kinds))
            wish = some_wish(random, group, self.config.groups[group].workers)
            timeout = random.choice((None, None, 0.5, 5.0))
            self.commands.append(SimCommand(client, group, at, timeout, wish=wish))
        if not self.gentle:
            kinds = ("worker_kill", "coordinator_kill")
            self.faults += [(self.span * random.random(), random.choice(kinds)) for _ in range(random.randint(0, 3))]
            self.faults.sort()

    def _stop(self, random: Random) -> None:
        """Let the coordinator be stopped on purpose and started again, and its epoch be set back."""
        self.faults += [(self.span * random.random(), "coordinator_stop") for _ in range(random.randint(0, 4))]
        self.faults += [(self.span * random.random(), "coordinator_set_back") for _ in range(random.choice((0, 1, 2)))]
        self.faults.sort()

    def _err(self, random: Random) -> None:
        """Let the coordinator have internal errors, and an operator restart workers."""
        span = self.span + 5.0
        for kind, most in (("coordinator_raise", 4), ("operator_restarts", 8)):
            self.faults += [(span * random.random(), kind) for _ in range(random.randint(1, most))]
        self.faults.sort()

    def _restart(self, random: Random) -> None:
        """Let every engine take weights only at its start. The pool starts all of them."""
        self.only_at_start = True
        self.unstartable = 0.0 if self.gentle else random.choice((0.0, 0.1, 0.4))
        groups: dict[str, GroupConfig] = {}
        for name, group in self.config.groups.items():
            self.external[name] = 0
            mode = random.choice(("rolling", "rolling", "at_once"))
            groups[name] = msgspec.structs.replace(group, workers=self.counts[name], restart_updates=mode)
        self.config = msgspec.structs.replace(self.config, groups=groups)
        for _, offer in self.offers:
            if self.gentle or random.random() < 0.85:
                offer.transfer, offer.partial = "checkpoint", False
                offer.flaw = offer.flaw if offer.flaw in ("unknown", "backwards") else ""
                offer.fate = "abort" if offer.fate == "never" else offer.fate
            elif offer.transfer not in ("checkpoint", "set_version"):
                offer.flaw = "elsewhere"
        if not self.gentle:
            kinds = ["worker_kill", "worker_stop", "worker_link", "coordinator_kill", "coordinator_stall", "publisher_vanish"]
            for _ in range(random.choice((0, 1, 2, 4))):
                self.triggers.append(("restart", random.choice(kinds), random.choice((0.0, 0.01, 0.1, 1.0))))

    def _widen(self, random: Random) -> None:
        """Large headers, large answers, and little room for them."""
        self.wide = random.choice((0.1, 0.5, 0.9))
        self.header_bytes = random.choice((800, 2_000, 20_000))
        self.bounded = True
        limits = msgspec.structs.replace(
            self.config.limits,
            window_requests=1000,
            max_message_bytes=random.choice((20_000, 30_000)),
            window_bytes=random.choice((30_000, 60_000)),
            buffer_bytes=random.choice((120_000, 160_000)),
            answers_bytes=random.choice((3_000, 100_000)),
        )
        self.config = msgspec.structs.replace(self.config, limits=limits)

    def _crowd(self, random: Random) -> None:
        """More clients, more calls at a time and more priorities than the queue has room for."""
        self.bounded = True
        self.clients = random.randint(3, 8)
        self.calls = random.randint(100, 250)
        self.bursts = random.choice((1, 2))
        self.mix.priorities = random.choice([(0,), (-1, 0, 1), tuple(range(-10, 11))])
        limits = msgspec.structs.replace(
            self.config.limits,
            queue_items=random.choice((80, 120)),
            window_requests=1000,
            max_message_bytes=40_000,
            window_bytes=40_000,
            buffer_bytes=random.choice((90_000, 1 << 20)),
        )
        self.config = msgspec.structs.replace(self.config, limits=limits)

    def _break(self, random: Random) -> None:
        """Let engines of some places fail at every start in the same way."""
        for name, group in self.config.groups.items():
            if group.workers and not self.gentle and random.random() < 0.7:
                self.unloadable[name] = random.choice((1, group.workers, random.randint(1, group.workers)))
        self.strict = random.random() < 0.5
        if self.strict:
            harmless = ("client_", "publisher_", "status")
            self.faults = [fault for fault in self.faults if fault[1].startswith(harmless)]
            self.conditions.flaky = 0.0

    def _pace(self, random: Random) -> None:
        """Let workers say what their forwards cost, which is mostly wrong."""
        paces = (1, 12, 40, 100, 400, 3000)
        for name, can in self.capabilities.items():
            packed = random.choice((0, *paces)) if can.packs else 0
            self.capabilities[name] = msgspec.structs.replace(can, pace=random.choice(paces), packed_pace=packed)

    def _pack(self, random: Random) -> None:
        """Let the workers of most groups pack, and of others compute long queries once."""
        for name, plain in self.capabilities.items():
            kind = random.choice(("packs", "packs", "caches", ""))
            if kind == "packs" and plain.separator is None:
                self.capabilities[name] = msgspec.structs.replace(plain, max_item=random.choice((4, 12, 65535)))
            if kind == "caches":
                # These compute long queries once, and have room for what that allows.
                tokens = int(plain.batch_tokens * random.choice((1.0, 2.0, 4.0)))
                self.capabilities[name] = msgspec.structs.replace(
                    plain,
                    inflight_tokens=max(plain.inflight_tokens, int(tokens * random.choice((1.0, 2.0)))),
                    cached_query=random.choice((1, 4, 12)),
                    cached_tokens=tokens,
                )
        self.packing = random.choice(BOUNDS)

    def _publish(self, random: Random) -> None:
        """Let weights be updated while all this goes on. Nothing else changes weights then."""
        timing = msgspec.structs.replace(
            self.config.timing,
            update_prepare_s=3.0,
            update_join_s=4.0,
            update_stall_s=4.0,
            update_load_s=6.0,
            update_inspect_s=4.0,
            restore_again_s=1.5,
        )
        groups = {
            name: msgspec.structs.replace(group, snapshot=random.choice(("memory", "memory", "disk", "none")))
            for name, group in self.config.groups.items()
        }
        self.config = msgspec.structs.replace(self.config, timing=timing, groups=groups)
        self.faults = [fault for fault in self.faults if fault[1] != "new_weights"]
        self.publishers = random.choice((1, 1, 2, 3))
        self.gentle = random.random() < 0.15
        calm = self.gentle or random.random() < 0.3
        if self.gentle:
            self._only_links()
            phases = ("open", "join", "transfer", "staged", "hold", "load")
            kinds = ("worker_link", "worker_link", "publisher_link")
            self.triggers = [(random.choice(phases), random.choice(kinds), 0.03 * random.random()) for _ in range(3)]
        for _ in range(random.randint(1, 6)):
            offer = make_offer(random, random.choice(list(self.kinds)), self.span, calm=calm)
            self.offers.append((random.randrange(self.publishers), offer))
        if not calm:
            for kind, most in UPDATE_FAULTS.items():
                if random.random() < 0.15:
                    span = self.span + 5.0
                    self.faults += [(span * random.random(), kind) for _ in range(random.randint(1, most))]
            phases = ("open", "join", "transfer", "staged", "hold", "load", "published")
            kinds = [*UPDATE_FAULTS, "worker_kill", "worker_stop", "worker_link", "coordinator_kill", "coordinator_stall"]
            for _ in range(random.choice((0, 1, 2, 4))):
                self.triggers.append((random.choice(phases), random.choice(kinds), random.choice((0.0, 0.01, 0.1))))
            self.faults.sort()
        self.early = random.choice((0.0, 0.1))

    def _only_links(self) -> None:
        """Nothing but links breaks."""
        links = ("worker_link", "client_link", "status")
        self.faults = [fault for fault in self.faults if fault[1] in links]
        self.triggers = [trigger for trigger in self.triggers if trigger[1] in (*links, "publisher_link")]
        self.mix.poison = self.mix.choking = 0.0
        self.unusable = 0.0
        quick = self.conditions
        self.conditions = Conditions(min(quick.delay, 0.05), quick.repeat, quick.late, 0.3, quick.survive)

    def _starve(self, random: Random) -> None:
        """Let engines have too little memory for their budgets. No other worker ends, and the first loss that counts against a
        place retires it."""
        self.gentle, self.retires = True, False
        self._only_links()
        self.faults += [(self.span * random.random(), "worker_link") for _ in range(random.randint(0, 6))]
        self.faults += [(self.span * random.random(), "coordinator_stall") for _ in range(random.choice((0, 0, 1)))]
        self.faults.sort()
        groups: dict[str, GroupConfig] = {}
        for name, group in self.config.groups.items():
            self.external[name] = 0
            groups[name] = msgspec.structs.replace(group, workers=self.counts[name])
            can = self.capabilities[name]
            times = self.halvings[name] = random.randint(1, 3)
            self.memory[name] = max(1, can.inflight_rows >> times)
            # No row is too long for a worker whose budgets were halved so many times.
            self.capabilities[name] = msgspec.structs.replace(can, inflight_tokens=can.inflight_tokens << times)
        restart = msgspec.structs.replace(self.config.restart, max_restarts=0)
        timing = msgspec.structs.replace(self.config.timing, orphan_s=20.0)  # longer than any stall
        self.config = msgspec.structs.replace(self.config, groups=groups, restart=restart, timing=timing)

    def _capabilities(self, kind: str) -> Capabilities:
        random = self.random
        tokens = random.choice((48, 64, 128, 256, 1024))
        rows = random.choice((1, 2, 4, 8, 16))
        inflight_tokens = int(tokens * random.choice((1.0, 1.5, 2.0, 4.0)))
        page = random.choice((1, 1, 1, 4, 16))
        can = Capabilities(
            kind="causal" if kind == "causal" else "classifier",
            vocab=300,
            context=random.choice((inflight_tokens - page + 1, max(40, tokens // 2), max(30, tokens // 4))),
            batch_tokens=tokens,
            batch_rows=rows,
            inflight_tokens=max(inflight_tokens, 64),
            inflight_rows=int(rows * random.choice((1.0, 1.5, 2.0, 4.0))),
            page=page,
            labels=0 if kind == "causal" else random.randint(1, 3),
            hidden=0 if kind == "causal" else random.choice((2, 3)),
        )
        # Without a draw of its own, which would change what known seeds do.
        return msgspec.structs.replace(can, separator=SEPARATOR) if can.labels == 1 else can

    def _config(self) -> PoolConfig:
        random = self.random
        ageing = random.choice((None, 0.05, 1.0, 10.0))
        groups = {
            name: GroupConfig(
                "sim",
                engine="sim",
                workers=count - self.external[name],
                ageing_s=ageing,
                checkpoint_roots=["/checkpoints"],
            )
            for name, count in self.counts.items()
        }
        limits = Limits(
            buffer_bytes=1 << 40,
            window_bytes=1 << 40,
            answers_s=random.choice((3.0, 15.0)),
            answers_bytes=random.choice((3_000, 1 << 20)),
        )
        if self.bounded:
            limits = Limits(
                queue_items=random.choice((90, 300)),
                buffer_bytes=random.choice((90_000, 1 << 20)),
                window_requests=random.choice((3, 10, 1000)),
                window_bytes=40_000,
                max_message_bytes=40_000,
                answers_s=limits.answers_s,
                answers_bytes=limits.answers_bytes,
            )
        timing = Timing(
            ping_s=1.0 if self.workers <= 50 else 2.0,
            silence_s=4.0,
            client_silence_s=random.choice((6.0, 12.0)),
            starting_s=6.0,
            loading_s=10.0,
            compiling_s=10.0,
            forward_s=random.choice((2.0, 5.0)),
            # What small batches cost, in proportion, is far too much for a large one: ten times that would take minutes.
            forward_factor=2.0,
            orphan_s=random.choice((6.0, 20.0)),
            drain_s=random.choice((0.5, 3.0)),
        )
        restart = RestartConfig(
            backoff_s=random.choice((0.05, 0.5)),
            backoff_max_s=2.0,
            max_restarts=random.randint(0, 4) if self.retires else 100_000,
            max_attempts=random.choice((1, 2, 3)),
        )
        return PoolConfig(groups, limits=limits, timing=timing, restart=restart)

    def _conditions(self) -> Conditions:
        random = self.random
        return Conditions(
            # Suspects run one after the other; of a thousand workers many are lost.
            delay=random.choice((0.0005, 0.0005, 0.005, 0.05, 0.3 if self.workers <= 50 else 0.01)),
            repeat=random.choice((0.0, 0.0, 0.02, 0.15)),
            late=random.choice((0.0, 0.3)),
            notice=random.choice((0.01, 0.3, 2.0)),
            survive=random.choice((0.0, 0.05, 1.0)),
            flaky=random.choice((0.0, 0.0, 0.4)),
        )

    def _faults(self, many: bool) -> list[tuple[float, str]]:
        """(time, fault), a few kinds of them at a time: a schedule in which all goes wrong at once shows less."""
        random = self.random
        found: list[tuple[float, str]] = []
        share = random.choice((0.1, 0.3, 0.6) if many else (0.0, 0.1, 0.3, 0.6))
        span = self.span + random.choice((0.0, 5.0, 15.0))
        for kind, most in FAULTS.items():
            if random.random() < share:
                count = random.randint(1, most)
                if many and kind.startswith(("worker", "engine")):
                    count *= 8
                found += [(span * random.random(), kind) for _ in range(count)]
        return sorted(found)
