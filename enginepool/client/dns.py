"""Whether the name in an address can be resolved; looked up while the connection opens, to explain why no coordinator answers.

ZeroMQ resolves names itself, again and again, and says nothing of it. An unknown name may be that of a coordinator
that is still to be started, so that this decides nothing.
"""

import asyncio
import socket
from collections.abc import Callable

#: seconds until an unknown name is looked up again
AGAIN_S = 1.0


async def follow_name(address: str, say: Callable[[str], None]) -> None:
    """Say why the host in `address` cannot be reached by its name, and "" once it can. Ends then; `ipc` has no names."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if scheme != "tcp" or not host:
        return
    say(f"the name {host!r} is not resolved yet")
    while True:
        try:
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a name"
            say(f"the name {host!r} cannot be resolved: {reason or error}")
            await asyncio.sleep(AGAIN_S)
        else:
            say("")
            return
