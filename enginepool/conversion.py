"""What msgspec says of a value that has the wrong type, in the words of this project's errors."""

import re
from typing import Any

_WRONG_TYPE = re.compile(r"Expected `(.*)`, got `(.*)`")
_TOO_LONG = re.compile(r"Expected `(.*)` of length <= (\d+)")
_TYPES = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list"}
#: msgspec's names of types, as TOML has them, and as JSON has them
TOML = {**_TYPES, "object": "a table", "null": "left out"}
JSON = {**_TYPES, "object": "an object", "null": "null"}


def wrong_type(what: str, types: dict[str, str]) -> tuple[str, str]:
    """(allowed, received) of a value of the wrong type, each with its article; ("", "") if something else is wrong with it."""
    found = _WRONG_TYPE.fullmatch(what)
    if not found:
        return "", ""
    allowed = ", or ".join(types.get(name, name) for name in found.group(1).split(" | "))
    return allowed, types.get(found.group(2), found.group(2))


def too_long(what: str, table: Any, path: str) -> tuple[str, str]:
    """(received, allowed) of a value at `path` that is too long: its length, and the largest; ("", "") if something else is
    wrong with it."""
    found = _TOO_LONG.fullmatch(what)
    if not found:
        return "", ""
    return f"{len(value_at(table, path))} {'characters' if found.group(1) == 'str' else 'entries'}", found.group(2)


def value_at(table: Any, path: str) -> Any:
    """The value at `path`, as msgspec writes paths. Raises LookupError where msgspec does not name the key ([...])."""
    for step in re.findall(r"[^.\[\]]+", path):
        table = table[int(step) if step.isdecimal() else step]
    return table
