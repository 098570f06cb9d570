"""What callers look for in a pool that is not there: methods of later versions, and those of a pool that is not open yet."""

from enginepool import __version__

#: methods that this version does not have -> the first version that will
LATER = {"tokenize": "0.2"}


def no_attribute(pool: str, name: str) -> AttributeError:
    """The error for an attribute that `pool`, a class, does not have; `hasattr` is False for it."""
    if name in LATER:
        said = f"{pool}.{name} will come with enginepool {LATER[name]}; this is {__version__}"
    else:
        said = f"{pool!r} object has no attribute {name!r}"
    return AttributeError(said, name=name)


def not_open(call: str, name: str) -> AttributeError:
    """The error for an attribute of what `call` returned, which is no pool before it is awaited or entered."""
    return AttributeError(
        f"{call}(...) is not open yet, so it has no {name!r}: write pool = await {call}(...) or async with {call}(...) as pool",
        name=name,
    )


def not_made_so(pool: str, given: object) -> TypeError:
    """The error for a pool that is made by its class."""
    shown = f"{given!r:.80}" if isinstance(given, str) else "..."
    wait = "" if pool == "BlockingPool" else "await "
    return TypeError(
        f"{pool}({shown}) opens nothing: write {wait}{pool}.connect({shown}) for a pool that runs elsewhere, or "
        f"{wait}{pool}.start(MODEL) for one in this program"
    )
