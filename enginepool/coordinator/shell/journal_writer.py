"""The thread that writes the journal: a disk may take long, and the loop of the coordinator does not wait for it."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import msgspec

from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.adapter_events import AdapterStored, AdaptersWritten
from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.shell.adapter_store import AdapterStore
from enginepool.coordinator.shell.journal import Journal
from enginepool.coordinator.shell.update_history import UpdateHistory
from enginepool.host import os_error
from enginepool.protocol.messages.weight_reports import UpdateRecord

#: how often the paths of the state directory are looked at
LOOK_S = 1.0
#: what is written, for the log
JOURNAL, HISTORY, ADAPTERS = "journal", "history of updates", "store of adapters"


class JournalWriter:
    """One write after the other, in the order of the calls.

    Args:
        tell: takes the events that come of it, on the loop.
        log: takes lines for the operator, on the loop.
        moved: called on the loop after paths of the state directory were removed or renamed and the journal was written again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        journal: Journal,
        tell: Callable[[ev.Event], None],
        log: Callable[[str], None],
        moved: Callable[[], None],
    ) -> None:
        self._loop, self._journal = loop, journal
        self._tell, self._log, self._moved = tell, log, moved
        self._thread = ThreadPoolExecutor(1, "journal")
        #: adapters are large: a held group does not wait until one is on the disk
        self._store_thread = ThreadPoolExecutor(1, "adapters")
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        #: why each of the two files could not be written at the last write, which is said once
        self._failures: dict[str, str] = {}
        self._history = UpdateHistory(journal.path.parent)
        self._adapters = AdapterStore(journal.path.parent)
        #: the latest updates by group, as they are to be written; whether that is about to happen
        self._updates: dict[str, msgspec.Raw] = {}
        self._history_waits = False
        #: what publishers have stopped, by group, that could not be written so far: of the thread
        self._holds: dict[str, GroupHolds] = {}

    def read_history(self, groups: Collection[str]) -> dict[str, list[UpdateRecord]]:
        """The latest updates of these groups. A history that cannot be read is an empty one, and the log says so."""
        try:
            found = {name: records for name, records in self._history.read().items() if name in groups}
        except (OSError, ValueError) as error:
            why = os_error(error) if isinstance(error, OSError) else str(error)
            self._log(f"the history of updates could not be read: {why}")
            return {}
        self._updates = {name: _text(records) for name, records in found.items()}
        return found

    def perform(self, effect: ef.ToDisk) -> None:
        """Write what an effect says; the event that it names follows."""
        if isinstance(effect, ef.CheckJournal):
            self._check(effect)
        elif isinstance(effect, ef.KeepHistory):
            self._keep_history(effect)
        elif isinstance(effect, ef.KeepHolds):
            self._keep_holds(effect)
        else:
            self._change_adapters(effect)

    def _keep_history(self, effect: ef.KeepHistory) -> None:
        """Write the history of updates. What is added before that has begun is written with it."""
        self._updates[effect.group] = _text(effect.records)
        self.write_history()

    def write_history(self) -> None:
        """Write the history of updates again."""
        if self._updates and not self._history_waits:
            self._history_waits = True
            self._submit(HISTORY, self._write_history)

    def _write_history(self) -> None:
        """In the thread."""
        self._history_waits = False
        self._journal.keep()  # raises where the state directory is not the one that a successor finds
        self._history.write(dict(self._updates))

    def _check(self, effect: ef.CheckJournal) -> None:
        """`JournalChecked` follows."""
        self._submit(JOURNAL, self._journal.check, lambda why: self._tell(ev.JournalChecked(monotonic(), effect.update, why)))

    def commit(self, effect: ef.WriteJournal, committed: Callable[[str, str], None]) -> None:
        """`JournalWritten` follows. Once it is written, `committed` is called before that, with the group and its snapshot."""

        def write() -> None:
            record = self._journal.record
            weights = {**record.weights, effect.group: effect.weights}
            self._journal.write(msgspec.structs.replace(record, weights=weights))

        def written(why: str) -> None:
            if not why:
                committed(effect.group, effect.weights.snapshot)
            self._tell(ev.JournalWritten(monotonic(), effect.update, why))

        self._submit(JOURNAL, write, written)

    def _keep_holds(self, effect: ef.KeepHolds) -> None:
        """`HoldsKept` follows, also if they could not be written: the log says so, and `look` tries again."""

        def write() -> None:
            self._holds[effect.group] = effect.holds
            self._write_holds()

        self._submit(JOURNAL, write, lambda _: self._tell(ev.HoldsKept(monotonic(), effect.number)))

    def _write_holds(self) -> None:
        """In the thread."""
        if self._holds:
            record = self._journal.record
            self._journal.write(msgspec.structs.replace(record, holds={**record.holds, **self._holds}))
            self._holds.clear()

    def _change_adapters(self, effect: ef.StoreAdapter | ef.WriteAdapters | ef.DropStored) -> None:
        """`AdapterStored` follows, or `AdaptersWritten`, or nothing."""
        store = self._adapters
        if isinstance(effect, ef.StoreAdapter):
            path, stored = store.folder(effect.group, effect.adapter), AdapterStored(0.0, effect.change, "")

            def write() -> None:
                try:
                    store.write(path, effect)
                except ValueError as error:  # of its publisher, and no failure of the disk
                    stored.misfit = str(error)

            def told(why: str) -> None:
                stored.now, stored.path, stored.error = monotonic(), str(path), why
                self._tell(stored)

            self._submit(ADAPTERS, write, told)
        elif isinstance(effect, ef.WriteAdapters):
            self._submit(JOURNAL, lambda: self._write_adapters(effect), lambda why: self._adapters_written(effect, why))
        else:
            self._submit(ADAPTERS, lambda: store.remove(store.folder(effect.group, effect.adapter)))

    def _write_adapters(self, effect: ef.WriteAdapters) -> None:
        """In the thread."""
        record = self._journal.record
        adapters = {**record.adapters, effect.group: list(effect.adapters)}
        self._journal.write(msgspec.structs.replace(record, adapters=adapters))

    def _adapters_written(self, effect: ef.WriteAdapters, why: str) -> None:
        # Of each group one adapter changes at a time, so nothing else of this one is stored and not committed. Before the
        # event: what it lets in may be stored at once.
        self._submit(ADAPTERS, lambda: self._adapters.keep_only(self._journal.record.adapters, effect.group))
        self._tell(AdaptersWritten(monotonic(), effect.change, why))

    def clean_adapters(self) -> None:
        """Remove what is stored of adapters that are not committed: called before any is about to be."""
        self._submit(ADAPTERS, lambda: self._adapters.keep_only(self._journal.record.adapters))

    def raise_epoch(self, epoch: int, then: Callable[[str], None]) -> None:
        """Write a higher epoch, and call `then` on the loop with "", or with why it could not be written."""

        def write() -> None:
            record = self._journal.record
            self._journal.write(msgspec.structs.replace(record, epoch=epoch, raises=record.raises + 1))

        self._submit(JOURNAL, write, then)

    def look(self) -> None:
        """From now on: write the journal again where its path, or the state directory, was removed or renamed, and what could
        not be written."""

        def keep() -> None:
            self._journal.keep()
            self._write_holds()

        self._submit(JOURNAL, keep, self._look_later)

    def _look_later(self, _: str) -> None:
        self._timer = self._loop.call_later(LOOK_S, self.look)

    def _submit(self, what: str, act: Callable[[], None], then: Callable[[str], None] = lambda why: None) -> None:
        """Let the thread call `act`, which writes `what`. Then call `then` on the loop with "", or with why that failed."""
        (self._store_thread if what == ADAPTERS else self._thread).submit(self._run, what, act, then)

    def _run(self, what: str, act: Callable[[], None], then: Callable[[str], None]) -> None:
        """In the thread."""
        why = ""
        try:
            act()
        except OSError as error:
            why = os_error(error)
        except Exception as error:  # of any kind: a group is held until the write is answered
            why = f"{type(error).__name__}: {error}"
        moved = ""
        if what != ADAPTERS:
            moved, self._journal.moved = self._journal.moved, ""
        self._loop.call_soon_threadsafe(self._done, what, then, why, moved)

    def _done(self, what: str, then: Callable[[str], None], why: str, moved: str) -> None:
        if why and why != self._failures.get(what):
            self._log(f"the {what} could not be written: {why}")
        self._failures[what] = why
        if self._closed:
            return
        if moved:
            self._log(f"{moved} was removed, renamed or replaced while the pool runs: it is written again")
            self._moved()
        then(why)

    def close(self) -> None:
        """Wait until everything is written that was asked for. What it came to is told no more: it would ask for more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown()
        self._store_thread.shutdown()


def _text(records: Sequence[UpdateRecord]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(records))
