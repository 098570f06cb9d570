"""The interface of a launcher: it starts, watches and stops worker units.

A worker unit is a worker and its stager, on one host. `local` runs them as child processes of this host. The daemon gets a
`MakeLauncher` as an argument, so another launcher, or a test's, needs no change there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from enginepool.config import PoolConfig
from enginepool.coordinator.core.events import WorkerExited
from enginepool.coordinator.core.group_weights import EarlierWorker, GroupWeights


@dataclass(frozen=True)
class LauncherContext:
    """What a launcher needs to know of the process that uses it.

    Attributes:
        config: the groups and how many workers each has.
        directory: where records, logs and sockets of worker units lie.
        endpoint: where workers connect.
        lifeline: a descriptor whose end of file ends the workers; None: they outlive this process.
        exited: called on the loop, exactly once for each worker that was started or adopted.
        key: the file with the key of the workers, if it is not the pool's own.
        external: the coordinator at `endpoint` is another process, perhaps on another host. Workers end with `lifeline`; their
            stagers wait for successors.
    """

    config: PoolConfig
    directory: Path
    endpoint: str
    lifeline: int | None
    exited: Callable[[WorkerExited], None]
    key: str = ""
    external: bool = False


class Launcher(Protocol):
    """Starts, watches and stops worker units. It reports the end of each worker by `LauncherContext.exited`."""

    def adopt(self) -> list[EarlierWorker]:
        """Workers that an earlier coordinator started. Those that run are watched from now on.

        First, workers of slots that the pool no longer has are stopped."""
        ...

    def start(self, group: str, index: int, incarnation: str, weights: GroupWeights | None = None) -> bool:
        """Start a worker that will register as `incarnation`, on the checkpoint of `weights`; None: on the configured model.
        Returns whether it was started; if not, it is reported as exited, with `unstarted`."""
        ...

    def stop(self, incarnation: str, reason: str) -> None:
        """End a worker and everything that it started, now. `reason` is reported as the reason of its end."""
        ...

    def drain(self) -> None:
        """Ask all workers to finish the batches that they have begun, and to end."""
        ...

    def stop_all(self) -> None:
        """End all workers and stagers, without waiting."""
        ...

    def finish(self, finished: Callable[[], None]) -> None:
        """End all workers. Stagers may first write the snapshots that they owe; `finished` is called when they have ended."""
        ...

    def restore_folders(self) -> None:
        """Write the records of running processes again, because their folder was removed. A successor needs them."""
        ...


#: makes the launcher of a coordinator. Raises ConfigError: the workers cannot run.
MakeLauncher = Callable[[LauncherContext], Launcher]
