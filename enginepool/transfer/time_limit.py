"""Calls of torch that may never return, with a time limit."""

import importlib
import threading
from collections.abc import Callable
from typing import Any

from enginepool.transfer import threads
from enginepool.transfer.process_group import CollectiveError

torch: Any = importlib.import_module("torch")


def within(work: Callable[[], Any], timeout_s: float, late: Callable[[Any], object] = lambda result: None) -> Any:
    """The result of `work`, which runs in a thread of its own.

    Args:
        timeout_s: seconds; after that the work goes on in its thread.
        late: called with a result that comes too late.

    Raises:
        CollectiveError: the time is over. What `work` raises is raised here.
    """
    outcome: list[Any] = []
    failure: list[BaseException] = []
    turn = threading.Lock()
    over = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure.append(error)
            return
        with turn:
            if not over:
                outcome.append(result)
                return
        late(result)

    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def on_device() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins on device 0
        run()

    threads.start(on_device, "collective").join(timeout_s)
    with turn:
        over = True
    if failure:
        raise failure[0]
    if not outcome:
        raise CollectiveError(f"no answer within {timeout_s:g} s")
    return outcome[0]
