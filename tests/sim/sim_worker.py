"""A simulated worker process: the real worker machine, an engine, a link, and all that can befall a process.

It stands for `enginepool.workers.main`: a link thread that answers pings, and a main thread that may be held up. SIGSTOP holds
both; a blocked main thread leaves the link thread alive.
"""

import signal
from collections.abc import Callable, Sequence

import msgspec

from enginepool.protocol.frames import Buffer, decode_header
from enginepool.protocol.messages import ErrorReply, Message, Ping, Pong, ToWorker
from enginepool.workers.events import (
    CancelGenerations,
    Connected,
    Disconnected,
    DrainWanted,
    EndProcess,
    Exit,
    FreeStopped,
    FromCoordinator,
    ResumeEngine,
    RunBatch,
    RunCommand,
    RunGeneration,
    RunTokenize,
    RunWeights,
    SendToCoordinator,
    WorkerEvent,
    WorkerTick,
)
from enginepool.workers.machine import FINAL_REFUSALS, WorkerMachine
from tests.sim.network import Dealer, Network
from tests.sim.oracle import Oracle
from tests.sim.sim_engine import Profile, SimEngine
from tests.sim.sim_stager import Stager
from tests.sim.world import World

_decoder = msgspec.msgpack.Decoder(ToWorker)
#: ticks come seldom enough to be cheap, and often enough not to look like a stall
TICK_S = 1.0


class SimWorker:
    """One incarnation. `ended` is told once, with the reason, when the process is gone."""

    def __init__(
        self,
        network: Network,
        oracle: Oracle,
        profile: Profile,
        group: str,
        incarnation: str,
        stager: Stager,
        orphan_s: float,
        drain_s: float,
        ended: "Callable[[SimWorker, str], None]",
        *,
        external: bool = False,
    ) -> None:
        self.network = network
        self.world: World = network.world
        self.profile = profile
        self.group = group
        #: with which it started; the present one may be a later one
        self.name = self.incarnation = incarnation
        #: no fault kills it, and the coordinator has not told it to end
        self.external = external
        self.blamed = False
        self.alive = True
        self.stopped = self.blocked = False
        #: until then it may be given up for something that befell it or its surroundings
        self.troubled_until = self.world.now
        #: it is killed in the middle of its next effects
        self.doomed = False
        self._ended = ended
        self._ending = False
        #: with which it ends; of one that is killed, the signal
        self.code = -signal.SIGKILL
        self._limits = (orphan_s, drain_s)
        self._machine: WorkerMachine | None = None
        self.stager = stager
        stager.host(self)
        #: what happens when its engine is to take weights next: error, crash
        self.take_fault = ""
        self.engine = SimEngine(self.world, oracle, profile, self)
        self.dealer: Dealer | None = None
        #: what the link thread, and the main thread, have not taken yet
        #: events that the machine took
        self._taken = 0
        self._unread: list[Sequence[Buffer]] = []
        self._untaken: list[WorkerEvent] = []
        self.world.after(self.world.between(0.01, 0.3), self._boot)

    def _boot(self) -> None:
        if not self.alive:
            return
        orphan_s, drain_s = self._limits
        self._machine = WorkerMachine(
            self.incarnation, self.group, now=self.world.now, pid=1, host="sim", orphan_s=orphan_s, drain_s=drain_s,
            external=self.external,
        )  # fmt: skip
        self.dealer = Dealer(self.network, self, worker=True)
        self.world.after(TICK_S, self._tick)
        self.engine.load()

    @property
    def healthy(self) -> bool:
        """Nothing has been wrong with it for a while: to give it up is an error."""
        return self.alive and self.world.now > self.troubled_until and not (self.engine.stuck or self.engine.dead)

    def trouble(self, seconds: float) -> None:
        """Something is wrong for so long, and its consequences may show for a while after."""
        self.troubled_until = max(self.troubled_until, self.world.now + seconds + 15.0)

    @property
    def stage(self) -> str:
        return "" if self._machine is None else self._machine.stage

    @property
    def registers_as(self) -> str:
        """The incarnation by which a coordinator knows it."""
        return self.incarnation if self._machine is None else self._machine.incarnation

    @property
    def governed(self) -> bool:
        """One that others have started may stand still until after it was given up. It then begins what it was sent before."""
        server = self.network.server
        return not self.external or (server is not None and server.knows(self.group, self.registers_as))

    @property
    def machine(self) -> WorkerMachine:
        assert self._machine is not None
        return self._machine

    # --- the link thread -----------------------------------------------------------------------------------------------

    def receive(self, dealer: Dealer, frames: Sequence[Buffer]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._unread.append(frames)
            return
        self.world.mix(frames[0])  # type: ignore[arg-type]
        message: Message = decode_header(_decoder, frames[0])
        if type(message) is ErrorReply:
            self.blamed = self.blamed or message.code in FINAL_REFUSALS
        if type(message) is Ping:
            dealer.send(Pong(message.at, stage=self.machine.stage), ())
        self.post(FromCoordinator(self.world.now, message, tuple(frames[1:])))

    def connected(self, dealer: Dealer) -> None:
        self.post(Connected(self.world.now))

    def disconnected(self, dealer: Dealer) -> None:
        self.post(Disconnected(self.world.now))

    # --- the main thread -----------------------------------------------------------------------------------------------

    def post(self, event: WorkerEvent) -> None:
        if self.stopped or self.blocked:
            self._untaken.append(event)
        else:
            self._take(event)

    def _take(self, event: WorkerEvent) -> None:
        if not self.alive or self._ending:
            return
        world, machine = self.world, self._machine
        assert machine is not None
        world.note(self.name, event)
        effects = machine.handle(event)
        self._taken += 1
        if self._taken % world.check_every == 0:
            machine.check()
        for effect in effects:
            if self.doomed and world.chance(0.5):
                self.kill()
                return
            if type(effect) is SendToCoordinator:
                assert self.dealer is not None
                self.dealer.send(effect.message, effect.frames)
            elif type(effect) is RunBatch:
                self.engine.run(effect)
            elif type(effect) is RunGeneration:
                self.engine.generator.run(effect)
            elif type(effect) is CancelGenerations:
                self.engine.generator.cancel(effect.tasks)
            elif type(effect) is FreeStopped:
                self.engine.generator.free_stopped()
            elif type(effect) is RunTokenize:
                self.engine.tokenize(effect)
            elif type(effect) is RunCommand:
                self.engine.command(effect)
            elif type(effect) is RunWeights:
                self.stager.run(effect)
            elif type(effect) is ResumeEngine:
                self.stager.resume()
            elif type(effect) is EndProcess:
                self._end(effect)
                return

    def _tick(self) -> None:
        if not self.alive:
            return
        self.world.after(TICK_S * self.world.between(0.5, 1.0), self._tick)
        if not self.stopped and not self.blocked:
            self._take(WorkerTick(self.world.now))
            updates = self.machine.updates
            open_ = updates.update is not None or updates.loading is not None
            assert open_ or not self.engine.generator.paused("weights"), f"{self.name}: its engine stays paused"

    def _end(self, end: EndProcess) -> None:
        broken_link = end.code == Exit.ORPHANED or (end.code == Exit.REFUSED and not self.blamed)
        assert not (self.external and broken_link), f"{self.name} ends, and its model with it, for its link: {end.reason}"
        self._ending = True
        self.code = int(end.code)
        assert self.dealer is not None
        linger = end.code not in (Exit.OWNER_GONE, Exit.REFUSED)
        self.dealer.close(linger=linger)
        self.world.after(self.world.between(0.0, 1.0) if end.close else 0.0, self.gone, f"exit code {end.code}: {end.reason}")

    # --- what befalls it -----------------------------------------------------------------------------------------------

    def gone(self, reason: str) -> None:
        """The process is no more."""
        if not self.alive:
            return
        self.alive = False
        self.engine.dead = True
        if self.dealer is not None and not self.dealer.closed:
            self.dealer.close()
        self.world.note(self.name, reason)
        self._ended(self, reason)

    def kill(self) -> None:
        """SIGKILL."""
        self.gone("killed by SIGKILL")

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.world.note(self.name, "SIGSTOP")

    def block(self) -> None:
        """The main thread stands still."""
        self.blocked = True
        self.world.note(self.name, "blocked")

    def go_on(self) -> None:
        """SIGCONT, or the main thread runs again: the sockets first, then the timers."""
        if not self.alive or not (self.stopped or self.blocked):
            return
        self.world.note(self.name, "goes on")
        self.stopped = self.blocked = False
        unread, self._unread = self._unread, []
        untaken, self._untaken = self._untaken, []
        for event in untaken:
            self._take(event)
        for frames in unread:
            if self.dealer is not None:
                self.receive(self.dealer, frames)
        if self._machine is not None:
            self._take(WorkerTick(self.world.now))

    def drain(self) -> None:
        """SIGTERM."""
        if self._machine is not None:
            self.post(DrainWanted(self.world.now, "SIGTERM"))
