"""Changes to what SGLang reads and writes models in Redis with. No SGLang here: its module and its class are arguments."""

import signal
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from enginepool.protocol.redis_url import parse_redis
from enginepool.workers.redis_model import VALUE_S, connected


def leave_signals_alone(connectors: Any, folder: str | None) -> None:
    """Have connectors install no handlers of signals, and put their files into `folder`, which goes when the engine does.
    `connectors` is SGLang's module of their base class.

    A thread cannot install handlers, and with those of a connector a process lives on after SIGTERM. They keep the connector
    alive, and with it the files that tokenizers and configurations are read from.
    """
    kept: list[Callable[..., None]] = []

    def keep(number: int, handler: Callable[..., None]) -> None:
        kept.append(handler)

    def none(number: int) -> None:
        """There was no handler before."""

    connectors.signal = SimpleNamespace(SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM, getsignal=none, signal=keep)
    connectors.tempfile = SimpleNamespace(mkdtemp=partial(tempfile.mkdtemp, dir=folder))


def wait_for_redis_no_longer(connector: Any) -> None:
    """Have commands to a Redis that is silent fail. `connector` is SGLang's class."""
    make = connector.__init__

    def __init__(self: Any, url: str) -> None:
        at = parse_redis(url)
        connection = None if at is None else connected(at, VALUE_S)
        make(self, url)
        if connection is not None:
            self.connection = connection

    connector.__init__ = __init__
