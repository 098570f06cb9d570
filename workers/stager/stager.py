"""What a stager does: it answers its worker, receives updates and keeps the committed weights."""

import asyncio
import contextlib
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING

from enginepool.protocol.basis import Message
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import worst
from enginepool.protocol.messages.weights import Committed, Join, Joined, ReleaseWeights, Staged
from enginepool.workers.log import report, say
from enginepool.workers.stager.messages import (
    AskHeld,
    Reserve,
    Reserved,
    Room,
    SnapshotMissing,
    StagerHolds,
    StagerSpec,
    next_message,
    packet,
)
from enginepool.workers.stager.saving import Snapshots
from enginepool.workers.stager.snapshot import remove_all
from enginepool.workers.stager.state import KeptUpdate, StagedUpdate

if TYPE_CHECKING:
    from enginepool.transfer.process_group import ProcessGroup
    from enginepool.workers.stager.memory import Memory

#: the other ranks have this long to join
JOIN_S = 60.0
TICK_S = 1.0


class Stager:
    """Answers its worker. Everything runs on the loop, except what waits for torch, which runs on threads."""

    def __init__(self, spec: StagerSpec) -> None:
        self.spec = spec
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self.loop.create_future()
        self.update: StagedUpdate | None = None
        self.kept: KeptUpdate | None = None
        self.group: ProcessGroup | None = None
        self.peer = ""
        #: of the last update: the group was formed for memory of that kind, and for buckets that stay there or do not
        self.staging = "", False
        #: memory taken before the engine started, and after an update on a GPU: there is room for one
        self.device_memory: Memory | None = None
        #: the last snapshot in shared memory that this stager was asked for
        self.memory_snapshot = ""
        #: no worker will need the committed weights again
        self.unwanted = False
        self._worker: asyncio.StreamWriter | None = None
        self._making = asyncio.Lock()
        self._friends = 0
        self._alone_since = time.monotonic()
        self._snapshots = Snapshots(say, self._snapshot_missing)
        self._leaving: threading.Thread | None = None
        self._listening: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Listen at the socket, from now on."""
        with contextlib.suppress(OSError):  # its folder is missing: the next tick tries again
            await asyncio.start_unix_server(self.serve, self.spec.socket)

    # --- connections ----------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end. With its first message it takes the place of the worker before."""
        self._friends += 1
        served = False
        try:
            while (message := await next_message(reader)) is not None:
                if not served:
                    served, before, self._worker = True, self._worker, writer
                    if before is not None:
                        before.close()
                if self._worker is writer:
                    await self._handle(message, writer)
        except Exception as error:
            # A worker that sends an invalid message loses its connection, not the weights that are kept here.
            report(error, "the connection of a worker ends")
        finally:
            self._friends -= 1
            self._alone_since = time.monotonic()
            if self._worker is writer:
                self._worker = None
            writer.close()

    def _say(self, message: Message, to: asyncio.StreamWriter | None) -> None:
        """To the worker that asked; its successor waits for other answers."""
        if to is not None and not to.is_closing():
            to.write(packet(message))

    def owner_gone(self) -> None:
        """The program that embeds the pool ended: no worker will need the weights again."""
        assert self.spec.lifeline_fd is not None
        self.loop.remove_reader(self.spec.lifeline_fd)
        if self.memory_snapshot:
            remove_all(self.memory_snapshot)
        if self.ended.done():
            os._exit(0)  # it was writing snapshots, which have become useless
        self.unwanted = True
        self.ended.set_result("the process that owns this stager is gone")

    def finish(self) -> None:
        """Return when the snapshots are written that were asked for."""
        self._snapshots.finish()

    def tick(self) -> None:
        """Called every TICK_S: end when neither an owner nor a worker needs this process."""
        self.loop.call_later(TICK_S, self.tick)
        if not os.path.exists(self.spec.socket) and not self.ended.done():
            # The coordinator makes a folder again that was removed; the next worker looks for the socket there.
            self._listening = self.loop.create_task(self.listen())
        if not self._friends and time.monotonic() - self._alone_since > self.spec.orphan_s and not self.ended.done():
            self.ended.set_result(f"neither an owner nor a worker for {self.spec.orphan_s:g} s")

    # --- messages -------------------------------------------------------------------------------------------------------

    async def _handle(self, message: Message, worker: asyncio.StreamWriter) -> None:
        if isinstance(message, Room | Reserve):
            await self._make(message, worker)
        elif isinstance(message, Join):
            if self.update is None or self.update.id != message.update:
                why = "this update is not known here; the stager was restarted"
                self._say(Joined(message.update, "update_aborted", why), worker)
                return
            self.update.joining = True
            thread = threading.Thread(target=self._run, args=(self.update, message), name="receive", daemon=True)
            thread.start()
        elif isinstance(message, ReleaseWeights):
            if self.update is not None and self.update.id == message.update:
                self._forget()
        elif isinstance(message, Committed):
            self._keep(message)
        elif isinstance(message, AskHeld):
            self._say(self._held(message.digest), worker)

    async def _make(self, message: Room | Reserve, worker: asyncio.StreamWriter) -> None:
        """Memory, on a thread; its worker may die meanwhile, and the next one asks for some."""
        async with self._making:
            if isinstance(message, Reserve):
                self._forget()
            try:
                if isinstance(message, Room):
                    reserved = await asyncio.to_thread(self._room, message)
                else:
                    reserved = await asyncio.to_thread(self._reserve, message, worker)
            except ImportError as error:
                reserved = Reserved(message=f"no torch here: {error}")
            except (OSError, RuntimeError) as error:
                nbytes = message.nbytes if isinstance(message, Room) else layout(message.manifest).nbytes
                reserved = Reserved(message=f"no room for {nbytes} bytes of weights: {error}")
            self._say(reserved, worker)

    def _forget(self) -> None:
        """Give up the update that is not committed."""
        update, self.update = self.update, None
        if update is None:
            return
        update.forgotten = True
        if update.joining:
            # Other ranks may join much later. The worker does not wait for them.
            self._say(Joined(update.id, "update_aborted", "the update was given up meanwhile"), update.worker)
        if update.received is None or update.received.code:
            self._leave()

    def _leave(self) -> None:
        self.peer = ""
        group, self.group = self.group, None
        if group is not None:
            # An abort may wait for a peer that is stopped.
            self._leaving = threading.Thread(target=group.abort, name="leave", daemon=True)
            self._leaving.start()

    def _held(self, digest: str) -> StagerHolds:
        kept, update = self.kept, self.update
        if update is not None and update.complete(digest):
            return StagerHolds(0, digest, update.wanted.manifest, update.memory.regions(), update.memory.shards > 0)
        if kept is None:
            return StagerHolds()
        return StagerHolds(kept.version, kept.digest, kept.manifest, kept.memory.regions(), kept.memory.shards > 0)

    # --- memory ---------------------------------------------------------------------------------------------------------

    def _room(self, message: Room) -> Reserved:
        """Raises ImportError, or OSError: no room."""
        from enginepool.workers.stager import memory as stager_memory

        gpus = stager_memory.gpus_of(self.spec.device, self.spec.gpus)
        if not gpus:
            return Reserved(staging="host")
        if self.device_memory is None or self.device_memory.nbytes < message.nbytes:
            self.device_memory = None
            self.device_memory = stager_memory.DeviceMemory(message.nbytes, gpus)
        return Reserved(staging="device", most=max(tensor.numel() for tensor in self.device_memory.tensors))

    def _reserve(self, message: Reserve, worker: asyncio.StreamWriter | None = None) -> Reserved:
        """Raises ImportError, or OSError or RuntimeError: no room."""
        from enginepool.workers.stager import memory as stager_memory

        gpus = stager_memory.gpus_of(self.spec.device, self.spec.gpus)
        if not gpus:
            stager_memory.be_small()
        nbytes = layout(message.manifest).nbytes
        memory = self.device_memory
        if memory is None or memory.nbytes < nbytes:
            # The weights that are kept there are given up: a GPU has room for one space.
            memory = self.device_memory = None
            if self.kept is not None and self.kept.memory.kind == "device":
                self._snapshots.leave_memory()
                self.kept = None
            memory = stager_memory.make_memory(nbytes, gpus=gpus)
            if memory.kind == "device":
                self.device_memory = memory
        staging = memory.kind, memory.shards > 1
        if staging != self.staging:
            self._leave()  # the other ranks were told whether buckets stay where they are received
        if self.group is None:
            self.peer = secrets.token_hex(8)
        self.staging = staging
        self.update = StagedUpdate(message, memory, worker)
        why_host = memory.why_host if memory.kind == "host" else ""
        return Reserved(memory.kind, self.peer, why_host, regions=memory.regions(), sharded=memory.shards > 0)

    # --- receiving ------------------------------------------------------------------------------------------------------

    def _run(self, update: StagedUpdate, message: Join) -> None:
        """On a thread of its own: join, receive, report."""
        from enginepool.transfer.collective import join
        from enginepool.transfer.process_group import CollectiveError

        group, wanted = self.group, update.wanted
        device = "cuda:0" if message.backend == "nccl" else "cpu"
        try:
            if self._leaving is not None:
                self._leaving.join()  # it may write to this memory until then
            if group is None or group.name != message.rendezvous:
                if group is not None:
                    self.group = None
                    group.abort()
                group = join(
                    message.address, message.rendezvous, message.world, message.rank,
                    backend=message.backend, device=device, timeout_s=JOIN_S,
                    copies=True, stays=update.memory.shards < 2 and (update.memory.kind == "device") == (device != "cpu"),
                )  # fmt: skip
                if update.forgotten:
                    group.abort()
                    return
                self.group = group
            # Everything that can be done before the first byte arrives.
            reception = update.memory.reception(wanted.manifest, wanted.bucket_bytes, device, wanted.targets)
        except Exception as error:  # of any kind: the worker waits for an answer
            self._soon(update, Joined(update.id, "update_aborted", why(error)))
            return
        if update.forgotten:
            return  # it receives nothing, so the weights in its memory stay
        if self.kept is not None and self.kept.memory is update.memory:
            self._snapshots.leave_memory()
            self.kept = None
        self._soon(update, Joined(update.id))
        try:
            digest, findings = reception.receive(group)
            update.received = Staged(update.id, digest, worst(findings))
        except Exception as error:
            broken = isinstance(error, CollectiveError)
            update.received = Staged(update.id, code="update_aborted", message=why(error), broken=broken)
        self._soon(update, update.received)

    def _soon(self, update: StagedUpdate, message: Message) -> None:
        def say() -> None:
            if not update.forgotten:
                update.joining = False
                self._say(message, update.worker)

        self.loop.call_soon_threadsafe(say)

    # --- keeping --------------------------------------------------------------------------------------------------------

    def _keep(self, message: Committed) -> None:
        update, kept = self.update, self.kept
        whole = update is not None and update.complete(message.digest)
        if update is not None and (whole or update.id == message.update):
            self.update = None
            kept = KeptUpdate(message.version, message.digest, update.wanted.manifest, update.memory) if whole else None
        elif kept is not None and kept.digest == message.digest:
            kept.version = message.version
        else:
            kept = None  # the group moved on without this stager
        self.kept = kept
        if message.snapshot.startswith("/dev/shm/"):
            self.memory_snapshot = message.snapshot
        if kept is not None and message.snapshot:
            self._snapshots.write(kept, message.snapshot)
        else:
            self._snapshots.stop_trying()

    def _snapshot_missing(self, why: str) -> None:
        """Called in a thread: the operator is to hear of it."""
        self.loop.call_soon_threadsafe(lambda: self._say(SnapshotMissing(why), self._worker))


def why(error: Exception) -> str:
    """One line for the worker. An unforeseen error is told with its class, and in full on stderr."""
    from enginepool.transfer.process_group import CollectiveError

    if isinstance(error, CollectiveError):
        return str(error)
    report(error, "an update")
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
