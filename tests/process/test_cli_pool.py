"""The commands on whole pools with the sim engine: serve, status, score, demo."""

import asyncio
import io
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect
import numpy as np
import psutil
import pytest
from rich.console import Console

from enginepool.cli import demo_run as demonstration
from enginepool.cli import status
from enginepool.cli.demo_tables import tables
from enginepool.client.pool import Pool
from enginepool.config import RestartConfig
from enginepool.errors import PoolDown
from enginepool.protocol.messages import GroupLimits, GroupStatus, StatusReport, WorkerStatus
from tests.process.commands import LIMIT_S, PROGRAM, call, end, records, start
from tests.process.daemons import PATIENCE_S, end_workers, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes


@dataclass
class Served:
    """A pool that `enginepool serve` runs."""

    process: subprocess.Popen[str]
    address: str
    config: Path


def serve(processes: Processes, directory: Path, *, forward_s: float, more: str = "") -> Served:
    """Start a pool of two sim workers, with `more` in its configuration, and wait until it listens."""
    address = f"ipc://{directory}/pool.sock"
    config = directory / "pool.toml"
    config.write_text(
        f'listen = "{address}"\nstate_dir = "{directory}/state"\n[groups.policy]\nmodel = "sim"\nengine = "sim"\nworkers = 2\n'
        f"[groups.policy.options]\nforward_s = {forward_s}\nbatch_rows = 8\n{more}"
    )
    processes.then(lambda: end_workers(f"{directory}/state"))
    process = start(processes, "serve", "--config", config)
    assert process.stderr is not None
    for line in process.stderr:
        if "listening" in line:
            return Served(process, address, config)
    pytest.fail(f"serve ended with {process.wait()} before it listened")


def stop(served: Served) -> tuple[int, str]:
    """SIGTERM: exit code and what was said on stderr since."""
    served.process.send_signal(signal.SIGTERM)
    code, _, err = end(served.process)
    return code, err


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One pool for the tests that only use it. SIGTERM must end it well."""
    with Processes() as processes:
        pool = serve(processes, tmp_path_factory.mktemp("served"), forward_s=0.02)
        yield pool
        code, err = stop(pool)
        assert (code, "Traceback" in err) == (0, False)


def test_status_shows_groups_and_workers(served: Served) -> None:
    code, out, err = call("status", "--connect", served.address)
    assert (code, err) == (0, "")
    for word in ("policy", "policy-0", "policy-1", "epoch"):
        assert word in out
    code, out, _ = call("status", "--json", env={"ENGINEPOOL_ADDRESS": served.address})
    assert [group["name"] for group in json.loads(out)["groups"]] == ["policy"]


def compare_keys(found: Any, kind: msgspec.inspect.Type, where: str = "report") -> set[type]:
    """JSON has the keys of its struct, and so have the structs within, also those that this one does not know yet; returns all
    structs that were seen."""
    seen: set[type] = set()
    if isinstance(kind, msgspec.inspect.StructType):
        assert list(found) == [field.name for field in kind.fields], where
        seen.add(kind.cls)
        for field in kind.fields:
            seen |= compare_keys(found[field.name], field.type, f"{where}.{field.name}")
    elif isinstance(kind, msgspec.inspect.ListType):
        for one in found:
            seen |= compare_keys(one, kind.item_type, f"{where}[]")
    elif isinstance(kind, msgspec.inspect.UnionType) and found is not None:
        for one in kind.types:
            if isinstance(one, msgspec.inspect.StructType):
                seen |= compare_keys(found, one, where)
    return seen


def test_the_json_of_a_status_has_every_key(served: Served) -> None:
    assert call("ready", "--timeout", PATIENCE_S, "--connect", served.address)[0] == 0
    report = json.loads(call("status", "--json", "--connect", served.address)[1])
    assert compare_keys(report, msgspec.inspect.type_info(StatusReport)) >= {
        StatusReport,
        GroupStatus,
        GroupLimits,
        WorkerStatus,
    }
    (group,) = report["groups"]
    assert (report["draining"], group["poisoned"], group["down"], group["workers"][0]["restarts"]) == (False, 0, "", 0)


def test_ready_waits_for_workers_and_says_what_they_do(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=1, options={"load_s": 1.0})).listening()
    code, out, err = call("ready", "--timeout", PATIENCE_S, env={"ENGINEPOOL_ADDRESS": daemon.address})
    assert (code, out) == (0, "")
    assert "g: g-0 loading" in err and err.endswith("ready: g\n")


def test_ready_fails_with_what_it_has_waited_for(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=1, options={"load_s": PATIENCE_S})).listening()
    code, _, err = call("ready", "--timeout", 0.5, "--connect", daemon.address)
    assert code == 1
    assert re.search(r"enginepool: not ready after 0\.\d+ s: group 'g': g-0 (starting|loading).*\n$", err)
    code, _, err = call("ready", "--timeout", 5, "--group", "nope", "--connect", daemon.address)
    assert (code, err) == (1, "enginepool: group: 'nope' is none of: g\n")
    code, _, err = call("ready", "--timeout", 0.2, "--connect", f"ipc://{tmp_path}/none.sock")
    assert (code, err.count("\n")) == (1, 1) and "none.sock" in err


def test_score_reads_stdin_as_it_comes_and_writes_stdout(processes: Processes, served: Served) -> None:
    command = ["score", "-", "-", "--label-token-ids", "5,6", "--connect", served.address]
    process = start(processes, *command, stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    for number in range(1, 4):
        process.stdin.write(json.dumps({"id": number, "query": [1, 2], "items": [[number], [4]]}) + "\n")
        process.stdin.flush()
        # The answer comes while the input is still open.
        answer = json.loads(process.stdout.readline())
        assert (answer["line"], answer["id"]) == (number, number) and np.shape(answer["scores"]) == (2, 2)
    process.stdin.write('{"query": [1]}\n\n{"query": [7], "items": [[8]]}')
    out, err = process.communicate(timeout=LIMIT_S)
    found = {record["line"]: record for record in map(json.loads, out.splitlines())}
    assert found.keys() == {4, 6} and "error" in found[4] and "scores" in found[6]
    assert process.returncode == 1
    assert "stdout: 4 lines answered, 1 with an error" in err


def test_score_reads_a_file_into_stdout_and_stdin_into_a_new_file(served: Served, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"query": [1], "items": [[2]], "label_token_ids": [3]}\n' * 5)
    code, out, err = call("score", source, "-", "--connect", served.address)
    assert (code, len(out.splitlines())) == (0, 5) and "stdout: 5 lines answered" in err
    command = [*PROGRAM, "score", "-", str(target), "--connect", served.address]
    with source.open("rb") as file:
        assert subprocess.run(command, stdin=file, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0
    assert records(target).keys() == {1, 2, 3, 4, 5}
    code, _, err = call("score", "-", target, "--connect", served.address)
    assert (code, err) == (2, f"enginepool: {target}: exists, and answers to stdin (-) cannot be resumed; name a new file\n")
    code, _, err = call("score", "-", "-", "--retry-errors", "--connect", served.address)
    assert (code, err.count("\n")) == (2, 1) and "cannot be resumed" in err


def test_score_of_a_pipe_that_stays_silent_is_interrupted_at_once(processes: Processes, served: Served) -> None:
    process = start(processes, "score", "-", "-", "--connect", served.address, stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write('{"query": [1], "items": [[2]], "label_token_ids": [3]}\n')
    process.stdin.flush()
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    code = process.wait(LIMIT_S)
    _, err = process.communicate()
    assert code == 130
    assert err.endswith("interrupted: 1 line in stdout, 1 of them new; a run through a pipe cannot be resumed\n")


def test_status_says_what_keeps_a_group_from_answering() -> None:
    lost = GroupStatus("g", needs_weights="version 3 is held nowhere", workers=[WorkerStatus("g-0", "i", "restoring")])
    busy = GroupStatus("b", update="transfer of version 4", poisoned=2, early=3)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status.tables(StatusReport(1, groups=[lost, GroupStatus("h", down="no such model", halvings=2), busy])))
    said = console.export_text()
    assert "g needs weights: version 3 is held nowhere" in said and "restoring" in said
    assert "b: update in phase transfer of version 4" in said and "b: 2 poisoned requests" in said
    assert "b: 3 of the queued requests wait for a later weight version" in said
    assert "h is down: no such model" in said and "h: engines ran out of memory; workers are given 1/4 at a time" in said


def test_status_watch_keeps_looking_and_ends_well_on_ctrl_c(processes: Processes, served: Served) -> None:
    process = start(processes, "status", "--watch", "--json", "--every", 0.1, "--connect", served.address)
    assert process.stdout is not None
    looks = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert (code, err) == (0, "")
    assert looks[0]["uptime_s"] < looks[1]["uptime_s"] < looks[2]["uptime_s"]


def test_an_endpoint_in_use_is_one_line_that_names_it(processes: Processes, served: Served, tmp_path: Path) -> None:
    code, out, err = end(start(processes, "serve", "--engine", "sim", "--listen", served.address, "--state-dir", tmp_path))
    assert (code != 0, out, err.count("\n")) == (True, "", 1)
    assert served.address in err


def test_a_state_directory_that_is_a_file_is_one_line_that_names_it(processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert end(start(processes, "serve", "--engine", "sim", "--state-dir", file)) == (
        2,
        "",
        f"enginepool: state_dir = '{file}': a file, not a directory\n",
    )


def test_an_unknown_group_ends_the_run_with_the_names_there_are(served: Served, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"query": [1], "items": [[2]]}\n')
    code, _, err = call("score", source, target, "--connect", served.address, "--group", "nope", "--label-token-ids", "1")
    assert code == 2
    assert "policy" in err
    assert "--group" in err


def test_interrupted_and_resumed_every_line_is_scored_exactly_once(processes: Processes, tmp_path: Path) -> None:
    later = '[groups.later]\nmodel = "sim"\nengine = "sim"\nworkers = 0\n'
    served = serve(processes, tmp_path, forward_s=0.02, more=later)
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    command = ["--connect", served.address, "--label-token-ids", "7,8", "--concurrency", 8]

    def write(ask_nobody: range) -> None:
        """300 lines, of which these ask a group without workers."""
        with source.open("w") as lines:
            for n in range(1, 301):
                group = "later" if n in ask_nobody else "policy"
                lines.write(json.dumps({"query": [n, 1, 2], "items": [[3, n], [4]], "group": group}) + "\n")

    for end_of_run, sign, code in ((100, signal.SIGINT, 130), (200, signal.SIGTERM, 143), (300, signal.SIGKILL, -9)):
        # All that is in flight waits there in the end: no run is over before it is interrupted, however late that is.
        write(range(end_of_run - 7, end_of_run + 1))
        before = len(target.read_bytes().splitlines()) if target.exists() else 0
        process = start(processes, "score", source, target, *command)
        wait_until(lambda: target.exists() and len(target.read_bytes().splitlines()) > before + 20)  # noqa: B023 (called here)
        process.send_signal(sign)
        got, _, err = end(process)
        assert got == code
        assert ("run the same command again to continue" in err) == (sign != signal.SIGKILL)
        assert before + 20 < len(target.read_bytes().splitlines()) < end_of_run
    write(range(0))
    assert call("score", source, target, *command)[0] == 0
    assert call("score", source, whole, *command)[0] == 0
    found, expected = records(target), records(whole)
    for record in (*found.values(), *expected.values()):
        assert record.pop("workers") in (["policy-0"], ["policy-1"])
    assert found == expected
    assert records(target).keys() == set(range(1, 301))


def wait_until(happened: Callable[[], bool]) -> None:
    """Look until it has happened: another process's file has no event to wait for."""
    until = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_pool_that_starts_no_workers_says_that_it_waits_for_some(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=0)).listening()
    line = daemon.wait_for("group g ")
    assert line.partition("enginepool: ")[2] == f"group g starts no workers: it waits for external workers at {daemon.workers}"
    assert daemon.end() == 0


@pytest.mark.parametrize(
    ("kind", "starts", "verdict"),
    [
        ("refuse_on_load", 1, "cannot be started: "),
        ("crash_on_load", 2, "failed 2 times in the same way before it was ready: "),
        ("exit_on_load", 2, "failed 2 times in the same way before it was ready: "),
    ],
)
def test_a_worker_that_can_never_load_is_given_up_with_the_reason(
    kind: str, starts: int, verdict: str, processes: Processes, tmp_path: Path
) -> None:
    config = sim_pool(tmp_path, workers=1, options={"faults": [{"kind": kind}]})
    config = msgspec.structs.replace(config, restart=RestartConfig(backoff_s=0.05))
    daemon = ForkedDaemon(processes, config).listening()
    said = [daemon.wait_for("ended").partition(" ended: ")[2] for _ in range(starts)]
    why = r"exit code 3.*" if kind == "exit_on_load" else rf"(exit code \d+: )?.*\b{kind}\b.*"
    assert all(re.fullmatch(why, line) for line in said), said

    async def ask() -> tuple[int, str, str]:
        async with Pool.connect(daemon.address) as pool:
            with pytest.raises(PoolDown) as down:
                await pool.ready(PATIENCE_S)
            with pytest.raises(PoolDown) as refused:
                await pool.score([1], [[2]], label_token_ids=[3])
            assert str(refused.value) == str(down.value)
            (worker,) = (await pool.status()).groups[0].workers
            assert worker.stage == "retired"
            return worker.restarts, worker.detail, str(refused.value)

    restarts, detail, down = asyncio.run(ask())
    assert restarts == starts - 1
    assert detail.startswith(verdict) and detail in down
    assert kind == "exit_on_load" or kind in detail


def test_sigterm_lets_begun_work_finish(processes: Processes, tmp_path: Path) -> None:
    own = serve(processes, tmp_path, forward_s=1.0)

    async def ask() -> tuple[list[float], tuple[int, str]]:
        async with Pool.connect(own.address) as pool:
            task = asyncio.create_task(pool.score([1, 2], [[3]], label_token_ids=[4]))
            while not (await pool.status()).groups[0].running:
                if task.done() and await task:  # before the pool was looked at
                    task = asyncio.create_task(pool.score([1, 2], [[3]], label_token_ids=[4]))
            ended = await asyncio.to_thread(stop, own)
            return (await task).scores.tolist(), ended

    scores, (code, _) = asyncio.run(ask())
    assert len(scores) == 1
    assert code == 0


def test_the_demo_on_the_sim_engine_loses_nothing(processes: Processes) -> None:
    code, out, err = end(start(processes, "demo", "--engine", "sim", "--quick"))
    assert (code, err) == (0, "")
    assert re.search(r"Nothing was lost: (\d+) requests, \1 answers", out)
    latencies = (
        r"Priority: p50 / p99 \d+ / \d+ ms online \(priority 100\) and \d+ / \d+ ms bulk \(0\), ratio (\d\.\d\d) / \d\.\d\d\."
    )
    told = re.search(latencies, out)
    assert told is not None and float(told[1]) <= 0.7, out
    formed = re.search(
        r"Batches: \d+ of (\d+\.\d) rows of (\d+\.\d) requests on average, 0 cut up: each was one forward pass\.", out
    )
    assert formed is not None and float(formed[1]) > float(formed[2]) > 1, "requests of several clients share a forward"
    for words in (r"workers killed +1 ", r"workers started again +1 ", r"forward passes for each batch +1\.00"):
        assert re.search(words, out)


def test_the_demo_says_why_a_worker_ended_that_it_did_not_kill(processes: Processes) -> None:
    process = start(processes, "demo", "--engine", "sim")
    assert process.stdout is not None
    for line in process.stdout:
        if "Client online-2" in line:
            break
    latest = max(psutil.Process(process.pid).children(recursive=True), key=psutil.Process.create_time)
    latest.kill()  # a worker: all other processes were there before it
    code, out, _ = end(process)
    assert code == 0
    assert re.search(r"workers started again +2 ", out)
    assert re.search(r"demo-\d backoff: ended by SIGKILL\n(?s:.*)\nKilled demo", out)


def test_an_interrupted_demo_leaves_no_process(processes: Processes) -> None:
    process = start(processes, "demo", "--engine", "sim")
    assert process.stdout is not None
    for line in process.stdout:
        if "Both are ready" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert end(process)[::2] == (130, "enginepool: interrupted\n")
    assert len(children) >= 3
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []


def test_the_demo_tells_when_a_promise_is_broken() -> None:
    good = demonstration.DemoClient("a", 0, sent=1, answers={0: (np.zeros((1, 1), np.float32), 0.0, 1.0)})
    story = demonstration.Story(
        clients=[good],
        group=GroupStatus(name="demo", batches=1, forwards=1, answered=1),
        open_at_kill=0,
        killed=WorkerStatus("demo-0", "x", "ready"),
        back_s=1.0,
        meanwhile=1,
        asked_again=1,
        differing=0,
    )
    assert story.wrong() == []
    assert len(tables(story)) == 2
    good.sent = 2
    assert "a: 1 requests lost (no answer)" in story.wrong()
    good.sent = 1
    story.differing = 1
    assert story.wrong() == ["1 of 1 scores differ when asked again"]
    story.differing = 0
    story.group.split_batches = 1
    assert story.wrong() == ["1 batches took more than one forward pass"]
