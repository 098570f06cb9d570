"""The processes of an engine import without garbage collection, and collect from then on."""

import gc
import runpy
from collections.abc import Iterator
from typing import Any

import pytest

from enginepool.workers.sglang.host import process


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.enable()
    gc.unfreeze()


def test_a_process_of_the_engine_collects_garbage_when_its_imports_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process.NOTES_VARIABLE, "")
    runpy.run_path(process.__file__)
    assert gc.isenabled(), "a worker, which has yet to start an engine, imports the file as well"
    monkeypatch.setenv(process.NOTES_VARIABLE, "nowhere")
    entries: dict[str, Any] = runpy.run_path(process.__file__)
    assert not gc.isenabled()
    monkeypatch.delenv(process.NOTES_VARIABLE)
    assert entries["run_detokenizer"](gc.isenabled)
    assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] == process.LIVING_OBJECTS


def test_a_worker_collects_garbage_also_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError, match="found collecting: False"), process.no_garbage_collection():
        raise ImportError(f"found collecting: {gc.isenabled()}")
    assert gc.isenabled()
