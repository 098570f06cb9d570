"""Columns of tokens: what each token has besides its id, in one row of 32-bit values, and the frames that are made of them.

A token with `top_logprobs` has 41 values or fewer. An answer has up to 64 MiB of them, and all clients wait while they are
moved: numpy needs half a millisecond for each MB, and slices of an `array` 10.
"""

import numpy as np

from enginepool.protocol.frames import Buffer


def join_columns(logprobs: Buffer, top_ids: Buffer, top_logprobs: Buffer, top: int) -> bytes:
    """The columns of tokens: for each its logprob, `top` ids, and as many logprobs, of 32 bits each."""
    if not top:
        return bytes(logprobs)
    chosen, ids, values = (np.frombuffer(part, np.int32) for part in (logprobs, top_ids, top_logprobs))
    table = np.empty((len(chosen), 1 + 2 * top), np.int32)
    table[:, 0], table[:, 1 : 1 + top], table[:, 1 + top :] = chosen, ids.reshape(-1, top), values.reshape(-1, top)
    return table.tobytes()


def split_columns(columns: Buffer, top: int) -> list[Buffer]:
    """Logprobs, and with `top` the ids and the logprobs of the most probable tokens: the frames of `columns`."""
    if not top:
        return [columns]
    table = np.frombuffer(columns, np.int32).reshape(-1, 1 + 2 * top)
    return [table[:, 0].tobytes(), table[:, 1 : 1 + top].tobytes(), table[:, 1 + top :].tobytes()]
