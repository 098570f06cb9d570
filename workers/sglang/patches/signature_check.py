"""Whether the installed SGLang has every private name of `table`, with a signature that was tested."""

import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.patches.modules import FLASHINFER
from enginepool.workers.sglang.patches.private_name import TESTED, Private
from enginepool.workers.sglang.patches.table import PRIVATE


def refuse_unknown(version: str, private: Iterable[Private] = PRIVATE, *, flashinfer: bool) -> None:
    """Raise SettingsError, with their names, when the installed SGLang has changed some of these.

    Args:
        version: SGLang's.
        flashinfer: whether FlashInfer's attention will be used; without it, that module is not imported.
    """
    wrong = list(unknown(one for one in private if flashinfer or one.module != FLASHINFER))
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise SettingsError(f"SGLang {version} is not supported: {wrong[0]}{more}; tested are {TESTED}")


def unknown(private: Iterable[Private]) -> Iterator[str]:
    """Of each name that the installed SGLang does not have, or has with another signature: what is wrong with it."""
    for one in private:
        if one.how == "added":
            continue
        where = f"{one.module}.{one.name}"
        try:
            found = _found(importlib.import_module(one.module), one.name)
        except ImportError as error:
            found, where = None, f"{where} ({error})"
        if found is None:
            if not one.optional:
                yield f"{where} does not exist"
        elif one.signatures and not any(_fits(_parameters(found), known) for known in one.signatures):
            yield f"{where}({_parameters(found)}) has another signature than ({' or '.join(one.signatures)})"


def _found(module: Any, name: str) -> Any:
    """The object of that name; of an attribute that only instances have, True. None: there is none."""
    found = module
    for part in name.split("."):
        owner, found = found, getattr(found, part, None)
        if found is None:
            return True if isinstance(owner, type) and part in _instance_names(owner) else None
    return found


def _instance_names(owner: type) -> set[str]:
    """What methods of a class mention, among them the attributes that they set, and the fields that it declares."""
    names: set[str] = set()
    for base in owner.__mro__:
        names.update(inspect.get_annotations(base))
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
            names.update(code.co_names if code is not None else ())
    return names


def _parameters(found: Any) -> str:
    """The names of its parameters, `*` and `**` before those that collect."""
    function = found.__init__ if isinstance(found, type) and not hasattr(found, "__struct_fields__") else found
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [marks.get(one.kind, "") + one.name for one in inspect.signature(function).parameters.values()]
    if function is not found and names[:1] == ["self"] and "**kwargs" not in names:
        names = names[1:]  # what a dataclass is made from
    return ", ".join(names)


def _fits(parameters: str, known: str) -> bool:
    return parameters == known or (known.endswith("...") and f"{parameters}, ".startswith(known.removesuffix("...")))
