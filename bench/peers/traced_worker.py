"""A worker whose batches are traced: `python -m bench.peers.traced_worker`, configured as any worker is."""

from collections.abc import Awaitable
from contextvars import ContextVar
from inspect import isawaitable
from typing import Any

from bench.peers import traced_scheduler
from bench.tracing.marks import Marker
from enginepool.protocol.messages import Done
from enginepool.workers import main as worker
from enginepool.workers.events import Frame, RunBatch
from enginepool.workers.loop import WorkerProcess
from enginepool.workers.sglang.host import build
from enginepool.workers.sglang.patches.row_forwards import BATCH_ID
from enginepool.workers.sglang.score.forward_counter import Entries
from enginepool.workers.sglang.score.scoring import EngineScoring

#: the batch that this task computes
_batch: ContextVar[str] = ContextVar("batch", default="")


def trace(marker: Marker) -> None:
    """Mark what the process of a worker does with a batch: before SGLang has it, and after."""
    process: Any = WorkerProcess
    scoring: Any = EngineScoring
    entries: Any = Entries
    compute, ask, note, begin = process._batch, scoring._ask, entries._note, entries.__init__

    async def marked(sending: Awaitable[Any], rows: str) -> Any:
        result = await sending
        marker.mark("sent", rows)
        return result

    async def traced_batch(self: Any, run: RunBatch) -> tuple[Done, tuple[Frame, ...]]:
        key = f"b{run.batch.batch[1]}"
        _batch.set(key)
        marker.mark("received", key)
        done = await compute(self, run)
        marker.mark("encoded", key)
        return done

    async def traced_ask(self: Any, request: Any) -> Any:
        # A query that is computed ahead is asked for first: the last question of a batch is its rows.
        rows = str(request.rid[0])[:BATCH_ID]
        if key := _batch.get():
            marker.mark("asked", key, rows)
        found = await ask(self, request)
        marker.mark("read", rows)
        return found

    def traced_note(self: Any, message: Any) -> None:
        for rows in {str(rid)[:BATCH_ID] for rid in message.rids}:
            marker.mark("heard", rows)
        note(self, message)

    def traced_entries(self: Any, tm: Any, *args: Any) -> None:
        begin(self, tm, *args)
        if (send := getattr(tm, "_send_batch_request", None)) is not None:

            def traced_send(sent: Any, *args: Any) -> Any:
                rows = str(sent[0].rid)[:BATCH_ID]
                sending = send(sent, *args)
                if isawaitable(sending):
                    return marked(sending, rows)
                marker.mark("sent", rows)  # SGLang 0.5.17 awaits nothing here
                return sending

            tm._send_batch_request = traced_send

    process._batch, scoring._ask, entries._note, entries.__init__ = traced_batch, traced_ask, traced_note, traced_entries
    build.run_scheduler = traced_scheduler.run_scheduler


if __name__ == "__main__":
    trace(Marker())
    worker.main()
