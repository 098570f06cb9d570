"""What the results of all calls share: the arrays and figures in an answer; and reading one weight in chunks."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from enginepool.errors import EngineFailed, Malformed
from enginepool.protocol.basis import Dtype
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Result
from enginepool.protocol.messages.weight_reports import WeightsReport

Floats: TypeAlias = npt.NDArray[np.float32]
#: times that a weight is read again from its start because another version was committed meanwhile
RESTARTS = 3


class RequestUsage(NamedTuple):
    """Rows and prompt tokens computed, over all parts of a request."""

    items: int
    tokens: int


class RequestTimings(NamedTuple):
    """Seconds from arrival to first dispatch on the coordinator's clock; longest time of a part in an engine."""

    queued_s: float
    run_s: float


def float_frame(answer: Result | WeightsReport, frames: Sequence[Buffer], name: str, *, writable: bool = True) -> Floats | None:
    """The float32 frame of this name in an answer, or None. A `writable` array may be a copy."""
    return frame_of(answer, frames, name, "float32", writable=writable)


def frame_of(
    answer: Result | WeightsReport, frames: Sequence[Buffer], name: str, dtype: Dtype, *, writable: bool = True
) -> npt.NDArray[Any] | None:
    """The frame of this name and dtype in an answer, or None. A `writable` array may be a copy."""
    for spec, frame in zip(answer.frames, frames, strict=True):
        if spec.name == name and spec.dtype == dtype:
            array = np.frombuffer(frame, dtype).reshape(spec.shape)
            return array if array.flags.writeable or not writable else array.copy()
    return None


def figures(result: Result) -> tuple[int, tuple[int, ...], RequestTimings, RequestUsage, int, tuple[str, ...]]:
    """The version, the forwards, the times in seconds, the usage, the rows that were cut and the workers of an answer."""
    times, usage = result.timings, result.usage
    return (
        result.version,
        tuple(result.forwards),
        RequestTimings(times.queued_us / 1e6, times.run_us / 1e6),
        RequestUsage(usage.items, usage.tokens),
        result.truncated,
        tuple(result.workers),
    )


class WeightReader:
    """Puts a weight together from the reports that were asked for its chunks, in order."""

    def __init__(self) -> None:
        #: of the next chunk
        self.offset = 0
        #: the whole, once a chunk came
        self._values: Floats | None = None
        self._shape: tuple[int, ...] = ()
        self._version: tuple[int, str] | None = None
        #: times that it began again because the weights had changed
        self._restarts = 0

    @property
    def weight(self) -> Floats | None:
        """The weight; None: chunks are missing."""
        if self._values is None or self.offset < self._values.size:
            return None
        return self._values.reshape(self._shape)

    def take(self, report: WeightsReport, frames: Sequence[Buffer]) -> None:
        """The chunk at `offset`.

        Raises:
            EngineFailed: the worker that was asked has no such weight, or could not say; none is ready to be asked; or the
                weights change again and again.
            Malformed: there is none, and no reason.
        """
        values = self._chunk(report, frames)
        version = (report.version, report.digest)
        if self._version not in (None, version) or (self._values is not None and self._shape != tuple(report.shape)):
            self._restarts += 1
            if self._restarts > RESTARTS:
                raise EngineFailed(f"the weights changed {self._restarts} times while this one was read")
            self.offset, self._values, self._version = 0, None, None
            return
        if self._values is None:
            self._version, self._shape = version, tuple(report.shape)
            self._values = np.empty(math.prod(self._shape), np.float32)
        left = self._values.size - self.offset
        if values.size > left or (left and not values.size):
            raise Malformed(f"a chunk of {values.size} elements where {left} are left", field="tensor")
        self._values[self.offset : self.offset + values.size] = values
        self.offset += values.size

    def _chunk(self, report: WeightsReport, frames: Sequence[Buffer]) -> Floats:
        tensor = float_frame(report, frames, "tensor", writable=False)
        if tensor is not None:
            return tensor.ravel()
        for worker in report.workers:
            if worker.message:
                raise EngineFailed(f"{worker.name}: {worker.message}")
        if not report.workers:
            raise EngineFailed(f"no worker of group {report.group!r} is ready")
        raise Malformed("the answer holds no tensor", field="tensor")
