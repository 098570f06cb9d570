"""A change to SGLang's profiler: traces that cannot be written end no engine. No SGLang here: its classes are arguments."""

import contextlib
import importlib
from typing import Any

#: begins the answer about a profile whose traces could not be written
UNWRITTEN = "the traces could not be written"


def end_no_engine_for_a_trace(profiler: Any, answer: Any) -> None:
    """Have a profile whose traces cannot be written end with an answer that says so. On a full disk SGLang's scheduler ends.
    `profiler` is SGLang's class that runs profiles, `answer` that of its answers."""
    stop = profiler._stop_profile
    #: why the last profile has no traces, or ""
    profiler.unwritten = ""

    def stop_profile(self: Any, stage: Any = None) -> Any:
        # SGLang's other profiler, which a variable of the environment chooses, has no such attribute.
        running = getattr(self, "profile_in_progress", False)
        try:
            done = stop(self, stage)
        except OSError as error:
            if not running:
                raise
            _end(self)
            self.unwritten = f"{UNWRITTEN}: {error.strerror}"
        else:
            if running:
                self.unwritten = ""
            if not self.unwritten:
                return done
        return answer(success=False, message=self.unwritten)

    profiler._stop_profile = stop_profile


def _end(profiler: Any) -> None:
    """What is left to do in SGLang's own function."""
    torch: Any = importlib.import_module("torch")
    with contextlib.suppress(RuntimeError):  # it has stopped, unless there was no folder
        profiler.torch_profiler.stop()
    torch.distributed.barrier(profiler.dp_tp_cpu_group)  # other ranks wait there
    profiler.torch_profiler, profiler.profile_in_progress = None, False
