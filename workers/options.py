"""Whether engines know the options that a pool gives them; said without starting one, and without torch.

    python -m enginepool.workers.options

reads a JSON array of [engine, options] and writes one of [key, reason]: both are "" where nothing is wrong, and the key is
where the reason names it. An engine refuses the same when it starts; here it is said before any worker does.
"""

import ast
import difflib
import importlib.util
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.settings import FIXED
from enginepool.workers.sim.engine import SimEngine
from enginepool.workers.sim.options import SimOptions

#: Where SGLang declares its settings: in one class, or, in newer versions, in one for each section.
_DECLARED = ("srt/server_args.py", "srt/arg_groups/**/*.py")
#: Fewer names than this, or none called `model_path`, and SGLang declares them elsewhere: its workers will say what they know.
_FEWEST = 100

Wrong = tuple[str, str]


def judge(engine: str, options: Mapping[str, Any]) -> Wrong:
    """The first option that this engine would refuse, and why; ("", "") where there is none to be seen from here."""
    if engine == "sim":
        wrong = _unknown(engine, options, SimOptions.__struct_fields__)
        return wrong or _sim(options)
    for name in options:
        if name in FIXED:
            return name, f"not set here: it comes from {FIXED[name]}"
    known = sglang_settings()
    return (_unknown("sglang installed here", options, known) if known else None) or ("", "")


def sglang_settings() -> set[str]:
    """The settings of the SGLang that is installed, read from its source; empty where that cannot be told."""
    spec = importlib.util.find_spec("sglang")
    names: set[str] = set()
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for pattern in _DECLARED:
            for file in sorted(Path(root).glob(pattern)):
                names |= _fields(file.read_text("utf-8"))
    return names if len(names) >= _FEWEST and "model_path" in names else set()


def _fields(source: str) -> set[str]:
    """Names that classes declare with a type."""
    bodies = (node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    lines = (line for body in bodies for line in body if isinstance(line, ast.AnnAssign))
    return {line.target.id for line in lines if isinstance(line.target, ast.Name)}


def _unknown(engine: str, options: Mapping[str, Any], known: Collection[str]) -> Wrong | None:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return name, f"the engine {engine} has no such option{hint}"
    return None


def _sim(options: Mapping[str, Any]) -> Wrong:
    try:
        SimEngine(EngineSettings(model="sim", options=dict(options)))
    except ValueError as error:
        return "", str(error)
    return "", ""


def main() -> None:
    """Read, judge, write."""
    groups = msgspec.json.decode(sys.stdin.buffer.read(), type=list[tuple[str, dict[str, Any]]])
    sys.stdout.buffer.write(msgspec.json.encode([judge(engine, options) for engine, options in groups]))


if __name__ == "__main__":
    main()
