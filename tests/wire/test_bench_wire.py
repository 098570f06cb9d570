"""The wire benchmark measures what it says: its pieces at tiny size, with no timing asserted."""

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from bench import prepared, wire
from bench.links import HttpLink
from bench.load import Closed, Load, Open
from bench.peers import Contestant, Peer, begin, sglang_router, zmq_proxy
from bench.processes import Child, cpu_seconds, free_port, tree
from bench.table import Row, Target, judge, show, write
from enginepool.protocol.frames import check_frames
from enginepool.protocol.messages import Result, Score

TINY = wire.Plan(repetitions=2, warm_s=0.05, saturated_s=0.1, single_s=0.05, rate_s=0.1)


def test_prepared_requests_are_the_protocol_and_differ_only_in_their_id() -> None:
    requests = prepared.score_requests("policy")
    assert len(requests) == prepared.VARIANTS
    for template, frames in requests[:3]:
        one, other = (msgspec.msgpack.decode(template.of(prepared.FIRST_ID + n), type=Score) for n in (0, 70_000))
        check_frames(one.frames, frames)
        assert (one.id, other.id) == (prepared.FIRST_ID, prepared.FIRST_ID + 70_000)
        assert one.frames[1].shape == (prepared.ITEMS * prepared.ITEM,)
        other.id = one.id
        assert one == other
    assert requests[0][1] != requests[1][1]
    template, scores = prepared.result()
    answer = msgspec.msgpack.decode(template.of(7), type=Result)
    assert answer.id == 7
    check_frames(answer.frames, [scores])


def test_http_peers_get_the_same_token_ids() -> None:
    frames = prepared.score_requests("")[5][1]
    body = json.loads(prepared.http_requests("localhost:1")[5].split(b"\r\n\r\n", 1)[1])
    ids = np.frombuffer(frames[0] + frames[1], np.int32)
    assert body["input_ids"] == ids.tolist()
    assert len(json.loads(prepared.http_answer_body())["meta_info"]["input_token_ids_logprobs"]) == prepared.ITEMS


def test_a_run_gives_every_row_of_the_pool_and_of_the_floor_and_leaves_no_process() -> None:
    pids: list[int] = []

    def noted(peer: Peer) -> Peer:
        def start(scratch: Path, stack: ExitStack) -> Contestant:
            running = peer.start(scratch, stack)
            pids.extend(child.pid for child in running.children)
            return running

        return replace(peer, start=start)

    ours, floor = wire.OURS.who, zmq_proxy.PEER.who
    rows = wire.rows_of(wire.run([noted(wire.OURS), noted(zmq_proxy.PEER)], TINY))
    every = {wire.THROUGHPUT, wire.CPU, wire.P50_ONE, wire.P99_ONE, wire.P50_RATE, wire.P99_RATE}
    assert {(row.what, row.who) for row in rows} == {(what, who) for what in every for who in (ours, floor)} | {
        (wire.PYTHON, f"{ours}.Pool")
    }
    # CPU time comes in steps that a tiny run may not reach
    timed = [row for row in rows if row.what not in (wire.CPU, wire.PYTHON)]
    assert all(row.value > 0 and row.ratio is not None and row.ratio > 0 for row in timed)
    assert len(pids) == 9
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_http_load_reaches_the_http_worker(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        worker = begin(stack, ["-m", "bench.workers", "http", str(port)], tmp_path)
        link = HttpLink(f"127.0.0.1:{port}", connections=4)
        stack.callback(link.close)
        load = Load(link)
        closed = load.run(Closed(0.05, in_flight=4))
        # more requests than connections: they wait their turn
        burst = load.run(Closed(0.05, in_flight=16))
        spread = load.run(Open(0.2, rate=200.0))
        assert cpu_seconds(tree(worker.pid)) >= 0
    assert closed.answered >= 4
    assert burst.answered >= 16
    assert spread.answered > 0
    assert closed.p50_ms <= closed.p99_ms


def test_a_child_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    child = Child(["-m", "bench.workers", "no such kind", "x"], scratch=tmp_path)
    with pytest.raises(RuntimeError, match=r"bench\.workers ended; its last words: .*invalid choice"):
        child.hear(100)
    child.stop()


def test_a_peer_that_is_not_installed_is_named_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_name: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", nowhere)
    assert sglang_router.PEER.missing() == "sglang-router 0.3.2 is not installed (pip install -r bench/requirements.txt)"


def test_ratios_are_medians_of_pairs_within_a_repetition() -> None:
    ours, theirs = (wire.CPU, wire.OURS.who), (wire.CPU, "peer")
    samples = [{ours: 10.0, theirs: 100.0}, {ours: 30.0, theirs: 60.0}, {ours: 20.0, theirs: 80.0}]
    rows = wire.rows_of(samples)
    assert rows == [Row(wire.CPU, wire.OURS.who, 20.0, "µs/request", 1.0), Row(wire.CPU, "peer", 80.0, "µs/request", 0.25)]
    assert wire.rows_of([{theirs: 5.0}]) == [Row(wire.CPU, "peer", 5.0, "µs/request", None)]


def test_targets_are_judged_and_shown_but_not_asserted(tmp_path: Path) -> None:
    rows = [Row("cpu", "peer", 80.0, "µs", 0.25), Row("calls", "ours", 2500.0, "1/s")]
    targets = (
        Target("cpu", "peer", 0.5),
        Target("cpu", "peer", 0.3, at_most=False),
        Target("calls", "ours", 3000, at_most=False, of_value=True),
        Target("cpu", "absent", 1.0),
    )
    assert [(verdict.found, verdict.met) for verdict in judge(rows, targets)] == [
        (0.25, True),
        (0.25, False),
        (2500.0, False),
        (None, False),
    ]
    console = Console(record=True, width=100, file=(tmp_path / "screen").open("w"))
    with console.file:
        show("a title", rows, targets, console)
    text = console.export_text()
    assert "a title" in text
    assert "not measured" in text
    write(tmp_path / "rows.json", rows)
    assert json.loads((tmp_path / "rows.json").read_text()) == [
        {"what": "cpu", "who": "peer", "value": 80.0, "unit": "µs", "ratio": 0.25, "spread": None, "samples": []},
        {"what": "calls", "who": "ours", "value": 2500.0, "unit": "1/s", "ratio": None, "spread": None, "samples": []},
    ]
