"""`WeightPublisher`: a trainer's side of weight updates. It opens the transaction, broadcasts the tensors as rank 0, commits.

One update is an `UpdateHandle`, whose file says who holds what. `update_sender.py` moves its bytes in a thread. `tensors.py`
says what a source is. The messages to the coordinator are decided in `client/session/updates.py` (pure).
"""

import asyncio
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

from enginepool.client.arguments import check_choice, check_flag, check_group, check_options, check_timeout, kind, utf8
from enginepool.client.metadata_update import publish_message
from enginepool.client.session.events import CommittedWeightsLost
from enginepool.errors import BadRequest, EnginepoolError, PoolClosed
from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.messages.weight_reports import UpdateRecord
from enginepool.protocol.messages.weights import MAX_MS, InFlight, Publish, RunningGenerations
from enginepool.trainer.buffers import Buffers
from enginepool.trainer.ipc_export import IpcExporter
from enginepool.trainer.publisher_context import PublisherContext
from enginepool.trainer.retries import Retries
from enginepool.trainer.tensors import Described, Gather, Rename, SendPlan, Source, make_plan
from enginepool.trainer.update_handle import UpdateHandle

if TYPE_CHECKING:
    from enginepool.client.pool import Pool

torch: Any = importlib.import_module("torch")

log = logging.getLogger("enginepool")

#: seconds between two questions whether weights are still wanted
WANTED_S = 5.0


class UpdateOptions(TypedDict, total=False):
    """The options of `WeightPublisher.start` and `publish`, which say what each one does."""

    transfer: Literal["staged", "direct", "ipc"]
    in_flight: InFlight
    drain: float
    after_drain: RunningGenerations
    partial: bool
    new_run: bool
    manifest: Described | None


class WeightPublisher:
    """Brings new weights to all workers of a group, in one transaction: all of them, or none.

    One publisher serves a trainer's whole life; the process group between it and the workers is formed with the first update
    and kept. Used on the event loop of its pool. With a trainer of several ranks there is one on each: rank 0's has the pool,
    and all ranks make the same calls in the same order.

    Args:
        pool: the pool; None on trainer ranks above 0.
        group: the pool's group; may be left out where there is one.
        device: where the bytes start from: `cuda` (the current GPU; copies within a host, NCCL between hosts), `cpu` (gloo), a
            torch device, or `auto`: cuda if there is a GPU. Tensors may lie elsewhere.
        bucket_bytes: bytes that are broadcast at once; two buckets are kept on `device`.
        host: the address at which workers' hosts reach this one.
        rename: (name, tensor) → the checkpoint's name, None to leave the tensor out, or (name, tensor) pairs if one becomes
            several (fused experts). It is called first with tensors that have no memory. What FSDP, DDP, activation
            checkpointing and torch.compile put into the names of a module or a mapping is taken off without it.
        gather: (name, tensor) → the whole tensor. By default DTensors (FSDP2) are gathered and others are whole.
        dtype: floating tensors are converted to it, before they are gathered: torch.bfloat16 halves the bytes of a float32
            master.
        trainer_group: a torch process group of all trainer ranks that nothing else uses
            (`torch.distributed.new_group(backend="gloo")`). A rank that fails while others gather a tensor holds them up for as
            long as the process group of that gather allows.
        timeout: seconds for `start` until all is sent, and for `finish`. Ranks above 0 need that of rank 0, too: without one of
            their own, their `finish` gives the update up after two of it and `rank_timeout`.
        lease: seconds of silence after which the pool gives an update of this publisher up and serves on.
        collective_timeout: seconds for the process group to form, and for each bucket.
        rank_timeout: seconds in which all trainer ranks have to call `publish`, and after which a rank that says nothing (its
            process died, or stands still) counts as lost. Ranks above 0 need it, too.
        retry_timeout: seconds in which `publish` tries again what failed with an error whose `retry` is True, counted from the
            first failure; 0: it tries once.
        on_wanted: called with the version when the pool has lost its weights and needs them again, also when that was so before
            this publisher was made; `wanted` is set then too. Every publisher of the group hears it.
        keep_memory: what `ipc` lays tensors out in stays for the next update; else it goes back after each.

    Attributes:
        rank, group: of the trainer; of the pool.
        wanted: an asyncio.Event, set while the pool has lost its weights and waits for them; a published update clears it, and
            within seconds also what brings them back without this publisher.
        wanted_version: the version that it has lost: publish that one as it was, or a later one.
    """

    def __init__(
        self,
        pool: "Pool | None",
        *,
        group: str = "",
        device: Any = "auto",
        bucket_bytes: int = 512 << 20,
        host: str = "127.0.0.1",
        rename: Rename | None = None,
        gather: Gather | None = None,
        dtype: Any = None,
        trainer_group: Any = None,
        timeout: float = 600.0,
        lease: float = 10.0,
        collective_timeout: float = 60.0,
        rank_timeout: float = 10.0,
        retry_timeout: float = 300.0,
        on_wanted: Callable[[int], None] | None = None,
        keep_memory: bool = False,
    ) -> None:
        if type(bucket_bytes) is not int or bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
            raise BadRequest(f"bucket_bytes: {bucket_bytes!r}; a positive multiple of {ALIGNMENT}", field="bucket_bytes")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise BadRequest(f"dtype: {dtype!r}; a floating dtype of torch, such as torch.bfloat16, or None", field="dtype")
        if not isinstance(cast("object", host), str) or not host:
            raise BadRequest(f"host: {host!r}; the address at which workers' hosts reach this one", field="host")
        utf8("host", host)
        self.rank = _checked_rank(pool, trainer_group)
        self.group = check_group(group)
        self.wanted = asyncio.Event()
        self.wanted_version = self._times_wanted = 0
        for name, hook in (("rename", rename), ("gather", gather), ("on_wanted", on_wanted)):
            if hook is not None and not callable(hook):
                raise BadRequest(f"{name}: {kind(hook)}; something that can be called, or None", field=name)
        self._hooks: dict[str, Any] = {"rename": rename, "gather": gather, "dtype": dtype}
        self._lease_ms = int((check_timeout(lease, "lease", MAX_MS // 1000) or 10.0) * 1000)
        self._on_wanted = on_wanted
        buffers = Buffers(device_of(device))
        self._context = PublisherContext(
            connection=None if pool is None else pool.connection,
            next_version=self._next_version,
            trainer_group=trainer_group,
            buffers=buffers,
            exporter=IpcExporter(buffers, keep=check_flag("keep_memory", keep_memory)),
            host=host,
            bucket_bytes=bucket_bytes,
            timeout=check_timeout(timeout) or 600.0,
            collective_timeout=check_timeout(collective_timeout, "collective_timeout") or 60.0,
            rank_timeout=check_timeout(rank_timeout, "rank_timeout") or 10.0,
            committed=self._has_weights,
        )
        self._pool = pool
        self._retry_s = check_timeout(retry_timeout, "retry_timeout", zero=True) or 0.0
        self._asking: asyncio.Task[None] | None = None
        self._closed = False
        if pool is not None:
            pool.connection.wanted.append(self._hear_wanted)
            # The pool may have said so before this publisher existed.
            self._asking = self._context.loop.create_task(self._ask_whether_wanted(pool))

    def __repr__(self) -> str:
        return f"<WeightPublisher group={self.group!r} rank={self.rank} {self._context.current or 'idle'}>"

    async def __aenter__(self) -> "WeightPublisher":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def publish(self, source: Source, version: int | None = None, **options: Unpack[UpdateOptions]) -> UpdateRecord:
        """Bring the tensors of `source` to the group as `version`: `start` and `finish`, with their arguments and errors.

        An update that fails with an error whose `retry` is True (a worker was lost, another update is under way) is tried
        again, on all trainer ranks together, for at most `retry_timeout` seconds. `source` is read again each time, so an
        iterator is tried once. What the trainer's own ranks caused is not tried again: a source that raises, a rank that is
        gone.

        Returns:
            what the history keeps of it: outcome, digest, members, and how long each phase took.
        """
        check_options("publish", options, UpdateOptions, "source", "version")
        retries = Retries(
            0.0 if isinstance(source, Iterator) else self._retry_s, self._context.loop.time, next_version=version is None
        )
        while True:
            publish, plan = self._prepared(source, version, **options)
            handle = UpdateHandle(self._context, version, retries.again)
            try:
                await handle.begin(publish, plan)
                return await handle.finish()
            except EnginepoolError as error:
                if handle.again_s is None:
                    raise
                log.warning("publish: trying again in %.1f s: %s", handle.again_s, error)
            # The workers that were lost start meanwhile. Nothing says when another publisher is done.
            await asyncio.sleep(handle.again_s)

    async def start(self, source: Source, version: int | None = None, **options: Unpack[UpdateOptions]) -> UpdateHandle:
        """Begin an update. Returns when the workers have agreed to names and shapes; tensors flow while the pool serves.

        The source must not change until `await handle.sent()`, or `finish`, returns. It must not give the same buffer for two
        tensors. The event loop has to run meanwhile: it renews the lease. A trainer that computes in its main thread takes
        `BlockingPool` and `BlockingWeightPublisher`.

        Trainer ranks above 0 use only their `source`, `version` and `manifest`. Rank 0 decides all other options for all ranks.

        Args:
            source: a torch.nn.Module, a mapping of names to tensors (a state dict), (name, tensor) pairs, or a callable that
                gives such pairs. Names are the checkpoint's. An iterator without `manifest` is read to its end at once; a
                callable without one is called twice.
            version: above the committed one; a pool that has lost its weights takes them again under their own. None: the
                committed one + 1. All trainer ranks name the same.
            transfer: where the bytes go.
                - `staged`, the default: into staging memory of each worker, while the engines serve.
                - `direct`: straight into the engines, which do not serve from `finish` on, and are not checked for NaN before.
                  It needs no staging memory.
                - `ipc`: into memory on this publisher's `device`, as large as all tensors together, out of which the engines
                  copy. The workers must be on this host, and their engines must see that GPU: a trainer that shares GPUs with
                  its engines.
            in_flight: what happens to work in flight before the engines load.
                - `drain`, the default: it finishes.
                - `abort`: batches run again on the new weights, and sequences that are generated go on after their last token.
                - `in_place`: batches finish. Sequences stay in their engines, which pause for the load, and go on under the new
                  weights over the KV of the old ones.
                - `retract`: as `in_place`, but the engines compute the KV of all sequences again on the new weights.
            drain: seconds that batches, and with `drain` sequences, are waited for at most; batches are put back then.
                Default: 10.
            after_drain: what happens to sequences that `drain` did not wait for: `abort`, the default, `in_place` or `retract`.
            partial: tensors of the model may be missing. Default: False.
            new_run: the version may be any, for an operator who starts another training in the same pool. Default: False.
            manifest: (name, dtype, shape) of each tensor that comes out, in their order. Needed where `gather` gives another
                shape than the tensor had (Megatron's shards).

        One attempt; `publish` tries again.

        Raises:
            Publishing: another update of the group is under way.
            VersionBackwards: `version` is not above the committed one, or that names other weights.
            WeightsRefused: names, shapes or dtypes do not fit the model; the message names one.
            UpdateAborted: the pool gave it up; or a trainer rank is gone, failed, or has not called `publish` within
                `rank_timeout`, as all ranks hear, and which one.
            BadRequest: the source cannot be sent; `field` names the tensor. Or trainer ranks bring different versions, of which
                all of them hear before anything is gathered.
        """
        check_options("start", options, UpdateOptions, "source", "version")
        publish, plan = self._prepared(source, version, **options)
        handle = UpdateHandle(self._context, version)
        await handle.begin(publish, plan)
        return handle

    def _prepared(
        self,
        source: Source,
        version: int | None,
        *,
        transfer: Literal["staged", "direct", "ipc"] = "staged",
        in_flight: InFlight = "drain",
        drain: float = 10.0,
        after_drain: RunningGenerations = "abort",
        partial: bool = False,
        new_run: bool = False,
        manifest: Described | None = None,
    ) -> tuple[Publish, Callable[[], SendPlan]]:
        """The message that opens an update, and how its plan is made. Raises BadRequest, PoolClosed."""
        if self._closed:
            raise PoolClosed("the publisher is closed")
        check_choice("transfer", transfer, ("staged", "direct", "ipc"))
        publish = publish_message(
            0 if version is None else version,
            group=self.group,
            transfer=transfer,
            in_flight=in_flight,
            drain=drain,
            new_run=new_run,
            after_drain=after_drain,
        )
        publish.partial = check_flag("partial", partial)
        publish.lease_ms, publish.bucket_bytes = self._lease_ms, self._context.bucket_bytes
        return publish, lambda: make_plan(source, manifest=manifest, **self._hooks)

    async def _next_version(self) -> int:
        assert self._pool is not None, "rank 0 has the pool"
        return (await self._pool.weights(self.group, timeout=self._context.timeout)).version + 1

    async def close(self) -> None:
        """Give up what is under way, leave the process group, give memory back. Twice is once. Updates after it raise
        PoolClosed."""
        self._closed = True
        if self._context.current is not None and not self._context.loop.is_closed():
            await self._context.current.abort("the publisher closed")
        if self._asking is not None:
            self._asking.cancel()
        if self._pool is not None and self._hear_wanted in self._pool.connection.wanted:
            self._pool.connection.wanted.remove(self._hear_wanted)
        await self._context.release()

    async def _ask_whether_wanted(self, pool: "Pool") -> None:
        """At first, and as long as weights are wanted: a worker or another publisher may bring them, which no message says."""
        with suppress(EnginepoolError):  # the pool is closed: no weights are needed
            while True:
                heard = self._times_wanted
                report = await pool.status(timeout=None)
                needy = [one for one in report.groups if one.needs_weights and self.group in ("", one.name)]
                if heard == self._times_wanted:  # else they were lost again meanwhile
                    if not needy:
                        self.wanted.clear()
                    elif not self.wanted.is_set():
                        self._hear_wanted(CommittedWeightsLost(needy[0].name, needy[0].version or 0))
                await self.wanted.wait()
                await asyncio.sleep(WANTED_S)

    def _has_weights(self) -> None:
        self._times_wanted += 1  # a status from before this says nothing
        self.wanted.clear()

    def _hear_wanted(self, wanted: CommittedWeightsLost) -> None:
        if wanted.group == self.group or not self.group:
            self._times_wanted += 1
            self.wanted_version = wanted.version
            if self._on_wanted is not None:
                # On its own: what it raises is the loop's to tell, and keeps no other publisher from hearing it.
                self._context.loop.call_soon(self._on_wanted, wanted.version)
            self.wanted.set()


def _checked_rank(pool: object, trainer_group: Any) -> int:
    """This rank of the trainer. Raises BadRequest."""
    if trainer_group is not None and not hasattr(trainer_group, "rank"):
        # torch.distributed.new_group gives an int to ranks that are not in the group.
        allowed = "a torch process group that has this rank as a member, or None"
        raise BadRequest(f"trainer_group: {kind(trainer_group)}; {allowed}", field="trainer_group")
    rank: int = 0 if trainer_group is None else trainer_group.rank()
    if pool is not None and not hasattr(pool, "connection"):
        allowed = "a Pool, awaited or entered; BlockingWeightPublisher takes a BlockingPool"
        raise BadRequest(f"pool: {kind(pool)}; {allowed}", field="pool")
    if (pool is None) != (rank > 0):
        raise BadRequest("pool: rank 0 of the trainer has the pool, the other ranks have None", field="pool")
    return rank


def device_of(device: Any) -> Any:
    """The torch device that a publisher's `device` is in this thread: each has a current GPU of its own. Raises BadRequest."""
    if isinstance(device, str) and device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BadRequest(f"device: {device!r}: {error}", field="device") from None
    if found.type not in ("cpu", "cuda"):
        raise BadRequest(f"device: {found}; cpu or cuda", field="device", limit="cpu, cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BadRequest(f"device: {found}; torch finds no GPU here", field="device", limit="cpu")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
