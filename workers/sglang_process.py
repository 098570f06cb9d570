"""How each process of the engine begins: what must be in place before SGLang's own code runs there. No SGLang here.

The functions at the end are what the engine's processes are started with. Unpickling one of them imports this file first, and
only then SGLang's function that it is to call; so what this file does on import comes before SGLang is imported there.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginepool.workers import cpu_bridge

#: Set for the engine's processes when they need the bridge.
BRIDGE_VARIABLE = "ENGINEPOOL_CPU_BRIDGE"
#: Names the folder in which the engine's processes leave their role and their last error.
NOTES_VARIABLE = "ENGINEPOOL_ENGINE_NOTES"

if os.environ.get(BRIDGE_VARIABLE):
    cpu_bridge.install()


class Notes(logging.Handler):
    """Keeps the last error that a process of the engine logged where it can be found when the process is gone.

    The file is named by the process id. Its first line is the role, its second the error.
    """

    def __init__(self, path: Path, role: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path
        self._role = role
        path.write_text(role + "\n", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Of a traceback, the last line is the error itself."""
        lines = [line.strip() for line in record.getMessage().splitlines() if line.strip()]
        if lines and self._path.parent.is_dir():
            self._path.write_text(f"{self._role}\n{lines[-1]}\n", encoding="utf-8")


def keep_notes(role: str) -> None:
    """Leave this process's role, and from now on its last error."""
    folder = os.environ.get(NOTES_VARIABLE)
    if folder:
        logging.getLogger("sglang").addHandler(Notes(Path(folder) / str(os.getpid()), role))


def start_biases_at_zero() -> None:
    """Have every linear layer's bias begin at zero instead of at random.

    SGLang gives the head of Qwen2/Qwen3ForSequenceClassification a bias that checkpoints lack, and leaves it as drawn: rewards
    would be off by a random amount. A bias that the checkpoint has is loaded over this.
    """
    nn: Any = importlib.import_module("torch.nn")
    draw = nn.Linear.reset_parameters

    def reset_parameters(layer: Any) -> None:
        draw(layer)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)

    nn.Linear.reset_parameters = reset_parameters


def report_every_forward(stats: Any) -> None:
    """Have the scheduler say of every row when its forward began. `stats` is SGLang's class of a row's times.

    With metrics on, SGLang says it of generate requests alone: the times of classifier rows stay at home.
    """
    state_of = stats.__getstate__

    def getstate(times: Any) -> Any:
        times.has_timing_data = True
        return state_of(times)

    stats.__getstate__ = getstate


def gather_labels_without_waiting(processor: Any) -> None:
    """Have label log-probabilities picked from a forward's output without waiting for that forward.

    SGLang makes the indices on the GPU straight from lists, which holds its scheduler until the forward is over: answers of
    the forward before wait for it, and the GPU then waits for the next batch to be prepared. `processor` is a class of the
    module in which SGLang does it.
    """
    torch: Any = importlib.import_module("torch")
    module: Any = sys.modules[processor.__module__]

    def gather(logprobs: Any, wanted: list[list[int] | None]) -> tuple[list[Any], list[list[int]]]:
        lengths = [len(ids or ()) for ids in wanted]
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        tokens = [token for ids in wanted for token in ids or ()]
        # From pinned memory the copy is one more piece of work behind the forward.
        index = torch.tensor([rows, tokens], dtype=torch.long, pin_memory=logprobs.is_cuda)
        index = index.to(logprobs.device, non_blocking=True)
        return list(logprobs[index[0], index[1]].split(lengths)), [list(ids or ()) for ids in wanted]

    module.get_token_ids_logprobs_batch_optimized = gather


def run_scheduler(run: Callable[..., Any], stats: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Entry of a scheduler process: `run` is SGLang's own."""
    keep_notes("scheduler")
    start_biases_at_zero()
    report_every_forward(stats)
    gather_labels_without_waiting(processor)
    return run(*args, **kwargs)


def run_detokenizer(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Entry of the detokenizer process: `run` is SGLang's own."""
    keep_notes("detokenizer")
    return run(*args, **kwargs)
