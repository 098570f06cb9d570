"""A worker's connection to its stager."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

from enginepool.protocol.basis import Message
from enginepool.protocol.messages.weights import Staged
from enginepool.workers.stager.messages import AskHeld, SnapshotMissing, StagerHolds, next_message, packet

#: a stager that is being started has this long to listen
CONNECT_S = 10.0
#: Making room takes long where memory must be cleared.
ANSWER_S = 60.0
#: A stager answers while it does other work.
ALIVE_S = 10.0

Answer = TypeVar("Answer")


class StagerGone(Exception):
    """There is no stager, or it ended or hangs. The message is one line."""


class StagerLink:
    """Made once; connects when it is needed.

    Args:
        path: of the stager's Unix socket; "": there is none.
        received: called with what answers no question: the `staged` that the stager sends when all bytes are received, or
            cannot be, and `snapshot_missing`.
        lost: called with the reason when the stager is gone.
    """

    def __init__(self, path: str, received: Callable[[Staged | SnapshotMissing], None], lost: Callable[[str], None]) -> None:
        self._path = path
        self._received = received
        self._lost = lost
        self._writer: asyncio.StreamWriter | None = None
        self._answer: asyncio.Future[Message] | None = None
        self._asking = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    @property
    def exists(self) -> bool:
        """This worker was started with a stager."""
        return bool(self._path)

    async def ask(self, message: Message, kind: type[Answer], timeout_s: float = ANSWER_S) -> Answer:
        """The stager's answer of type `kind`. Raises StagerGone."""
        async with self._asking:
            writer = await self._connected()
            answer = self._answer = asyncio.get_running_loop().create_future()
            try:
                writer.write(packet(message))
                async with asyncio.timeout(timeout_s):
                    found = await answer
            except TimeoutError:
                # It hangs, or is stopped. Its supervisor starts another one when it ends.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(_peer(writer), signal.SIGKILL)
                raise StagerGone(f"the stager says nothing for {timeout_s:g} s, and was killed") from None
            finally:
                self._answer = None
        if not isinstance(found, kind):
            raise StagerGone(f"the stager answered {type(found).__name__}")
        return found

    def tell(self, message: Message) -> None:
        """Say something that is not answered; nothing where no stager is connected: it then knows of no update."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(packet(message))

    async def close(self) -> None:
        """Leave the stager to the next worker."""
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await self._reading

    async def _connected(self) -> asyncio.StreamWriter:
        if self._writer is not None and not self._writer.is_closing():
            return self._writer
        if not self._path:
            raise StagerGone("this worker has no stager")
        loop = asyncio.get_running_loop()
        end = loop.time() + CONNECT_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
                break
            except OSError as error:
                if loop.time() >= end:
                    raise StagerGone(f"no stager at {self._path}: {error.strerror}") from None
            await asyncio.sleep(0.05)
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, writer))
        return writer

    async def alive(self) -> None:
        """Make sure that it answers: one that does not is killed at once, not after the time of a long question. Raises
        StagerGone."""
        await self.ask(AskHeld(), StagerHolds, ALIVE_S)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reason = "the stager ended"
        try:
            while (message := await next_message(reader)) is not None:
                if isinstance(message, Staged | SnapshotMissing):
                    self._received(message)
                elif self._answer is not None and not self._answer.done():
                    self._answer.set_result(message)
        except ValueError as error:
            reason = f"the stager sent an invalid message: {error}"
        with contextlib.suppress(OSError):
            writer.close()
        if self._writer is writer:
            self._writer = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(StagerGone(reason))
        self._lost(reason)


def _peer(writer: asyncio.StreamWriter) -> int:
    """The process that listens on the other side of a Unix socket."""
    end: socket.socket = writer.get_extra_info("socket")
    pid, _, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid
