"""What is changed in SGLang so that one engine packs some batches and others not, on classes that stand for SGLang's."""

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginepool.workers.sglang.patches.packed_forwards import (
    attend_as_each_forward_says,
    is_packed,
    keep_graphs,
    keep_kinds_apart,
    run_packed_as_graphs,
)


def row(name: int, priority: int, packed: bool) -> Any:
    """Stands for a request of SGLang's scheduler."""
    return SimpleNamespace(name=name, priority=priority, multi_item_delimiter_indices=[1, 2] if packed else None)


def new_scheduler(room: int) -> type[Any]:
    """Stands for SGLang's class: a prefill takes up to so many of the rows that wait, of the highest priority first."""

    class Scheduler:
        def __init__(self, waiting: list[Any]) -> None:
            self.waiting_queue = waiting
            self.policy = SimpleNamespace(priority_sign=-1)

        def get_new_batch_prefill(self, running_batch: Any) -> list[Any]:
            self.waiting_queue.sort(key=lambda one: -one.priority)
            taken, self.waiting_queue = self.waiting_queue[:room], self.waiting_queue[room:]
            return taken

    keep_kinds_apart(Scheduler)
    return Scheduler


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=12), st.integers(1, 5))
def test_every_row_runs_once_in_a_forward_of_its_kind_and_the_highest_priority_first(
    rows: list[tuple[int, bool]], room: int
) -> None:
    waiting = [row(i, priority, packed) for i, (priority, packed) in enumerate(rows)]
    scheduler = new_scheduler(room)(list(waiting))
    ran: list[Any] = []
    while scheduler.waiting_queue:
        highest = max(one.priority for one in scheduler.waiting_queue)
        forward = scheduler.get_new_batch_prefill(running_batch=None)
        assert len({is_packed(one) for one in forward}) == 1
        assert max(one.priority for one in forward) == highest
        ran += forward
    assert sorted(one.name for one in ran) == list(range(len(rows)))
    assert scheduler.get_new_batch_prefill(running_batch=None) == []


def test_what_waits_is_not_lost_where_a_prefill_fails() -> None:
    class Scheduler:
        waiting_queue = [row(1, 0, packed=True), row(2, 0, packed=False)]  # noqa: RUF012
        policy = SimpleNamespace(priority_sign=-1)

        def get_new_batch_prefill(self) -> None:
            raise RuntimeError("no memory")

    keep_kinds_apart(Scheduler)
    scheduler = Scheduler()
    with pytest.raises(RuntimeError):
        scheduler.get_new_batch_prefill()
    assert [one.name for one in scheduler.waiting_queue] == [1, 2]


def test_only_packed_forwards_are_planned_as_such() -> None:
    planned: list[bool] = []

    class Backend:
        enable_mis = True

        def init_forward_metadata(self, batch: Any) -> None:
            planned.append(self.enable_mis)

    attend_as_each_forward_says(Backend)
    backend = Backend()
    for packed in (True, False, True, False):
        backend.init_forward_metadata(row(1, 0, packed))
    assert planned == [True, False, True, False]


def test_packed_forwards_run_as_graphs_that_have_no_attention_in_them() -> None:
    class Runner:
        def __init__(self, full: bool) -> None:
            self._is_full_backend = full

        def can_run_graph(self, batch: Any) -> bool:
            return batch.small

        def _prepare_forward_metadata_for_replay(self, batch: Any, of_graph: Any, size: int) -> None:
            raise AssertionError

    run_packed_as_graphs(Runner)
    graphs: list[bool] = []
    for packed, small, full in itertools.product((True, False), repeat=3):
        batch = row(1, 0, packed)
        batch.small = small
        graphs.append(Runner(full).can_run_graph(batch))
    assert graphs == [False, True, False, False, True, True, False, False]


def test_a_graph_gets_the_positions_of_items_once_they_are_planned() -> None:
    class Runner:
        def can_run_graph(self, batch: Any) -> bool:
            return True

        def load_batch(self, batch: Any, size: int) -> Any:
            of_graph = SimpleNamespace(positions=torch.full((size,), 77))
            of_graph.positions[: len(batch.positions)] = batch.positions
            return of_graph, self._prepare_forward_metadata_for_replay(batch, of_graph, size)

        def _prepare_forward_metadata_for_replay(self, batch: Any, of_graph: Any, size: int) -> str:
            if is_packed(batch):
                batch.positions.copy_(torch.tensor([0, 0, 1, 0, 1]))
            return "planned"

    run_packed_as_graphs(Runner)
    for packed, positions in ((True, [0, 0, 1, 0, 1]), (False, [0, 1, 2, 3, 4])):
        batch = row(1, 0, packed)
        batch.positions = torch.arange(5)
        of_graph, planned = Runner().load_batch(batch, 8)
        assert planned == "planned"
        assert of_graph.positions.tolist() == [*positions, 77, 77, 77]


def test_graphs_stay_on_in_both_places_where_versions_of_sglang_switch_them_off() -> None:
    class Settings:
        graphs = True

        def _handle_multi_item_scoring(self) -> None:
            self.graphs = False

    def handle_multi_item_scoring(settings: Settings) -> None:
        settings.graphs = False

    module = SimpleNamespace(handle_multi_item_scoring=handle_multi_item_scoring)
    keep_graphs(Settings, "_handle_multi_item_scoring")
    keep_graphs(module, "handle_multi_item_scoring")
    settings = Settings()
    step: Any = vars(Settings)["_handle_multi_item_scoring"]
    step(settings)
    module.handle_multi_item_scoring(settings)
    assert settings.graphs
    assert str(inspect.signature(step)) == "(self) -> None", "the table of private names is held against it afterwards"
    assert module.handle_multi_item_scoring.__name__ == "handle_multi_item_scoring", "SGLang finds its hooks by this name"
