"""One private name of SGLang, as the table has them."""

from dataclasses import dataclass
from typing import Literal, cast

#: the versions that all of the table was tested with
TESTED = "0.5.17 to 0.5.23"

How = Literal["replaced", "called", "read", "added"]


@dataclass(frozen=True, slots=True)
class Private:
    """One private name of SGLang.

    file: the file here that uses it.
    module, name: where SGLang has it; `Class.name` is a method, or an attribute of the class or of its instances.
    how: `replaced` by ours, `called`, or `read`; `added` is a name that is set on an object of SGLang.
    why: what it is used for.
    signatures: the names of its parameters in each tested version; `...` at the end stands for any further ones, which are
        handed on. None at all: it is a class, or data.
    optional: versions that lack it are supported, too.
    """

    file: str
    module: str
    name: str
    how: How
    why: str
    signatures: tuple[str, ...] = ()
    optional: bool = False
    versions: str = TESTED


def private(file: str, module: str, *rows: tuple[str, ...], optional: bool = False, versions: str = TESTED) -> list[Private]:
    """Rows of (name, how, why, signatures ...); a name `Class.a b c` stands for several attributes."""
    found: list[Private] = []
    for names, how, why, *signatures in rows:
        first, *others = names.split()
        owner = first.rpartition(".")[0]
        for name in (first, *(f"{owner}.{other}" for other in others)):
            found.append(Private(file, module, name, cast(How, how), why, tuple(signatures), optional, versions))
    return found
