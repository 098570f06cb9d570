"""Restarting workers of a pool, one after the other: each is ready again before the next one ends."""

import asyncio
from collections.abc import Awaitable, Callable

from enginepool.client.readiness import named_group
from enginepool.errors import BadRequest, PoolDown
from enginepool.protocol.messages import StatusReport, WorkerStatus

#: how often a worker that starts is looked at
LOOK_S = 0.2

#: asks for the status
Ask = Callable[[], Awaitable[StatusReport]]
#: restarts this worker (group, name, incarnation)
Restart = Callable[[str, str, str], Awaitable[StatusReport]]


async def restart_workers(ask: Ask, restart: Restart, group: str, worker: str, say: Callable[[str], None]) -> list[str]:
    """Restart one worker, or all that the pool has started for a group, and wait for each; returns their names.

    Raises:
        UnknownGroup: the pool has no such group, or several and none is named.
        BadRequest: the group has no such worker, or none that the pool started.
        PoolDown: a worker did not become ready again; those after it were not restarted.
    """
    status = named_group(await ask(), group)
    chosen = [one for one in status.workers if one.name == worker or (not worker and _is_own(one))]
    # As they are numbered; a report has them as they came.
    chosen.sort(key=lambda one: (len(one.name), one.name))
    if not chosen:
        names = ", ".join(one.name for one in status.workers[:8]) or "no worker"
        if worker:
            raise BadRequest(f"worker: {worker!r} is not a worker of group {status.name!r}, which has {names}", field="worker")
        why = f"has no worker that the pool started; restart external workers on their own hosts; it has {names}"
        raise BadRequest(f"group: {status.name!r} {why}", field="group")
    loop = asyncio.get_running_loop()
    for number, before in enumerate(chosen, 1):
        began = loop.time()
        report = await restart(status.name, before.name, before.incarnation)
        say(f"{before.name}: {'ends when its work is done' if before.stage == 'ready' else 'starts'}")
        await _until_ready(ask, restart, report, status.name, before)
        say(f"{before.name}: ready after {loop.time() - began:.1f} s ({number} of {len(chosen)})")
    return [one.name for one in chosen]


def _is_own(worker: WorkerStatus) -> bool:
    """Whether the pool started it: only then it has a name of its own, apart from that of its process."""
    return worker.name != worker.incarnation


async def _until_ready(ask: Ask, restart: Restart, report: StatusReport, group: str, before: WorkerStatus) -> None:
    """`report` answered the first `restart`. A coordinator that took over since does not know of it, and is asked again."""
    epoch = report.epoch
    while True:
        now = next((one for one in named_group(report, group).workers if one.name == before.name), None)
        if now is None:
            raise PoolDown(f"{before.name} did not become ready again: group {group!r} has no such worker any more")
        if now.stage == "retired" or (now.incarnation != before.incarnation and now.restarts > before.restarts):
            raise PoolDown(f"{now.name} did not become ready again: {now.detail}")
        if now.incarnation not in ("", before.incarnation) and now.stage == "ready":
            return
        await asyncio.sleep(LOOK_S)
        report = await ask()
        if report.epoch != epoch:
            epoch = report.epoch
            report = await restart(group, before.name, before.incarnation)
