"""The journal is the commit point: what a real coordinator called published is what its successor brings workers to."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq

from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.shell.journal import Journal
from enginepool.host.folders import snapshot_folders
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import (
    Accept,
    Capabilities,
    Hello,
    Idle,
    Message,
    Ping,
    Pong,
    Ready,
    Register,
    ToClient,
    ToWorker,
    Welcome,
)
from enginepool.protocol.messages.weight_reports import publisher_of
from enginepool.protocol.messages.weights import (
    Commit,
    Committed,
    LoadWeights,
    Phase,
    Prepare,
    Prepared,
    Publish,
    Published,
    Restore,
    WeightsLoaded,
)
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

CAN = Capabilities("causal", 100, 64, 64, 8, 128, 16)
Context = zmq.Context[zmq.Socket[bytes]]
M = TypeVar("M", bound=Message)


class Peer:
    """A client or a worker that says what it is told to."""

    def __init__(self, context: Context, address: str, union: object) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)  # type: ignore[arg-type]

    def say(self, message: Message) -> None:
        self.socket.send_multipart([encode_header(message)])

    def hear(self, kind: type[M]) -> M:
        """The next message of this kind; pings are answered meanwhile."""
        end = time.monotonic() + PATIENCE_S
        while self.socket.poll(max(0, int(1000 * (end - time.monotonic())))):
            message = self._decoder.decode(self.socket.recv_multipart()[0])
            if isinstance(message, kind):
                return message
            if isinstance(message, Ping):
                self.say(Pong(message.at))
        raise AssertionError(f"no {kind.__name__} came")


Dial = Callable[[str, object], Peer]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Makes peers, and closes them."""
    context: Context = Context()
    made: list[Peer] = []

    def peer(address: str, union: object) -> Peer:
        made.append(Peer(context, address, union))
        return made[-1]

    yield peer
    for one in made:
        one.socket.close()
    context.term()


def worker_of(dial: Dial, daemon: Daemon, name: str) -> Peer:
    """An external worker that is ready on the weights of its checkpoint."""
    worker = dial(daemon.workers, ToWorker)
    worker.say(Register("g", name))
    worker.say(Idle(worker.hear(Accept).epoch))
    worker.say(Ready(CAN))
    return worker


def test_what_was_published_survives_the_coordinator(processes: Processes, tmp_path: Path, dial: Dial) -> None:
    # The test plays a worker too, which answers no pings while it does something else.
    config = sim_pool(tmp_path, workers=0, silence_s=PATIENCE_S)
    daemon = ForkedDaemon(processes, config).listening()
    worker = worker_of(dial, daemon, "first")
    publisher = dial(daemon.address, ToClient)
    publisher.say(Hello(b"p" * 16, b"t" * 16))
    assert "weights" in publisher.hear(Welcome).capabilities
    checkpoint = Publish(1, 7, transfer="checkpoint", path=str(tmp_path / "seven"))
    publisher.say(checkpoint)
    update = worker.hear(Prepare).update
    worker.say(Prepared(update))
    while publisher.hear(Phase).phase != "staged":
        continue
    publisher.say(Commit(1))
    assert worker.hear(LoadWeights).version == 7
    worker.say(WeightsLoaded(update, 7, "d" * 32))
    assert publisher.hear(Published).version == 7
    assert worker.hear(Committed).digest == "d" * 32

    daemon.kill()
    journal = Journal(Path(config.state_dir))
    journal.close()
    weights = GroupWeights(7, "d" * 32, "", str(tmp_path / "seven"), publisher=publisher_of(b"p" * 16, 1))
    assert journal.record.weights == {"g": weights}

    successor = ForkedDaemon(processes, config).listening()
    restore = worker_of(dial, successor, "second").hear(Restore)
    assert restore == Restore(7, "d" * 32, path=str(tmp_path / "seven"))


def test_snapshots_of_two_pools_do_not_meet(tmp_path: Path) -> None:
    first, second = snapshot_folders(tmp_path / "a"), snapshot_folders(tmp_path / "b")
    assert first.keys() == {"memory", "disk"}
    assert not set(first.values()) & set(second.values())
