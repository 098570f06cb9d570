"""What can be left out of the bytes' way from publisher to stager, to see where the milliseconds go."""

from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock


class Without(NamedTuple):
    """What is left out at the sender: `filling` of the buckets, their `digest`; at the receivers the `look` at the bytes."""

    sender: tuple[str, ...] = ()
    receiver: tuple[str, ...] = ()


EVERYTHING = Without()
NO_LOOK = Without((), ("look",))
PARTS = {
    "with everything": EVERYTHING,
    "without the look at the receiver": NO_LOOK,
    "without digest at the sender": Without(("digest",), ()),
    "without filling and digest at the sender": Without(("filling", "digest"), ()),
    "nothing but the bytes' way": Without(("filling", "digest"), ("look",)),
}

#: part -> (where its name is looked up, the name, what does nothing in its place)
StandIns = Mapping[str, tuple[Any, str, Any]]


@contextmanager
def left_out(parts: Collection[str], stand_ins: StandIns) -> Generator[None]:
    """These parts of the work are not done meanwhile, in this process."""
    with ExitStack() as stack:
        for part in parts:
            owner, name, nothing = stand_ins[part]
            stack.enter_context(mock.patch.object(owner, name, nothing))
        yield
