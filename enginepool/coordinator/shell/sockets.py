"""Both ROUTER sockets on one loop: for clients and for workers.

`turn` is the only place that receives. It ends only when both sockets were found empty: a file descriptor of ZeroMQ does not
become readable again for messages that are there already. Code that sends outside a turn calls `turn` afterwards.
"""

import asyncio
import time
from collections.abc import Callable

from enginepool.coordinator.shell.adaptive_poll import WAIT_S, AdaptivePoll
from enginepool.coordinator.shell.router import Receive, Router, context

#: rounds before the loop may do something else
ROUNDS = 8
#: how often peers are asked that have something unread and were sent nothing since
SWEEP_S = 1.0
#: how long clients have to read their last answers, and how often it is checked whether they have
READ_S, LOOK_S = 0.5, 0.01


class Sockets:
    """Both routers on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clients: Router, workers: Router, quiet: Callable[[], bool]) -> None:
        self._loop = loop
        #: hardly anything is in flight: a reply may be worth staying awake for
        self._quiet = quiet
        #: after a send to workers, to clients, to both
        self._patience = (AdaptivePoll(), AdaptivePoll(), AdaptivePoll())
        self.clients = clients
        self.workers = workers
        self._take_client: Receive | None = None
        self._take_worker: Receive | None = None
        self._act: Callable[[], None] = lambda: None
        self._again: asyncio.Handle | None = None
        self._sweep: asyncio.Handle | None = None
        self._closed = False

    def listen(self, take_client: Receive, take_worker: Receive, act: Callable[[], None]) -> None:
        """Hand every message over from now on; call `act` once for all that came together."""
        self._take_client, self._take_worker, self._act = take_client, take_worker, act
        self._loop.add_reader(self.clients.fd, self._woken, self.clients, take_client)
        self._loop.add_reader(self.workers.fd, self._woken, self.workers, take_worker)
        self._sweep = self._loop.call_later(SWEEP_S, self._sweep_all)
        self.turn()

    def _woken(self, router: Router, take: Receive) -> None:
        """What woke the loop is acted upon before the other socket is asked."""
        if router.receive(take, told=True):
            self._act()
        self._settle()

    def turn(self) -> None:
        """Receive and act until both sockets were found empty, also where the loop was not told of a message."""
        self.clients.unsure = self.workers.unsure = True
        self._settle()

    def _settle(self) -> None:
        """Receive and act until no socket is unsure; after ROUNDS passes the loop has its turn first."""
        if self._take_client is None or self._take_worker is None or self._closed:
            return
        clients, workers = self.clients, self.workers
        for _ in range(ROUNDS):
            # Asking costs 1.1 µs: a socket that nothing was sent on is left to the loop.
            count = clients.receive(self._take_client) if clients.unsure else 0
            # After a full round of clients, which may have taken long, workers may have answered.
            if workers.unsure or clients.unsure:
                count += workers.receive(self._take_worker)
            if not count and not self._stay_awake():
                break
            if count:
                self._act()
        else:
            if self._again is None:
                self._again = self._loop.call_soon(self._turn_again)

    def _stay_awake(self) -> bool:
        """Wait a moment for what follows a send, if that has been worth it. True: a socket has a message, and is unsure."""
        clients, workers = self.clients, self.workers
        if not (clients.sent or workers.sent):
            return False
        patience = self._patience[workers.sent + 2 * clients.sent - 1]
        clients.sent = workers.sent = False
        if not self._quiet() or not patience.worth():
            return False
        until = time.perf_counter() + WAIT_S
        found = False
        while not found and time.perf_counter() < until:
            found = workers.asked() or clients.asked()
        patience.learn(found)
        return found

    def _turn_again(self) -> None:
        self._again = None
        self.turn()

    def _sweep_all(self) -> None:
        self._sweep = self._loop.call_later(SWEEP_S, self._sweep_all)
        # What they have answered counts first.
        self.turn()
        self.clients.sweep()
        self.workers.sweep()
        self.turn()

    def when_read(self, then: Callable[[], None]) -> None:
        """Call `then` once clients have read what they were sent, or after READ_S.

        A client's ZeroMQ drops what it has received and the client has not read, when the connection ends.
        """
        self._look(then, self._loop.time() + READ_S)

    def _look(self, then: Callable[[], None], until: float) -> None:
        if self._closed:
            return
        if self.clients.all_read() or self._loop.time() >= until:
            then()
        else:
            self._loop.call_soon(self.turn)  # something was sent
            # A client that leaves meanwhile is no event.
            self._loop.call_later(LOOK_S, self._look, then, until)

    def close(self) -> None:
        """Stop receiving. Sent messages linger for a moment. What the loop still calls finds that it is over."""
        self._closed = True
        if self._take_client is not None:
            self._loop.remove_reader(self.clients.fd)
            self._loop.remove_reader(self.workers.fd)
        for handle in (self._again, self._sweep):
            if handle is not None:
                handle.cancel()
        self.clients.close()
        self.workers.close()
        # Waits until the sent messages have left, or have lingered long enough.
        context().term()
