"""Imported once, by the server that the tests fork processes from (`forking`): what each of them would import again."""

import gc
import importlib
import os

# OpenMP reads these when torch is imported. Models this small gain nothing from threads that wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def preload(*names: str) -> None:
    """Import these modules. Forked processes share them, because frozen objects are not counted as possible garbage."""
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


preload(
    "enginepool.cli.main",
    "enginepool.coordinator.shell.daemon",
    "enginepool.trainer",
    "enginepool.transfer.collective",
    "enginepool.workers.main",
    "enginepool.workers.sim.engine",
    "enginepool.workers.stager.main",
    "tests.process.forking",  # of which a process that is forked unpickles what it becomes
    "torch.distributed",
)
