"""Which GPUs each worker of this host gets: the GPUs that are visible here, and their allocation to workers."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginepool.config import GroupConfig, PoolConfig, gpus_per_worker, uses_gpus
from enginepool.errors import ConfigError


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Where that is not set, they are counted: CUDA numbers the GPUs that it finds from 0. Their numbers on the host differ,
    and a container has the device files of its own GPUs alone. Instances of a divided GPU (MIG) have no such files: they are
    used where they are named. Hosts without such files (WSL) have none, and their workers see what CUDA finds.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        found = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
        return [str(index) for index in range(len(found))]
    names = [name.strip() for name in named.split(",")]
    # CUDA ignores everything from the first invalid name on; -1 is how that is asked for.
    end = next((index for index, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:end]


def allocate_gpus(
    groups: Mapping[str, GroupConfig], visible: Sequence[str], used: Mapping[tuple[str, int], str] | None = None
) -> dict[str, list[str]]:
    """CUDA_VISIBLE_DEVICES of each worker, by group. The workers of a group that is not in it get no GPUs of their own.

    A group with `gpus` keeps them, and they are given to no other group. Each other worker that uses GPUs gets as many as its
    engine needs, in the order of the groups. Without visible GPUs nothing is allocated.

    Args:
        used: what workers have that run, by group and index. They keep it where it still is as much as their engine needs, and
            no group names it.

    Raises:
        ConfigError: more GPUs are needed than are visible, or `gpus` names one that is not visible.
    """
    allocated = {name: list(group.gpus) for name, group in groups.items() if group.gpus}
    wanting = [name for name, group in groups.items() if group.workers and not group.gpus and uses_gpus(group)]
    if not visible:
        return allocated
    present = f"{len(visible)} visible here ({', '.join(visible)})"
    taken: set[str] = set()
    for name, entries in allocated.items():
        if not uses_gpus(groups[name]):
            continue
        for gpu in _names(entries):
            same = next((other for other in visible if _same(gpu, other)), None)
            if same is not None:
                taken.add(same)
            elif wanting or (gpu.isdecimal() and all(other.isdecimal() for other in visible)):
                raise ConfigError(f"groups.{name}.gpus = {entries!r}: GPU {gpu!r} is none of the {present}")
    free = [gpu for gpu in visible if gpu not in taken]
    needed = sum(groups[name].workers * gpus_per_worker(groups[name]) for name in wanting)
    if needed > len(free):
        each = ", ".join(_need(name, groups[name]) for name in wanting)
        left = f"{len(free)} are left after those that gpus names" if taken else f"{len(free)} are present"
        raise ConfigError(
            f"groups: {each} need {needed} GPUs, and of {present} {left}: lower workers or options.tp_size, set "
            'device = "cpu", or name GPUs to share in gpus'
        )
    slots = [(name, index) for name in wanting for index in range(groups[name].workers)]
    kept: dict[tuple[str, int], list[str]] = {}
    for slot in slots:
        names = _names([(used or {}).get(slot, "")])
        if len(names) == gpus_per_worker(groups[slot[0]]) and Counter(names) <= Counter(free):
            kept[slot] = names
            for gpu in names:  # CUDA_VISIBLE_DEVICES may name one twice, for two workers
                free.remove(gpu)
    for name in wanting:
        allocated[name] = []
    for slot in slots:
        if slot not in kept:
            step = gpus_per_worker(groups[slot[0]])
            kept[slot], free = free[:step], free[step:]
        allocated[slot[0]].append(",".join(kept[slot]))
    return allocated


def all_gpus(allocated: Mapping[str, Sequence[str]]) -> str | None:
    """All GPUs of these workers, as CUDA_VISIBLE_DEVICES names them; None: none was allocated."""
    names = [name for entries in allocated.values() for name in _names(entries)]
    return ",".join(dict.fromkeys(names)) if names else None


def surely_apart(first: str, second: str) -> bool:
    """Whether two workers have no GPU in common, by their CUDA_VISIBLE_DEVICES. A number and a UUID may be one GPU."""
    one, other = ([name for name in _names([entry]) if name] for entry in (first, second))
    if not one or not other or len({name.isdecimal() for name in (*one, *other)}) > 1:
        return False
    return not any(_same(a, b) for a in one for b in other)


def _hidden_gpus() -> bool:
    """Whether CUDA may find GPUs that have no device file of their own: WSL and Jetson have these files instead."""
    return "CUDA_VISIBLE_DEVICES" not in os.environ and any(Path("/dev", name).exists() for name in ("dxg", "nvmap"))


def check_gpus(config: PoolConfig, where: str) -> PoolConfig:
    """`config` itself, when the GPUs of this host suffice for its workers. Raises ConfigError with the numbers."""
    visible = visible_gpus()
    if not visible and not _hidden_gpus():
        for name, group in config.groups.items():
            if group.device == "cuda" and group.workers and uses_gpus(group):
                raise ConfigError(
                    f"{where}: groups.{name}.device = 'cuda': no GPU is visible here (CUDA_VISIBLE_DEVICES, /dev/nvidia*); "
                    "use 'cpu', or 'auto'"
                )
    try:
        allocate_gpus(config.groups, visible)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def _need(name: str, group: GroupConfig) -> str:
    workers = "1 worker" if group.workers == 1 else f"{group.workers} workers"
    return f"{name}: {workers} x {gpus_per_worker(group)}"


def _names(entries: Sequence[str]) -> list[str]:
    return [gpu.strip() for entry in entries for gpu in entry.split(",")]


def _same(first: str, second: str) -> bool:
    """Whether two names are one GPU: the beginning of a UUID stands for the whole, as for CUDA."""
    if first.isdecimal() or second.isdecimal():
        return first == second
    return first.startswith(second) or second.startswith(first)
