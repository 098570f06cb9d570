"""The benchmark of streams counts what its workers generate: its pieces at tiny size, with no timing asserted."""

from contextlib import ExitStack
from pathlib import Path

from bench import coordinator_streams as streams
from bench import stream_crowd
from bench.streams.load import Phase


def test_a_phase_counts_tokens_and_the_cpu_time_of_each_side(tmp_path: Path) -> None:
    with ExitStack() as stack:
        daemon, workers, load = streams.start(tmp_path, stack, 50_000.0)
        found = {clients: [streams.measure(daemon, workers, load, Phase(clients, 16, 16, 8, 0.2, 1.0))] for clients in (1, 4)}
    for [(counted, spent)] in found.values():
        assert counted.tokens > 0 and counted.messages > 0
        assert set(spent) == {streams.COORDINATOR, streams.WORKER, streams.CLIENT}
    rows = streams.rows_of(found)
    assert {row.what for row in rows} == {"256 streams of 1 client", "256 streams of 4 clients"}
    assert all(row.value > 0 for row in rows if row.unit != "cores" and not row.who.endswith("CPU"))


def test_readers_that_stop_hold_no_more_than_the_total_of_the_coordinator(tmp_path: Path) -> None:
    with ExitStack() as stack:
        limits = stream_crowd.LIMITS
        daemon, _, _ = streams.start(tmp_path, stack, 200_000.0, slots=stream_crowd.STREAMS, limits=limits)
        rows = {(row.what, row.who): row for row in stream_crowd.crowd(f"ipc://{tmp_path}/pool.sock", daemon.pid, 1.0)}
    assert (rows["coordinator", "peak over that"].ratio or 0) < 1.2
    assert rows["tokens", "to those without credit"].value <= stream_crowd.STREAMS * stream_crowd.PHASES[1].credit
