"""Batches of rows next to sequences, in the scheduler's own process: each is one forward of its own. No SGLang here.

SGLang makes a prefill of all that waits, as far as its limits go: prompts of sequences, and rows of several batches or of
a part of one. Then a row stays in the running batch until the next decode has dropped it. With the changes here

- a forward that has rows has all rows of one batch, and nothing else;
- a batch that waits runs at the next step, and after it the sequences have a step before the next batch;
- room in the key-value pool for the rows in flight is kept from sequences: prompts wait for it, and decodes give it back;
- rows neither find prefixes in the radix cache nor leave some there: those are for sequences, and may be of other weights.

Each rank of an engine decides alike: all of it follows from the scheduler's own state.
"""

from collections.abc import Callable, Sequence
from typing import Any

#: Characters at the beginning of the ids of rows, which are the same for all rows of a batch.
BATCH_ID = 24
#: the namespace of rows in the radix cache; nothing is in it
_NAMESPACE = "rows"


class _NoGrammars:
    """In place of SGLang's manager of grammars, which adds sequences to the queue whose grammar is ready."""

    @staticmethod
    def has_waiting_grammars() -> bool:
        return False


class RowTurns:
    """What is decided for rows in each step of one scheduler.

    Args:
        room: tokens of the key-value pool to keep free for rows; its argument is the scheduler.
        evict: SGLang's function that frees so many tokens of a radix cache, as far as it can.
    """

    def __init__(self, room: Callable[[Any], int], evict: Callable[[Any, int], object]) -> None:
        self._room_of, self._evict = room, evict
        #: tokens of the key-value pool that are kept free for rows; None: not known yet
        self._room: int | None = None
        #: of them, tokens that rows hold whose forward has not been read
        self._held = 0
        #: the forward before was one of rows
        self._after_rows = False
        #: rows are put into a forward now
        self._admits_rows = False

    def begin(self, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
        """A step begins. Returns what of the last forward goes on: rows end with it, and have no place among what decodes."""
        if self._room is None:
            self._room = self._room_of(scheduler)
        self._after_rows, self._held = False, 0
        if last_batch is None or not last_batch.is_prefill_only:
            return last_batch
        self._after_rows = True
        if scheduler.enable_overlap:
            self._held = tokens_of(last_batch.reqs, scheduler.page_size)
        running_batch.batch_is_full = False  # what the rows held is free for prompts
        return None

    def prefill(self, scheduler: Any, running_batch: Any, prefill: Callable[[Any, Any], Any]) -> Any:
        """SGLang's plan of the next prefill: rows of one batch, or what waits besides rows. `prefill`: SGLang's function."""
        rows = [one for one in scheduler.waiting_queue if one.is_prefill_only]
        if not rows:
            return prefill(scheduler, running_batch)
        others = [one for one in scheduler.waiting_queue if not one.is_prefill_only]
        sequences = bool(others) or scheduler.chunked_req is not None or not running_batch.is_empty()
        first = first_batch(rows, scheduler.policy.priority_sign)
        if not (self._after_rows and sequences) and has_room(scheduler, first, self._evict):
            return self._rows_alone(scheduler, running_batch, first, prefill)
        scheduler.waiting_queue = others
        try:
            return prefill(scheduler, running_batch)
        finally:
            scheduler.waiting_queue = [*rows, *scheduler.waiting_queue]

    def _rows_alone(self, scheduler: Any, running_batch: Any, rows: list[Any], prefill: Callable[[Any, Any], Any]) -> Any:
        """A prefill of these rows, which SGLang puts together as if nothing else were there."""
        for one in rows:
            one.extra_key, one.skip_radix_cache_insert = _NAMESPACE, True
        mine = set(map(id, rows))
        others = [one for one in scheduler.waiting_queue if id(one) not in mine]
        chunked, grammars = scheduler.chunked_req, scheduler.grammar_manager
        scheduler.waiting_queue, scheduler.chunked_req, scheduler.grammar_manager = rows, None, _NoGrammars
        self._admits_rows = True
        try:
            plan = prefill(scheduler, type(running_batch)(reqs=[]))
        finally:
            self._admits_rows = False
            scheduler.waiting_queue = [*scheduler.waiting_queue, *others]
            scheduler.chunked_req, scheduler.grammar_manager = chunked, grammars
        plan.running_batch = running_batch
        return plan

    @property
    def kept_from_decodes(self) -> int:
        """Tokens that a decode leaves free."""
        return max(0, (self._room or 0) - self._held)

    @property
    def kept_from_prompts(self) -> int:
        """Tokens that the prefill which is put together leaves free."""
        return 0 if self._admits_rows else self._room or 0


def keep_rows_apart(
    scheduler: Any, batch: Any, adder: Any, room: Callable[[Any], int], evict: Callable[[Any, int], object]
) -> None:
    """Have each batch of rows run as one forward, between two of sequences.

    Args:
        scheduler, batch, adder: SGLang's classes of a scheduler, of a batch of requests and of a prefill that is put together.
        room, evict: as `RowTurns` has them.
    """
    turns = RowTurns(room, evict)
    choose, prefill = scheduler.get_next_batch_to_run, scheduler.get_new_batch_prefill
    required, initialize = batch.new_tokens_required_next_decode, adder.__init__

    def get_next_batch_to_run(self: Any, running_batch: Any, last_batch: Any) -> Any:
        return choose(self, running_batch=running_batch, last_batch=turns.begin(self, running_batch, last_batch))

    def get_new_batch_prefill(self: Any, running_batch: Any) -> Any:
        return turns.prefill(self, running_batch, prefill)

    def new_tokens_required_next_decode(self: Any, selected_indices: Any = None) -> int:
        return required(self, selected_indices) + turns.kept_from_decodes

    def begin_prefill(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if hasattr(self, "memory_budget"):
            self.memory_budget.total_offset += turns.kept_from_prompts
        else:
            self.rem_total_token_offset += turns.kept_from_prompts  # 0.5.17

    scheduler.get_next_batch_to_run = get_next_batch_to_run
    scheduler.get_new_batch_prefill = get_new_batch_prefill
    batch.new_tokens_required_next_decode = new_tokens_required_next_decode
    adder.__init__ = begin_prefill


def first_batch(rows: Sequence[Any], sign: int) -> list[Any]:
    """The rows of the batch whose turn it is: of the highest priority, the first one. `sign`: SGLang's, of priorities."""
    first = min(rows, key=lambda one: one.priority * sign)
    return [one for one in rows if one.rid[:BATCH_ID] == first.rid[:BATCH_ID]]


def has_room(scheduler: Any, rows: Sequence[Any], evict: Callable[[Any, int], object]) -> bool:
    """Whether all of these rows fit now; else SGLang would put a part of them into the forward."""
    if len(rows) > scheduler.req_to_token_pool.available_size():
        return False
    tokens = tokens_of(rows, scheduler.page_size) + (len(rows) + 1) * scheduler.page_size
    evict(scheduler.tree_cache, tokens)
    return scheduler.token_to_kv_pool_allocator.available_size() >= tokens


def tokens_of(rows: Sequence[Any], page: int) -> int:
    """What rows take of the key-value pool."""
    return sum(-(-len(one.origin_input_ids) // page) * page for one in rows)
