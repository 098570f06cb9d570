"""sglang-router with its default settings, on /generate (it has no score route), before two minimal HTTP workers."""

import http.client
import importlib.metadata
import importlib.util
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from bench import prepared
from bench.peers import Contestant, Peer, begin
from bench.processes import Child, free_port, tree

VERSION = "0.3.2"
#: Seconds until the router has found its workers healthy.
START_S = 90.0


def missing() -> str:
    """The router is a wheel with a Rust extension."""
    if importlib.util.find_spec("sglang_router") is None:
        return f"sglang-router {VERSION} is not installed (pip install -r bench/requirements.txt)"
    found = importlib.metadata.version("sglang-router")
    return "" if found == VERSION else f"sglang-router {found} is installed, {VERSION} is wanted"


def await_answer(port: int, router: Child) -> None:
    """Wait until /generate is answered through the router."""
    request = prepared.http_requests("127.0.0.1")[0].split(b"\r\n\r\n", 1)[1]
    end = time.monotonic() + START_S
    said = "nothing"
    while time.monotonic() < end:
        router.check()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("POST", "/generate", request, {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200 and b"meta_info" in answer.read():
                return
            said = f"status {answer.status}"
        except OSError as error:
            said = str(error)
        finally:
            connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"sglang-router: no answer within {START_S:g} s: {said}; its last words: {router.last_words()}")


def start(scratch: Path, stack: ExitStack) -> Contestant:
    """Two workers, the router, one load generator."""
    ports = [free_port() for _ in range(2)]
    workers = [begin(stack, ["-m", "bench.workers", "http", str(port)], scratch) for port in ports]
    port = free_port()
    argv = ["-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warn"]
    argv += ["--worker-urls", *(f"http://127.0.0.1:{worker}" for worker in ports)]
    router = Child(argv, scratch=scratch, speaks=False)
    stack.callback(router.stop, hint=signal.SIGTERM)
    await_answer(port, router)
    load = begin(stack, ["-m", "bench.load", "http", f"127.0.0.1:{port}"], scratch)
    return Contestant(load, lambda: tree(router.pid), [*workers, router, load])


PEER = Peer("sglang_router", f"sglang-router {VERSION}", missing, start)
