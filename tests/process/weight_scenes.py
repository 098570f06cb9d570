"""Scenes that weights go through by whichever way their bytes travel: by a broadcast, or copied (`test_copied_weights.py`)."""

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from enginepool import errors
from tests.process.daemons import PATIENCE_S
from tests.process.forking import ForkedProcess
from tests.process.scenes import Stage
from tests.process.weights import Gate, some_weights


async def twenty_updates(stage: Stage) -> None:
    """Every answer is of a committed version."""
    versions = range(stage.old + 1, stage.old + 21)
    for version in versions:
        await stage.publish(version, in_flight="abort" if version % 4 == 0 else "drain")
        await stage.load.more(3)
    report = await stage.pool.weights()
    assert [record.version for record in report.history[-20:]] == list(versions)
    assert {record.outcome for record in report.history[-20:]} == {"committed"}
    assert len({worker.digest for worker in (await stage.pool.weights_digest()).workers}) == 1
    np.testing.assert_array_equal(await stage.pool.weight("norm"), some_weights(versions[-1])["norm"].numpy())
    assert len(stage.load.versions()) > 10


def altered(**changes: Any) -> dict[str, torch.Tensor]:
    weights: dict[str, Any] = {**some_weights(2), **changes}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


#: what is wrong -> the weights, and what the refusal says
WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "nan": (altered(norm=torch.tensor([1.0, float("nan"), 1.0])), "norm: 1 elements are nan"),
    "infinity": (altered(norm=torch.tensor([1.0, float("inf"), 1.0])), "norm: 1 elements are infinity"),
    "overflow": (
        altered(norm=torch.tensor([1.0, 65520.0, 1.0])),
        "norm: 1 elements are finite, but infinity in the engine's dtype",
    ),
    "zeros": (altered(embed=torch.zeros(300, 20)), "embed: all zero"),
    "shape": (altered(norm=torch.ones(4)), r"norm: shape \[4\]; the model has \[3\]"),
    "dtype": (altered(norm=torch.ones(3, dtype=torch.int64)), "norm: dtype int64"),
    "unknown name": (altered(other=torch.ones(3)), "unknown names: other$"),
    "wrapper's name": (
        altered(**{"module.norm": torch.ones(3)}),
        r"unknown names: module\.norm \(a wrapper's prefix: the publisher's `rename` takes it off\)$",
    ),
    "missing name": (altered(norm=None), "missing names: norm"),
}


async def wrong_weights(stage: Stage) -> None:
    """Each is refused by name, and right ones are taken after it."""
    for version, (source, words) in enumerate(WRONG.values(), stage.old + 1):
        with pytest.raises(errors.WeightsRefused, match=words):
            await stage.publisher.publish(source, version)
        assert (await stage.pool.weights()).version == version - 1
        await stage.publish(version)


async def loss(stage: Stage, phase: str, who: str, sign: signal.Signals) -> None:
    """Of a worker or its stager, before the hand-over."""
    new = stage.old + 1
    gate = Gate(some_weights(new))
    handle = await stage.start(new, gate)
    if phase == "staged":
        gate.opened.set()
        await stage.phase(handle, "staged")
    victim = await stage.pid(1) if who == "worker" else stage.stager(1)
    os.kill(victim, sign)
    gate.opened.set()
    if phase == "staged" and who == "worker":
        # A stager that is lost now is noticed when its bytes are wanted. A worker whose loss is not noticed yet may be
        # lost in the hand-over.
        await stage.failed(handle)
        with pytest.raises(errors.UpdateAborted, match=r"g-1|1 of 3"):
            await handle.finish()
        assert (await stage.pool.weights()).version == stage.old
        return
    async with asyncio.timeout(PATIENCE_S):
        why = await stage.end(handle.finish())
    assert "g-1" in why or phase == "staged", why or "it was committed"
    assert (await stage.pool.weights()).version == (stage.old if why else new)


async def killed_trainer(stage: Stage, where: str, copying: str = "cuda") -> None:
    """Another one than the stage's; devices that copy may be more there."""
    new = stage.old + 1
    command = [sys.executable, "-m", "tests.process.trainer", stage.daemon.address, str(new), where, "staged", "drain", copying]
    trainer = stage.processes.keep(ForkedProcess(command, stdout=subprocess.PIPE, text=True))
    assert trainer.stdout is not None
    assert await asyncio.to_thread(trainer.stdout.readline) == "there\n"
    with pytest.raises(errors.Publishing):
        await stage.publisher.publish(some_weights(new + 1), new + 1)
    trainer.kill()
    async with asyncio.timeout(PATIENCE_S):
        while (await stage.pool.weights()).history[-1].version != new:
            await asyncio.sleep(0.02)
    record = (await stage.pool.weights()).history[-1]
    assert record.outcome == "update_aborted"
    # Its connections close before its lease is over, unless no process reads from them.
    assert any(word in record.message for word in ("silent", "closed", "reset", "rank 0")), record.message
