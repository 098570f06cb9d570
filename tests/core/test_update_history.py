"""The history of updates outlives the coordinator: what the core hands out, and the file that keeps it."""

import asyncio
import errno
from pathlib import Path

import msgspec
import pytest

from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.group import HISTORY
from enginepool.coordinator.shell import update_history
from enginepool.coordinator.shell.journal import Journal
from enginepool.coordinator.shell.journal_writer import JournalWriter
from enginepool.coordinator.shell.update_history import UpdateHistory
from enginepool.coordinator.weights.outcomes import RECORD_TEXT
from enginepool.protocol.messages.weight_reports import UpdateRecord
from enginepool.protocol.messages.weights import AbortUpdate
from tests.core.machines import work
from tests.core.publishers import UpdatePool
from tests.core.test_weights import ready, to_transfer


def test_each_outcome_of_an_update_and_its_first_answer_is_written() -> None:
    pool, trainer, links = ready(1)
    pool.publish(trainer, 1, links)
    assert not pool.histories
    pool.written()
    assert [(one.version, one.outcome) for one in pool.histories.pop()] == [(1, "committed")]
    pool.submit(trainer.link, 50, work())
    pool.finish(pool.batches[0], version=1)
    assert "first_answer" in pool.histories.pop()[0].phases
    to_transfer(pool, trainer, 2)
    trainer.say(AbortUpdate(trainer.ids, "x" * 5000))
    records = pool.histories.pop()
    assert [(one.version, one.outcome) for one in records] == [(1, "committed"), (2, "update_aborted")]
    assert len(records[1].message) == RECORD_TEXT
    assert not pool.histories


def test_a_coordinator_begins_with_the_history_of_the_one_before() -> None:
    pool = UpdatePool()
    before = [UpdateRecord(version, "committed") for version in range(HISTORY + 5)]
    pool.do(ev.Started(0, 5, {}, history={"g": before, "gone": before}))
    assert list(pool.machine.core.groups["g"].history) == before[5:]


def test_the_file_holds_what_was_written_last_or_says_that_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = UpdateHistory(tmp_path)
    assert file.read() == {}
    first = [UpdateRecord(1, "committed", phases={"hold": 5})]
    file.write({"g": msgspec.Raw(msgspec.json.encode(first))})
    assert UpdateHistory(tmp_path).read() == {"g": first}

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:5])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(update_history, "write_file", full)
    with pytest.raises(OSError, match=r"updates\.new"):
        file.write({})
    assert file.read() == {"g": first} and [path.name for path in tmp_path.iterdir()] == ["updates.json"]
    file.path.write_bytes(b'{"g":[')
    with pytest.raises(ValueError, match=f"{file.path}: not a history of updates, or damaged"):
        file.read()


def test_many_updates_at_once_are_few_writes_and_a_failure_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    written: list[int] = []
    write = UpdateHistory.write

    def counted(self: UpdateHistory, updates: dict[str, msgspec.Raw]) -> None:
        written.append(len(updates))
        write(self, updates)

    monkeypatch.setattr(UpdateHistory, "write", counted)

    async def story() -> None:
        journal = Journal(tmp_path)
        writer = JournalWriter(asyncio.get_running_loop(), journal, lambda event: None, lines.append, lambda: None)
        for version in range(1000):
            writer.perform(ef.KeepHistory("g", [UpdateRecord(version, "committed")]))
        writer.close()
        journal.close()
        await asyncio.sleep(0)

    asyncio.run(story())
    assert len(written) < 1000 and UpdateHistory(tmp_path).read()["g"][0].version == 999
    (tmp_path / "updates.json").write_text("?")

    async def successor() -> None:
        journal = Journal(tmp_path)
        writer = JournalWriter(asyncio.get_running_loop(), journal, lambda event: None, lines.append, lambda: None)
        assert writer.read_history(["g"]) == {}
        writer.close()
        journal.close()

    asyncio.run(successor())
    [line] = lines
    assert line.startswith(f"the history of updates could not be read: {tmp_path}/updates.json: not a history of updates")
