"""Waiting for workers: asks for the status until the groups can serve, and says what they do meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable

from enginepool.errors import DeadlineExceeded, PoolDown, UnknownGroup
from enginepool.protocol.messages import GroupStatus, StatusReport

#: Seconds between two looks.
_LOOK_S = 0.25

Ask = Callable[[float | None], Awaitable[StatusReport]]


async def wait_until_ready(ask: Ask, within: float | None, group: str, say: Callable[[str], None]) -> StatusReport:
    """The first status report in which every group, or `group`, has a ready worker, or needs weights to have one.

    Raises:
        DeadlineExceeded, PoolDown, UnknownGroup: as `Pool.ready` says.
    """
    loop = asyncio.get_running_loop()
    until = None if within is None else loop.time() + within
    said: dict[tuple[str, str], str] = {}
    waiting = "no coordinator answered"
    while True:
        left = None if until is None else until - loop.time()
        if left is not None and left <= 0:
            raise DeadlineExceeded(f"not ready after {within:.3g} s: {waiting}", limit=f"{within:g} s")
        try:
            report = await ask(left)
        except DeadlineExceeded:
            continue
        groups = [named_group(report, group)] if group else report.groups
        for status in groups:
            if status.down:
                raise PoolDown(status.down)
            for line in _news(status, said):
                say(line)
        late = [status for status in groups if not _is_ready(status)]
        if groups and not late:
            return report
        waiting = "; ".join(_describe(status) for status in late) or "the pool has no group"
        await asyncio.sleep(_LOOK_S if left is None else min(_LOOK_S, left))


def named_group(report: StatusReport, name: str) -> GroupStatus:
    """The status of this group, or of the only one. Raises UnknownGroup."""
    found = [group for group in report.groups if name == group.name or (not name and len(report.groups) == 1)]
    if not found:
        names = ", ".join(group.name for group in report.groups)
        said = f"group: {name!r} is none of: {names}" if name else f"group: name one of: {names}"
        raise UnknownGroup(said, field="group", limit=names)
    return found[0]


def _is_ready(status: GroupStatus) -> bool:
    """A group that needs weights counts as ready: its publisher may wait for this call before it publishes them."""
    return bool(status.needs_weights) or any(worker.stage == "ready" for worker in status.workers)


def _news(status: GroupStatus, said: dict[tuple[str, str], str]) -> list[str]:
    """Lines for workers that do something else than when last looked at. Workers lost before count where none is ready."""
    lines: list[str] = []
    if said.get((status.name, "")) != status.no_worker:
        said[status.name, ""] = status.no_worker
        lines += [f"{status.name}: {status.no_worker}"] if status.no_worker else []
    for worker in status.workers:
        doing = f"{worker.stage}: {worker.detail}" if worker.detail else worker.stage
        before = said.get((status.name, worker.name))
        if before != doing and not (before is None and worker.stage == "lost" and _is_ready(status)):
            said[status.name, worker.name] = doing
            lines.append(f"{status.name}: {worker.name} {doing}")
    return lines


def _describe(status: GroupStatus) -> str:
    if not status.workers:
        return f"group {status.name!r}: {status.no_worker}" if status.no_worker else f"group {status.name!r} has no worker yet"
    doing = ", ".join(f"{w.name} {w.stage}{f' ({w.detail})' if w.detail else ''}" for w in status.workers)
    return f"group {status.name!r}: {status.no_worker and f'{status.no_worker}; '}{doing}"
