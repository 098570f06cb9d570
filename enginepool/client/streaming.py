"""Tensors into buckets, and buckets into the process group: what rank 0 of an update does with its bytes.

Two buffers take turns: while one is broadcast the other is filled and its digest computed. On a GPU all of it runs on a stream
of its own, after what the caller's stream had to do when the update began.
"""

import importlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from enginepool.client.lockstep import Lockstep
from enginepool.client.tensors import Plan, fits
from enginepool.collective import Broadcast, Group
from enginepool.digest import Digest
from enginepool.errors import BadRequest
from enginepool.protocol.layout import Bucket, buckets

torch: Any = importlib.import_module("torch")


class Stopped(Exception):
    """The update was given up meanwhile."""


class Buffers:
    """The two buffers of a publisher, kept from one update to the next."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pair: list[Any] = []

    def pair(self, nbytes: int) -> list[Any]:
        """Two uint8 tensors of at least so many bytes."""
        if not self._pair or self._pair[0].numel() < nbytes:
            self._pair.clear()
            self._pair += [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._pair

    @contextmanager
    def aside(self, after: Any) -> Generator[None]:
        """On a GPU the block runs on the stream of these buffers, behind the event `after` if there is one, and is over when it
        is left."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            yield
            self.stream.synchronize()


class Feed:
    """The tensors of a plan, by their places, pulled in order as buckets need them and dropped when they are through."""

    def __init__(self, plan: Plan) -> None:
        self._manifest = plan.manifest
        self._tensors: Iterator[tuple[str, Any]] = plan.tensors()
        self._held: dict[int, Any] = {}
        self.pulled = 0

    def pull(self, until: int) -> None:
        """Have all tensors before place `until`.

        Raises:
            BadRequest: one is not what was announced, or there are too few.
        """
        while self.pulled < until:
            described = self._manifest[self.pulled]
            found = next(self._tensors, None)
            if found is None:
                raise BadRequest(
                    f"source: ended after {self.pulled} of {len(self._manifest)} tensors; {described.name} is missing",
                    field=f"source[{described.name}]",
                )
            why = fits(*found, described)
            if why:
                raise BadRequest(f"source: {why}", field=f"source[{described.name}]")
            self._held[self.pulled] = found[1].contiguous().view(-1).view(torch.uint8)
            self.pulled += 1

    def end(self) -> None:
        """Raises BadRequest if the source has more than was announced."""
        found = next(self._tensors, None)
        if found is not None:
            raise BadRequest(f"source: {found[0]} came after the last tensor that was announced", field=f"source[{found[0]}]")

    def fill(self, bucket: Bucket, buffer: Any) -> None:
        """Write the bucket's bytes; what no tensor covers becomes zeros."""
        end = 0
        gaps: list[Any] = []
        to: list[Any] = []
        from_: list[Any] = []
        for piece in bucket.pieces:
            if piece.bucket_at > end:
                gaps.append(buffer[end : piece.bucket_at])
            end = piece.bucket_at + piece.nbytes
            to.append(buffer[piece.bucket_at : end])
            from_.append(self._held[piece.tensor][piece.tensor_at : piece.tensor_at + piece.nbytes])
            if piece.tensor_at + piece.nbytes == self._manifest[piece.tensor].nbytes:
                del self._held[piece.tensor]
        if end < bucket.nbytes:
            gaps.append(buffer[end : bucket.nbytes])
        # On a GPU many small copies are one launch. From memory of the host they are over when this returns.
        torch._foreach_copy_(to, from_)
        if gaps:
            torch._foreach_zero_(gaps)


def stream(
    plan: Plan,
    group: Group,
    buffers: Buffers,
    *,
    bucket_bytes: int,
    timeout_s: float,
    lockstep: Lockstep,
    stopped: Callable[[], bool],
    progress: Callable[[int], None],
    after: Any = None,
) -> tuple[str, int]:
    """Broadcast everything; returns the digest and the bytes of the space. `after`: a CUDA event to wait for first.

    Raises:
        BadRequest: the source does not give what was announced.
        CollectiveError: the group is of no more use.
        Stopped: `stopped` said so.
    """
    with buffers.aside(after):
        return _stream(plan, group, buffers, bucket_bytes, timeout_s, lockstep, stopped, progress)


def _stream(
    plan: Plan,
    group: Group,
    buffers: Buffers,
    bucket_bytes: int,
    timeout_s: float,
    lockstep: Lockstep,
    stopped: Callable[[], bool],
    progress: Callable[[int], None],
) -> tuple[str, int]:
    feed, digest = Feed(plan), Digest()
    pending: list[tuple[Broadcast, int]] = []
    sent = 0

    def settle(most: int) -> None:
        """Let at most so many broadcasts be on their way."""
        nonlocal sent
        while len(pending) > most:
            broadcast, nbytes = pending.pop(0)
            broadcast.wait(timeout_s)
            sent += nbytes
            progress(sent)

    total = len(plan.manifest)
    pair: list[Any] = []
    for number, bucket in enumerate(buckets(plan.manifest, bucket_bytes)):
        if stopped():
            raise Stopped
        until = max((piece.tensor for piece in bucket.pieces), default=feed.pulled - 1) + 1
        lockstep.together(until - feed.pulled, lambda until=until: feed.pull(until))
        settle(1)
        pair = pair or buffers.pair(bucket.nbytes)
        buffer = pair[number % 2][: bucket.nbytes]
        feed.fill(bucket, buffer)
        digest.add(buffer, bucket.at)
        pending.append((group.begin(buffer), bucket.nbytes))
    lockstep.together(total - feed.pulled + 1, lambda: (feed.pull(total), feed.end()))
    settle(0)
    return digest.text(), sent
