"""Whether engines have the options that a configuration gives them. Workers know which these are, and one of them is asked."""

import subprocess
import sys

import msgspec

from enginepool.config import PoolConfig
from enginepool.errors import ConfigError

#: The process that knows the options of engines has answered by then. If it has not, the workers will say what is wrong.
_ANSWER_S = 60.0


def check_options(config: PoolConfig, where: str) -> PoolConfig:
    """`config` itself, when the engines that are installed here have all options that it gives them. It starts a process, and
    waits for it.

    Raises:
        ConfigError: the message names the option.
    """
    groups = {name: group for name, group in config.groups.items() if group.options}
    if not groups:
        return config
    asked = msgspec.json.encode([(group.engine, group.options) for group in groups.values()])
    command = [sys.executable, "-m", "enginepool.workers.options"]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return config
    if done.returncode:
        raise ConfigError(f"{where}: the options could not be checked: {_last_line(done.stderr)}")
    for name, (key, why) in zip(groups, msgspec.json.decode(done.stdout, type=list[tuple[str, str]]), strict=True):
        if why:
            raise ConfigError(f"{where}: groups.{name}.options{f'.{key}' if key else ''}: {why}")
    return config


def _last_line(output: bytes) -> str:
    return (output.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
