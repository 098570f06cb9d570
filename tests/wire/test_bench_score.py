"""The scoring benchmark measures what it says: its pieces at tiny size and the pool's column on the simulated engine."""

import asyncio
import io
import json
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from bench import score_gpu
from bench.score import plot
from bench.score.callers import Answer, HttpCaller
from bench.score.contestants import (
    CACHED,
    CONTESTANTS,
    NOT_FLAGS,
    OURS,
    PLAIN,
    SHARED,
    Contestant,
    Ground,
    Running,
    engine_settings,
    flags_of,
    freeze_gc,
    role_of,
    start_pool,
    wider,
    with_workers,
    worker_flags,
)
from bench.score.gpu import GpuShare
from bench.score.load import Check, Closed, Load, Measured, Open, arrivals
from bench.score.measure import Contest, Number, Numbers
from bench.score.pivot import show_wide
from bench.score.run import Run
from bench.score.workloads import STRIDE, Mix, Plan, Shape, Workload, plan
from enginepool.cli.tiny_model_files import make_tiny_model

SHAPE = Shape(3, 2, 4, vocab=50)
#: Phases long enough for something to be counted where a process stands still for a second of them.
TINY = Plan((Workload("pr", SHAPE, (50,), 4),), seconds=1.5, mix=Mix(high_share=0.5))


class Echo:
    """Answers at once, or fails where it is told to; knows how many requests are unanswered."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.waiting = 0
        self.most = 0
        self.priorities: list[int] = []
        self.numbers: list[int] = []

    def prepare(self, shape: Shape, number: int) -> object:
        return shape, number

    async def call(self, request: Any, priority: int) -> Answer:
        shape, number = request
        self.numbers.append(number)
        self.priorities.append(priority)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0.001)
        self.waiting -= 1
        if self.fails:
            raise ValueError("no scores today")
        return Answer([[0.25] * len(shape.labels)] * shape.items, (1,))

    async def counters(self) -> dict[str, int]:
        return {"batches": len(self.priorities)}

    async def close(self) -> None:
        self.waiting = 0


def measured(caller: Echo, command: Closed | Open) -> Measured:
    found = asyncio.run(Load(caller).run(command))
    assert isinstance(found, Measured)
    return found


def all_numbers(contest: Contest) -> Numbers:
    """One repetition of a contest whose contestant is ready."""
    contest.warm("causal")
    return {name: number for phase in contest.phases("causal", 0) for name, number in phase.items()}


def test_requests_are_the_same_in_every_process_and_differ_from_each_other() -> None:
    code = "from bench.score.workloads import Shape; print(Shape(3, 2, 4, vocab=50).request(7).listed()[1])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    mine = SHAPE.request(7)
    query, items = mine.listed()
    assert json.loads(other.stdout) == items
    assert (len(query), [len(item) for item in items]) == (3, [4, 4])
    assert SHAPE.request(8).listed()[1] != items


def test_lengths_are_within_their_bounds_and_few_queries_are_asked_again_and_again() -> None:
    ragged = msgspec.structs.replace(SHAPE, query=40, items=7, item=30, least=(5, 2, 3))
    found = [ragged.request(number).listed() for number in range(300)]
    assert {len(query) for query, _ in found} >= {5, 40} and all(5 <= len(query) <= 40 for query, _ in found)
    assert {len(items) for _, items in found} == {2, 3, 4, 5, 6, 7}
    lengths = [len(item) for _, items in found for item in items]
    assert (min(lengths), max(lengths)) == (3, 30)
    assert sum(length < 10 for length in lengths) > len(lengths) / 3, "log-uniform"
    again = msgspec.structs.replace(ragged, query=9, least=(9, 2, 3), queries=4)
    queries = [str(again.request(number).listed()[0]) for number in range(400)]
    counts = sorted((queries.count(query) for query in set(queries)), reverse=True)
    assert len(counts) == 4 and counts[0] > 1.5 * counts[1]


def test_a_text_has_as_many_tokens_as_the_ids_in_its_place(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package: make setup")
    tokenizer = tokenizers.Tokenizer.from_file(str(make_tiny_model(tmp_path) / "tokenizer.json"))
    query, items = msgspec.structs.replace(SHAPE, query=30, item=200, text=True).request(0).listed()
    assert [len(tokenizer.encode(f"{query}{item}").ids) for item in items] == [230, 230]


def test_open_loads_ask_every_contestant_at_the_same_moments() -> None:
    command = Open(SHAPE, seconds=100.0, rate=20.0, high=5, high_share=0.25)
    first, second = arrivals(command), arrivals(msgspec.structs.replace(command, shape=msgspec.structs.replace(SHAPE, vocab=9)))
    assert first == second
    assert 1700 < len(first) < 2300
    assert 0.2 < sum(priority == 5 for _, priority in first) / len(first) < 0.3
    assert all(before <= after for (before, _), (after, _) in pairwise(first))
    assert arrivals(msgspec.structs.replace(command, seed=1)) != first  # a repetition has arrivals of its own


def test_a_closed_load_keeps_as_many_in_flight_as_it_is_told() -> None:
    caller = Echo()
    found = measured(caller, Closed(SHAPE, 0.2, in_flight=7))
    assert caller.most == 7
    assert found.all.answered == len(caller.priorities) == found.counters["batches"]
    assert found.items == pytest.approx(2 * found.per_second)
    assert (found.split, found.failed) == (0, 0)


def test_an_open_load_does_not_wait_for_answers_and_keeps_priorities_apart() -> None:
    caller = Echo()
    found = measured(caller, Open(SHAPE, 0.3, rate=2000.0, high=9, high_share=0.5))
    assert set(caller.priorities) == {0, 9} == set(found.priorities)
    assert sum(one.answered for one in found.priorities.values()) == len(caller.priorities)
    assert caller.most > 1


def test_no_phase_asks_what_the_phase_before_it_asked() -> None:
    caller = Echo()

    async def phases() -> None:
        load = Load(caller)
        await load.run(Closed(SHAPE, 0.05, in_flight=3))
        await load.run(Open(SHAPE, 0.05, rate=400.0))

    asyncio.run(phases())
    assert caller.numbers[:3] == [STRIDE, STRIDE + 1, STRIDE + 2]
    later = caller.numbers.index(2 * STRIDE)
    assert set(caller.numbers[:later]).isdisjoint(caller.numbers[later:])


def test_requests_that_fail_are_counted_and_one_is_quoted() -> None:
    found = measured(Echo(fails=True), Closed(SHAPE, 0.1, in_flight=2))
    assert found.failed == 2
    assert found.failure == "ValueError: no scores today"
    assert found.all.answered == 0


def test_http_servers_are_asked_as_sglang_documents_it_and_wrong_answers_refused() -> None:
    pytest.importorskip("aiohttp", reason="needs the aiohttp package: make setup")
    bodies: list[Any] = []
    answers = [
        (200, {"scores": [[0.1, 0.2]] * 2, "usage": {"prompt_tokens": 14}}),
        (200, {"scores": [[1.0]]}),
        (400, {"no": 1}),
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
        if b"/v1/score" in head:
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            bodies.append(json.loads(await reader.readexactly(length)))
            status, said = answers[len(bodies) - 1]
            text = json.dumps(said).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(text), text))
            await writer.drain()
        writer.close()

    async def ask() -> None:
        async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await answer(reader, writer)
            except asyncio.IncompleteReadError:  # the caller only looked whether a server listens
                writer.close()

        server = await asyncio.start_server(served, "127.0.0.1", 0)
        async with server:
            caller = await HttpCaller.connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            try:
                request = caller.prepare(SHAPE, 1)
                found = await caller.call(request, 0)
                assert found.scores == [[0.1, 0.2]] * 2
                with pytest.raises(RuntimeError, match="not the answer"):
                    await caller.call(request, 0)
                with pytest.raises(RuntimeError, match="status 400"):
                    await caller.call(request, 0)
            finally:
                await caller.close()

    asyncio.run(ask())
    wanted = SHAPE.request(1)
    assert bodies[0] == {
        "query": wanted.listed()[0],
        "items": wanted.listed()[1],
        "model": "default",
        "label_token_ids": [100, 200],
    }


def test_the_pools_column_has_every_number_and_leaves_no_process(tmp_path: Path) -> None:
    gpu = GpuShare()
    with ExitStack() as stack:
        running = start_pool({"engine": "sim"}, Ground(Path("any"), "cpu", tmp_path), stack)
        running.ready()
        roles = running.roles()
        assert set(roles) == {"coordinator", "worker"}
        contest = Contest(running, TINY, 50, gpu, lambda _line: None)
        numbers = all_numbers(contest)
        alone = replace(TINY, phases=frozenset({"saturation"}))
        saturated = all_numbers(Contest(running, alone, 50, gpu, lambda _line: None))
    assert {f"pr, 50 requests/s: {part}" for part in ("p50", "p90", "p99", "answered in time", "queued, p50")} <= set(numbers)
    assert {"pr, 1 in flight: p99", "pr, saturation", "pr, saturation: CPU of the worker"} <= set(numbers)
    assert {"pr, mix at 120 % of saturation, high: p99", "pr, mix at 120 % of saturation, low: p50"} <= set(numbers)
    assert numbers["pr, saturation: forwards per batch"].value == 1
    assert numbers["pr, saturation: batches of more than one forward"].value == 0
    assert numbers["pr, saturation"].value > 0
    assert saturated["pr, saturation"].value > 0
    assert all(name.startswith("pr, saturation") for name in saturated)
    assert len(contest.scores["pr"]) == SHAPE.items
    assert not any(psutil.pid_exists(pid) for pids in roles.values() for pid in pids)


def test_a_wider_pool_has_as_many_workers_and_is_saturated_alone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        running = start_pool({"engine": "sim", "workers": 2}, Ground(Path("any"), "cpu", tmp_path), stack)
        running.ready()
        assert len(running.roles()["worker"]) == running.engines == 2
        numbers = all_numbers(Contest(running, TINY, 50, GpuShare(), lambda _line: None))
        alone = replace(TINY, phases=frozenset({"alone"}))
        assert not all_numbers(Contest(running, alone, 50, GpuShare(), lambda _line: None)), "one worker shows that"
    assert numbers["pr, saturation: forwards per batch"].value == 1
    assert all(name.startswith("pr, saturation") for name in numbers)
    pool, plain = (wider(one, 4) for one in CONTESTANTS if one.who in (OURS, PLAIN))
    assert (pool.name, pool.who, plain.who) == ("pool-4", "enginepool, 4 workers", "enginepool, plain, 4 workers")


def test_a_contestant_that_fails_is_left_out_and_the_others_are_measured(
    tmp_path: Path,
) -> None:
    def fails(_ground: Ground, _stack: ExitStack) -> Running:
        raise RuntimeError("no such luck")

    def sims(ground: Ground, stack: ExitStack) -> Running:
        return start_pool({"engine": "sim"}, ground, stack)

    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    saved: list[int] = []
    said: list[str] = []

    def save(found: dict[str, Numbers]) -> None:
        saved.append(len(found[OURS]))

    run = Run(replace(TINY, mix=None), "cpu", tmp_path, GpuShare(), save, said.append)
    run.on("causal", tmp_path, [Contestant("bad", "bad", fails), Contestant("pool", OURS, sims)])
    assert set(run.found) == {OURS}
    assert saved == sorted(saved) and len(set(saved)) == 4  # nothing yet, 1 in flight, 50 requests/s, saturation
    assert "left out bad on the causal model: no such luck" in said
    assert len(run.settings) == 1 and run.settings[0].startswith(f"{OURS}, causal model: groups.score = ")


def test_contestants_in_turn_are_measured_phase_by_phase_and_a_repetition_begins_with_another_one(tmp_path: Path) -> None:
    """A ratio is of neighboring phases, so that a change of the host's speed meets all contestants."""
    asked: list[str] = []

    def sims(name: str, ground: Ground, stack: ExitStack) -> Running:
        running = start_pool({"engine": "sim"}, ground, stack)
        ask = running.load.ask

        def noted(question: Any, timeout: float) -> Any:
            asked.append(name)
            return ask(question, timeout)

        monkey.setattr(running.load, "ask", noted)
        return running

    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    brief = replace(TINY, mix=None, seconds=0.4, repetitions=2)
    found: list[dict[str, Numbers]] = []
    with pytest.MonkeyPatch.context() as monkey:
        run = Run(brief, "cpu", tmp_path, GpuShare(), found.append, lambda _line: None, interleave=True)
        run.on("causal", tmp_path, [Contestant(name, name, partial(sims, name)) for name in "ab"])
    assert "".join(asked) == "aabb" + "ababab" + "bababa"  # both are warm; one repetition; the other
    p50 = found[-1]["a"]["pr, 50 requests/s: p50"]
    assert len(p50.samples) == 2 and p50.spread == (min(p50.samples), max(p50.samples))
    assert p50.value == pytest.approx(sum(p50.samples) / 2)


def test_a_ratio_is_the_median_of_pairs_and_of_what_both_have_measured() -> None:
    mine = Number(0.0, "ms").and_again(Number(30.0, "ms")).and_again(Number(90.0, "ms"))
    theirs = Number(10.0, "ms").and_again(Number(60.0, "ms")).and_again(Number(100.0, "ms"))
    assert (mine.value, theirs.spread) == (30.0, (10.0, 100.0))
    assert mine.over(theirs) == 0.5
    assert mine.over(Number(10.0, "ms")) == 0.0
    assert mine.over(Number(0.0, "ms")) is None


def test_the_server_with_the_workers_flags_has_the_settings_of_a_worker_and_no_others(tmp_path: Path) -> None:
    settings = engine_settings(Ground(Path("model"), "cuda", tmp_path))
    flags = worker_flags(Ground(Path("model"), "cuda", tmp_path))
    for flag, value in (
        ("--max-prefill-tokens", "32769"),
        ("--max-running-requests", "1024"),
        ("--cuda-graph-max-bs-prefill", "6144"),
        ("--chunked-prefill-size", "-1"),
        ("--max-total-tokens", str(SHARED["max_total_tokens"])),
    ):
        assert flags[flags.index(flag) + 1] == value
    assert {"--disable-decode-cuda-graph", "--disable-radix-cache", "--enable-priority-scheduling"} <= set(flags)
    named = {flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")}
    assert named | NOT_FLAGS == set(settings)
    assert flags_of({"a_b": True, "c": False, "d": 3}) == ["--a-b", "--d", "3"]


def test_a_server_is_told_to_freeze_its_garbage_collection_and_a_refusal_is_an_error() -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if len(asked) == 1 else 500)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # the test's output is not a log
            del format, args

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        freeze_gc(f"127.0.0.1:{server.server_port}")
        with pytest.raises(OSError, match="500"):
            freeze_gc(f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert asked == ["/freeze_gc", "/freeze_gc"]


def test_ratios_are_ours_to_theirs_and_hidden_states_have_a_cost() -> None:
    found = {
        "server": {"pr, saturation": Number(50.0, "items/s"), "only theirs": Number(1.0, "")},
        OURS: {
            "pr, saturation": Number(100.0, "items/s"),
            "reward, saturation": Number(110.0, "items/s"),
            "reward + hidden, saturation": Number(100.0, "items/s"),
        },
    }
    rows = {(row.what, row.who): row for row in score_gpu.rows_of(found)}
    assert rows["pr, saturation", "server"].ratio == 2.0
    assert rows["pr, saturation", OURS].ratio is None
    assert rows["only theirs", "server"].ratio is None
    assert rows["reward + hidden, cost of hidden states", OURS].value == pytest.approx(10.0)
    assert len(rows) == 6
    console = Console(record=True, width=120, file=io.StringIO())
    show_wide("a title", list(rows.values()), OURS, console)
    text = console.export_text()
    assert "50  2x" in text
    assert text.index(OURS) < text.index("server")


def test_cached_queries_are_compared_by_themselves_wider_pools_with_one_worker_and_text_with_ids() -> None:
    found = {
        "server": {"pr, saturation": Number(50.0, "items/s")},
        OURS: {"pr, saturation": Number(100.0, "items/s")},
        PLAIN: {"pr, saturation": Number(150.0, "items/s")},
        with_workers(OURS, 2): {"pr, saturation": Number(190.0, "items/s")},
    }
    found[CACHED] = {"pr, saturation": Number(200.0, "items/s")}
    cached = {(row.what, row.who): row.ratio for row in score_gpu.rows_of_cached(found)}
    assert cached == {
        ("cached: pr, saturation", who): ratio
        for who, ratio in (("server", 4.0), (OURS, 2.0), (PLAIN, 200 / 150), (with_workers(OURS, 2), 200 / 190))
    }
    found[PLAIN]["text, saturation"] = Number(120.0, "items/s")
    rows = {(row.what, row.who): row.value for row in score_gpu.rows_of(found)}
    assert rows["pr, saturation: of one worker", "enginepool, 2 workers"] == pytest.approx(1.9)
    assert rows[score_gpu.TEXT, PLAIN] == pytest.approx(80.0)
    assert score_gpu.rows_of_cached({OURS: found[OURS]}) == []


def test_curves_hold_the_rates_that_were_measured() -> None:
    found = {"a": {f"pr, 70 requests/s: {part}": Number(value, "ms") for part, value in (("p50", 3.0), ("p99", 9.0))}, "b": {}}
    assert score_gpu.curves_of(found, (70, 120)) == {"a": [plot.Point(70, 3.0, 9.0)]}


def test_a_plot_is_drawn_or_its_lack_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_name: str) -> None:
        return None

    if not plot.missing():
        plot.draw(tmp_path / "plot.svg", "a title", {"a": [plot.Point(70, 3.0, 9.0)]})
        assert "a title" in (tmp_path / "plot.svg").read_text()
    monkeypatch.setattr(plot, "find_spec", nowhere)
    assert plot.missing() == "matplotlib is not installed"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_target_names_a_number_that_the_plan_measures(device: str) -> None:
    whole = plan(device, quick=True)
    names = {workload.name for workload in whole.workloads}
    assert names == {*score_gpu.WORKLOADS, "reward + hidden"} - {"mix"}
    assert whole.only({"reward"}).of("causal") == ()
    assert whole.only({"reward"}).mix is None
    assert [workload.rates for workload in whole.at((3.0,)).workloads[:2]] == [(3.0,), ()]
    if device == "cuda":
        whats = [target.what.removeprefix(score_gpu.OF_CACHED) for target in score_gpu.TARGETS]
        assert {what.split(",")[0] for what in whats} <= names
        pools = {with_workers(who, workers) for who in (OURS, PLAIN) for workers in score_gpu.SCALED}
        assert {target.who for target in score_gpu.TARGETS} <= {one.who for one in CONTESTANTS} | pools


def test_processes_are_told_apart_by_their_command_line() -> None:
    assert role_of(psutil.Process()) == ""
    waiting = "import sys; print(flush=True); sys.stdin.read()  # sglang::scheduler"
    with subprocess.Popen([sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # its command line can be read for certain once it runs
        assert role_of(psutil.Process(child.pid)) == "scheduler"


def test_checks_return_the_scores_of_one_request() -> None:
    assert asyncio.run(Load(Echo()).run(Check(SHAPE))) == [[0.25, 0.25], [0.25, 0.25]]


MIX_LACKS = "--workloads: the mix is of 120 % of what saturates pr: measure pr,mix in the phases alone,saturation"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--only", "pool,foo"], "--only: 'foo': there are worker-flags,server,best,bare,pool,plain,cached"),
        (["--repetitions", "0"], "--repetitions: got 0; use 1 or more"),
        (["--workloads", ""], "--workloads: '': there are pr,long,text,zipf,mixed,single,reward,mix"),
        (["--phases", "alone,all"], "--phases: 'all': there are alone,rates,saturation"),
        (["--workloads", "mix,long"], MIX_LACKS),
        (["--workloads", "mix,pr", "--phases", "saturation"], MIX_LACKS),
    ],
)
def test_nothing_is_left_unmeasured_in_silence(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["score_gpu", *arguments])
    with pytest.raises(SystemExit, match="2"):
        score_gpu.options()
    assert capsys.readouterr().err.splitlines()[-1].endswith(line)
