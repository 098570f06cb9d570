"""A simulated client: the real session, a dealer, and callers who submit, change their minds and wait."""

from collections.abc import Callable, Sequence

import msgspec

from enginepool.client.session.events import (
    AbandonRequest,
    Answer,
    Ask,
    Close,
    Ended,
    Fail,
    MessageReceived,
    OpenLink,
    SendMessage,
    SessionEvent,
    SessionTick,
    Start,
    StreamPart,
    SubmitRequest,
    TokensTaken,
)
from enginepool.client.session.machine import ClientSession
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.frames import Buffer, check_frames, decode_header
from enginepool.protocol.messages import Generate, Generated, Result, Status, ToClient, Tokens
from enginepool.protocol.messages.control import Control
from tests.core.session_invariants import check_session
from tests.sim.adapting import SimChange
from tests.sim.commands import SimCommand
from tests.sim.network import Dealer, Network
from tests.sim.oracle import Oracle
from tests.sim.traffic import Call

_decoder = msgspec.msgpack.Decoder(ToClient)


class SimClient:
    """One client object in its process."""

    def __init__(self, network: Network, oracle: Oracle, index: int, settings: SessionSettings) -> None:
        self.network = network
        self.world = network.world
        self.oracle = oracle
        self.index = index
        self.name = f"client-{index}"
        random = self.world.random
        self.session = ClientSession(random.randbytes(16), random.randbytes(16), random.random, settings)
        self.dealer: Dealer | None = None
        self.gone = False
        self.stalled = False
        self.ids = 0
        #: told of each final answer, after the oracle
        self.heard: Callable[[Call, Answer | Fail], None] = lambda _, __: None
        self._calls: dict[int, Call] = {}
        self._commands: dict[int, SimCommand] = {}
        self._changes: dict[int, SimChange] = {}
        self._held: list[Sequence[Buffer]] = []
        self._wanted: list[tuple[Call, bool]] = []
        #: events that the session took
        self._taken = 0
        self._timer_at = float("inf")

    def start(self) -> None:
        self._take(Start(self.world.now))

    # --- callers -------------------------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """A caller wants scores."""
        if self.gone:
            self.oracle.forget(call)
            return
        if self.stalled:
            self._wanted.append((call, True))
            return
        now = self.world.now
        self.ids += 1
        call.id = self.ids
        call.score.id = self.ids
        call.submitted = now
        call.floor = self.oracle.floor(call.score.group)
        if call.generating is not None:
            generating = call.generating
            generating.floor = self.oracle.adapter_floor(call.score.group, generating.request.adapter)
        call.deadline = None if call.timeout is None else now + call.timeout
        self._calls[call.id] = call
        self._take(SubmitRequest(now, call.score, call.frames, call.deadline, call.retry_busy))

    def cancel(self, call: Call) -> None:
        """The caller changes its mind."""
        if self.stalled:
            self._wanted.append((call, False))
        elif not self.gone and call.submitted >= 0 and not call.outcome:
            call.cancelled = True
            self._take(AbandonRequest(self.world.now, call.id))

    def command(self, command: SimCommand) -> None:
        """A caller gives a group a command."""
        if self.gone:
            self.oracle.commands.forget(self.world.now, command)
            return
        if self.stalled:
            self.world.after(0.1, self.command, command)
            return
        now = self.world.now
        self.ids += 1
        command.asked = now
        self._commands[self.ids] = command
        deadline = None if command.timeout is None else now + command.timeout
        wish = command.wish
        self.oracle.commands.sleep.asked(now, command.group, wish)
        self._take(
            Ask(now, Control(self.ids, wish.name, command.group, wish.worker, list(wish.tags), mode=wish.mode), deadline)
        )

    def change(self, change: SimChange) -> None:
        """A publisher changes an adapter."""
        if self.gone:
            self.oracle.adapters.forget(change)
            return
        if self.stalled:
            self.world.after(0.1, self.change, change)
            return
        now = self.world.now
        self.ids += 1
        change.asked = now
        self._changes[self.ids] = change
        question, frames = change.question(self.ids)
        self._take(Ask(now, question, None if change.timeout is None else now + change.timeout, frames))

    def ask_status(self) -> None:
        if not self.gone and not self.stalled:
            self.ids += 1
            self._take(Ask(self.world.now, Status(self.ids), self.world.now + 5.0))

    # --- the loop ------------------------------------------------------------------------------------------------------

    def receive(self, dealer: Dealer, frames: Sequence[Buffer]) -> None:
        if self.gone or dealer is not self.dealer:
            return
        if self.stalled:
            self._held.append(frames)
            return
        self.world.mix(frames[0])  # type: ignore[arg-type]
        message: ToClient = decode_header(_decoder, frames[0])
        if isinstance(message, Result | Generated | Tokens):
            check_frames(message.frames, frames[1:])
        self._take(MessageReceived(self.world.now, message, frames[1:]))

    def connected(self, dealer: Dealer) -> None:
        """No message tells a client."""

    def disconnected(self, dealer: Dealer) -> None:
        """No message tells a client."""

    def _take(self, event: SessionEvent) -> None:
        self.world.note(self.name, event)
        effects = self.session.handle(event)
        self._taken += 1
        if self._taken % self.world.check_every == 0:
            check_session(self.session)
        for effect in effects:
            if type(effect) is SendMessage:
                assert self.dealer is not None
                self.world.note(self.name, effect.message)
                if type(effect.message) is Generate:
                    self.oracle.sends(self._calls[effect.message.id], effect.message, self.session.link.epoch)
                self.dealer.send(effect.message, effect.frames)
            elif type(effect) is StreamPart:
                self._read(effect, final=any(type(one) is Answer and one.id == effect.id for one in effects))
            elif type(effect) is Answer or type(effect) is Fail:
                call = self._calls.get(effect.id)
                if call is not None:
                    self.oracle.finished(self.world.now, call, effect)
                    self.heard(call, effect)
                elif effect.id in self._changes:
                    self.oracle.changed(self.world.now, self._changes[effect.id], effect)
                elif effect.id in self._commands:
                    self.oracle.commands.finished(self.world.now, self._commands[effect.id], effect)
            elif type(effect) is OpenLink:
                if self.dealer is not None:
                    self.dealer.close()
                self.dealer = Dealer(self.network, self, worker=False)
            elif type(effect) is Ended:
                assert effect.failure.code == "closed", f"{self.name} ended: {effect.failure}"
                assert self.dealer is not None
                self.dealer.close(linger=True)
        wake_at = self.session.wake_at
        if wake_at < self._timer_at:
            self._timer_at = wake_at
            self.world.at(wake_at, self._due, wake_at)

    def _due(self, at: float) -> None:
        if at == self._timer_at and not self.stalled and not self.gone:
            self._tick()

    def _tick(self) -> None:
        self._timer_at = float("inf")
        self._take(SessionTick(self.world.now))

    # --- streams -------------------------------------------------------------------------------------------------------

    def _read(self, part: StreamPart, *, final: bool) -> None:
        """The caller of a stream has more to read, and looks for it in its own time."""
        generating = self._calls[part.id].generating
        generating.part(part, final=final)
        if not generating.looks:
            generating.looks = True
            self.world.after(generating.pause_s * self.world.between(0.5, 1.5), self._look, part.id)

    def _look(self, id_: int) -> None:
        call = self._calls[id_]
        generating = call.generating
        if self.gone:
            return
        if self.stalled:
            self.world.after(0.1, self._look, id_)
            return
        generating.looks, generating.taken = False, generating.received
        if not call.outcome:
            self._take(TokensTaken(self.world.now, id_, generating.taken))

    # --- what befalls it -----------------------------------------------------------------------------------------------

    def stall(self) -> None:
        self.world.note(self.name, "stalls")
        self.stalled = True

    def go_on(self) -> None:
        """The socket first, then the timers, then the callers."""
        if self.gone or not self.stalled:
            return
        self.world.note(self.name, "goes on")
        self.stalled = False
        held, self._held = self._held, []
        wanted, self._wanted = self._wanted, []
        assert self.dealer is not None
        for frames in held:
            self.receive(self.dealer, frames)
        self._tick()
        for call, submit in wanted:
            (self.submit if submit else self.cancel)(call)

    def vanish(self) -> None:
        """The process is killed: its calls are gone."""
        self.world.note(self.name, "vanishes")
        self._leave()
        if self.dealer is not None:
            self.dealer.close()

    def close(self) -> None:
        """The owner closes it: every call ends now."""
        if not self.gone:
            self.oracle.closed.add(self.index)
            self.oracle.commands.closed.add(self.index)
            self.oracle.adapters.closed.add(self.index)
            self._take(Close(self.world.now))
            self._leave()

    def _leave(self) -> None:
        self.gone = True
        for call in self._calls.values():
            if not call.outcome:
                self.oracle.forget(call)
        for command in self._commands.values():
            self.oracle.commands.forget(self.world.now, command)
        for change in self._changes.values():
            self.oracle.adapters.forget(change)
        for call, submit in self._wanted:
            if submit:
                self.oracle.forget(call)
