"""What SGLang's scheduler does when a forward of rows is over. No SGLang here: its classes are arguments."""

import inspect
from typing import Any


def free_rows_together(processor: Any) -> None:
    """Have the places of all rows of a forward in the key-value pool given back together. `processor` is SGLang's class that
    takes the results of a forward.

    SGLang 0.5.17 gives them back row by row, and makes a new list of all free places for each: on the GPU, one more kernel for
    each row. It can gather them, and does so after a decode. After a prefill that is safe where all requests end with it:
    what is gathered are views of a table, and a request that goes on overwrites its own.
    """
    process = processor.process_batch_result_prefill
    if "free_group_begin" in inspect.unwrap(process).__code__.co_names:
        return  # newer versions gather them

    def process_batch_result_prefill(self: Any, batch: Any, result: Any) -> None:
        if not batch.is_prefill_only:
            return process(self, batch, result)
        allocator = self.token_to_kv_pool_allocator
        allocator.free_group_begin()
        try:
            return process(self, batch, result)
        finally:
            allocator.free_group_end()

    processor.process_batch_result_prefill = process_batch_result_prefill
