"""A stager: the process that receives new weights while the engine of a worker serves, and keeps the committed ones.

`python -m enginepool.workers.stager.main`, with its configuration in the environment (`messages.py`). It never touches the
engine: the worker gives the engine the addresses of its memory, so it can be killed at any time. It outlives its worker, and
ends with its owner; asked to end, it first writes the snapshots that it owes. torch is imported when the first update comes.
"""

import asyncio
import contextlib
import os
import signal
import sys
from typing import NoReturn

from enginepool.workers.log import name_source, never_fail, say
from enginepool.workers.stager.messages import VARIABLE, StagerSpec, read_spec
from enginepool.workers.stager.stager import Stager


async def _serve(spec: StagerSpec) -> NoReturn:
    stager = Stager(spec)
    loop = asyncio.get_running_loop()

    def end(reason: str) -> None:
        if not stager.ended.done():
            stager.ended.set_result(reason)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, signal.Signals(number).name)
    if spec.lifeline_fd is not None:
        loop.add_reader(spec.lifeline_fd, stager.owner_gone)
    # A predecessor that was killed left its socket; two of one place never run at once.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(spec.socket)
    os.umask(0o077)
    server = await asyncio.start_unix_server(stager.serve, spec.socket)
    stager.tick()
    say(f"the stager ends: {await stager.ended}")
    server.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(spec.socket)
    if not stager.unwanted:
        await asyncio.to_thread(stager.finish)
    # Threads may wait for peers that are gone.
    os._exit(0)


def main() -> NoReturn:
    """The process entry."""
    never_fail()
    try:
        spec = read_spec(os.environ)
        name_source(f"stager {spec.name}")
        del os.environ[VARIABLE]
        if spec.lifeline_fd is not None:
            os.set_inheritable(spec.lifeline_fd, False)
        asyncio.run(_serve(spec))
    except (ValueError, OSError) as error:
        say(str(error))
    sys.exit(78)


if __name__ == "__main__":
    main()
