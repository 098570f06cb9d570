"""What a pool does not have: unknown methods, those of a pool that is not open yet, and a form for other processes."""


def no_attribute(pool: str, name: str) -> AttributeError:
    """The error for an attribute that `pool`, a class, does not have; `hasattr` is False for it."""
    return AttributeError(f"{pool!r} object has no attribute {name!r}", name=name)


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


def not_copied(pool: str, address: str) -> TypeError:
    """The error for a pool that is copied, or pickled for another process, such as a worker of a data loader."""
    return TypeError(f"a {pool} cannot be copied or pickled: open one in each process, by {pool}.connect({address!r})")
