"""The bounds of the rule of packing, set to others for a while: so that short rows are placed in each of its ways."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from enginepool.protocol import packing


class Bounds(NamedTuple):
    """Those of `packing`, by their names there in small letters."""

    whole_query: int
    repeated: int
    joined: int


USUAL = Bounds(packing.WHOLE_QUERY, packing.REPEATED, packing.JOINED)
#: Rows that share a query are never placed whole; some of those with a few tokens are; all are, in short sequences.
BOUNDS = (USUAL, Bounds(0, 0, 1024), Bounds(8, 8, 40), Bounds(256, 1000, 24))


@contextmanager
def bounded(bounds: Bounds) -> Generator[None]:
    """The rule has these bounds meanwhile, in every process."""
    usual = packing.WHOLE_QUERY, packing.REPEATED, packing.JOINED
    packing.WHOLE_QUERY, packing.REPEATED, packing.JOINED = bounds
    try:
        yield
    finally:
        packing.WHOLE_QUERY, packing.REPEATED, packing.JOINED = usual
