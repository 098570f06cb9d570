"""A worker process: `python -m enginepool.workers.main` with its configuration in the environment (see `spec.py`)."""

import os
import sys
from typing import NoReturn

import msgspec
import uvloop

from enginepool.host import os_error
from enginepool.host.kernel_caches import make_cache
from enginepool.workers.engine import Engine
from enginepool.workers.events import Exit
from enginepool.workers.log import name_source, never_fail, report, say
from enginepool.workers.loop import WorkerProcess
from enginepool.workers.process import end_process
from enginepool.workers.spec import VARIABLE, SpecError, WorkerSpec, read_spec

#: the link's thread and the loop hand over to each other: neither may keep the other from its turn for the usual 5 ms
SWITCH_S = 0.0002


def make_engine(spec: WorkerSpec) -> Engine:
    """The engine that `spec` names, not started.

    Raises:
        SpecError: its packages are not installed, or its options are refused.
    """
    try:
        if spec.engine == "sim":
            from enginepool.workers.sim.engine import SimEngine as Chosen
        else:
            from enginepool.workers.sglang.host.engine import SglangEngine as Chosen
    except ImportError as error:
        raise SpecError(
            f"engine {spec.engine!r} cannot be imported: {error}; pip install 'enginepool[{spec.engine}]'"
        ) from error
    try:
        return Chosen(started_on(spec))
    except ValueError as error:
        raise SpecError(str(error)) from None


def started_on(spec: WorkerSpec) -> WorkerSpec:
    """`spec` with its checkpoint, if it has one, as the model."""
    return msgspec.structs.replace(spec, model=spec.checkpoint, origin=spec.model) if spec.checkpoint else spec


def located(spec: WorkerSpec) -> WorkerSpec:
    """`spec` with the path of its checkpoint without symbolic links.

    A link such as `latest` may move while the engine loads, and the engine has to load the directory whose digest is verified.
    """
    return msgspec.structs.replace(spec, checkpoint=os.path.realpath(spec.checkpoint)) if spec.checkpoint else spec


async def serve(spec: WorkerSpec) -> NoReturn:
    """Run one worker on the running loop, then end the process. Raises SpecError."""
    spec = located(spec)
    engine = make_engine(spec)
    code = await WorkerProcess(spec, engine).run()
    # Not by returning: closing the loop waits for the executor's threads, and an engine may have left one stuck.
    end_process(code)


def _make_kernel_cache(spec: WorkerSpec) -> None:
    """Where the folder cannot be made, the engine would end and name another one. Its disk may not be mounted yet, so the
    worker is started again. The coordinator touches no such folder: a disk may hang."""
    try:
        if spec.kernel_cache:
            make_cache(spec.kernel_cache)
    except OSError as error:
        say(f"cannot start: {os_error(error)}")
        end_process(Exit.ENGINE_DIED)


def main() -> NoReturn:
    """The process entry."""
    never_fail()
    try:
        spec = read_spec(os.environ)
        name_source(f"worker {spec.incarnation}")
        # An engine's children have no business with it.
        del os.environ[VARIABLE]
        if spec.lifeline_fd is not None:
            os.set_inheritable(spec.lifeline_fd, False)
        sys.setswitchinterval(SWITCH_S)
        _make_kernel_cache(spec)
        uvloop.run(serve(spec))
    except SpecError as error:
        say(str(error))
        code = Exit.UNUSABLE
    except OSError as error:
        say(f"cannot start: {error}")
        code = Exit.UNUSABLE
    except Exception as error:
        # A bug of ours. Without this the process would wait for the threads of its engine instead of ending.
        report(error, "the worker ends")
        code = Exit.ENGINE_DIED
    else:
        code = Exit.DRAINED
    end_process(code)


if __name__ == "__main__":
    main()
