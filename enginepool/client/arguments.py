"""Arguments of the Python API, checked one by one, and how one that is wrong is named.

What can be checked without knowledge of the model is refused here, with the error that the coordinator would give and in
Python's names (`items[3][7]`, `label_token_ids`).
"""

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from enginepool.errors import BadRequest
from enginepool.net.address import ADDRESS_VARIABLE, FORM, default_address, wrong_address
from enginepool.protocol.basis import MAX_ID, MAX_PRIORITY
from enginepool.protocol.capabilities import MAX_ADAPTER_NAME

#: One row of token ids: a sequence of ints, a one-dimensional integer array, or what numpy makes one of (a CPU tensor).
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

#: The longest time that can be asked for, 30 years: on the wire it is milliseconds in 64 bits.
MOST_S = 1_000_000_000


def bad(field: str, message: str, limit: str = "") -> BadRequest:
    """The error for an argument that cannot be served."""
    return BadRequest(message, field=field, limit=limit)


def kind(value: object) -> str:
    """The type of a wrong value, with its article, for an error."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def kind_of_array(value: Any) -> str:
    """The same, of what should be an array."""
    if not isinstance(value, np.ndarray):
        return kind(value)
    array = cast("npt.NDArray[Any]", value)
    return f"an array {array.dtype} {list(array.shape)}"


def utf8(where: str, text: str) -> bytes:
    """The bytes of a text."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise bad(where, f"{where}: not UTF-8: a lone surrogate at character {error.start}") from None


def check_flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise bad(name, f"{name}: {kind(value)}; True or False")
    return bool(cast("bool", value))


def check_int(name: str, value: Any, least: int, most: int) -> int:
    """An int in a range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        shown = value if isinstance(value, float) else kind(value)
        raise bad(name, f"{name}: {shown}; an int from {least} to {most}")
    number = int(cast("int", value))
    if not least <= number <= most:
        raise bad(name, f"{name}: {number}; an int from {least} to {most}", str(least if number < least else most))
    return number


def check_priority(value: Any) -> int:
    """An int in the protocol's range."""
    return check_int("priority", value, -MAX_PRIORITY, MAX_PRIORITY)


def check_timeout(value: Any, name: str = "timeout", most: int = MOST_S, *, zero: bool = False) -> float | None:
    """Seconds above 0 (with `zero` also 0) and at most `most`, or None for no deadline."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise bad(name, f"{name}: {kind(value)}; seconds, or None")
    seconds = cast("float", value)
    if not (seconds > 0 or (zero and seconds == 0)) or seconds == math.inf:
        raise bad(name, f"{name}: {seconds}; a finite number of seconds, {'from 0 on' if zero else 'more than 0'}", "0")
    if seconds > most:
        raise bad(name, f"{name}: over {most} seconds, which is the most", str(most))
    return float(seconds)


def check_version(value: Any, name: str = "version") -> int:
    """A weight version: an int from 0 on."""
    return check_int(name, value, 0, MAX_ID)


T = TypeVar("T", bound=str)


def check_choice(name: str, value: T, known: Sequence[str]) -> T:
    """One of a few words."""
    if value not in known:
        raise bad(name, f"{name}: {value!r}; one of {', '.join(known)}", ", ".join(known))
    return value


def check_truncation(value: Any) -> Literal["", "error", "left", "right"]:
    """`truncation`, as the wire has it."""
    return "" if value is None else check_choice("truncation", value, ("error", "left", "right"))


def check_name(value: Any) -> str:
    """The name of a weight."""
    if not isinstance(value, str) or not value:
        shown = "empty" if isinstance(value, str) else kind(value)
        raise bad("name", f"name: {shown}; the name of a weight in the checkpoint")
    utf8("name", value)
    return value


def check_address(value: Any) -> str:
    """The address of a coordinator, as a client connects to it; None is the one in the environment, or the default.
    An empty variable is as one that is not set."""
    name = "address"
    if value is None and (said := os.environ.get(ADDRESS_VARIABLE, "")):
        name, value = ADDRESS_VARIABLE, said
    elif value is None:
        value = default_address()
    if not isinstance(value, str):
        raise bad("address", f"address: {kind(value)}; {FORM}")
    if why := wrong_address(value):
        raise bad("address", f"{name}: {value!r}; {why}")
    return value


def check_options(method: str, options: Mapping[str, object], known: type, *named: str) -> None:
    """Refuse an option that the method does not have, and name a similar one. Raises TypeError.

    Args:
        known: a TypedDict of the method's options.
        named: its other arguments.
    """
    for name in options:
        if name not in known.__annotations__:
            raise TypeError(f"{method}() has no argument {name!r}{meant(name, [*known.__annotations__, *named])}")


#: what other APIs, and the wire, call an option
_OTHER_NAMES = {
    "labels": "label_token_ids",
    "label_ids": "label_token_ids",
    "softmax": "apply_softmax",
    "hidden": "return_pooled_hidden_states",
    "timeout_ms": "timeout, in seconds",
    "deadline": "timeout, in seconds",
    "seed": "sampling_seed",
}


def meant(name: str, known: Sequence[str]) -> str:
    """The option that `name` was probably meant to be, as the end of a sentence; "" where that is not known."""
    near = _OTHER_NAMES.get(name, "")
    if near.partition(",")[0] not in known:
        near = next(iter(difflib.get_close_matches(name, known, 1)), "")
    return f"; did you mean {near}?" if near else ""


def check_path(value: Any, expected: str = "a checkpoint directory") -> str:
    """The path of a folder: one that is here is told from the root on, as workers run in other folders."""
    path = fspath(cast("PathLike[str]", value)) if isinstance(value, str | PathLike) else None
    if not isinstance(path, str) or not path:
        shown = "empty" if path == "" else kind(cast("object", value))
        raise bad("path", f"path: {shown}; {expected}")
    if os.path.isdir(path):  # False for a path that is too long for this host
        path = str(Path(path).resolve())
    utf8("path", path)
    return path


def check_adapter(value: Any) -> str:
    """The name of an adapter, or "" for None."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise bad("adapter", f"adapter: {kind(value)}; the name of an adapter, or None for the model alone")
    if len(value) > MAX_ADAPTER_NAME:
        text = f"adapter: a name of {len(value)} characters; at most {MAX_ADAPTER_NAME}"
        raise bad("adapter", text, str(MAX_ADAPTER_NAME))
    utf8("adapter", value)
    return value


def check_worker(value: Any) -> str:
    """The name of a worker, or ""."""
    if not isinstance(value, str):
        raise bad("worker", f"worker: {kind(value)}; the name of a worker, or '' for all")
    utf8("worker", value)
    return value


def check_group(value: Any) -> str:
    """The name of a group, or ""."""
    if not isinstance(value, str):
        raise bad("group", f"group: {kind(value)}; the name of a group, or '' where there is one")
    utf8("group", value)
    return value
