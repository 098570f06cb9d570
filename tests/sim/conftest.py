"""What the tests of the simulator share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def rare_collection() -> Iterator[None]:
    """A schedule makes many objects and few cycles: garbage is looked for less often."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    yield
    gc.set_threshold(*before)
