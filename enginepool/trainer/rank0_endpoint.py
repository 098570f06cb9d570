"""Rank 0 of the process group between a publisher and the workers: its address, and the group while one is formed."""

import errno
import os
from typing import Any

from enginepool.errors import BadRequest
from enginepool.protocol.messages.weights import Join
from enginepool.trainer import buffers
from enginepool.transfer.collective import Rendezvous
from enginepool.transfer.process_group import CollectiveError, ProcessGroup


class Rank0Endpoint:
    """What workers connect to. It serves many updates, and is replaced after any failure of the group.

    Attributes:
        peer: its random name. backend: `nccl` or `gloo`. address: HOST:PORT.
        lost: it must not be used any more.
    """

    def __init__(self, host: str, device: Any) -> None:
        """Raises BadRequest: this machine has no address `host`."""
        self.peer = os.urandom(8).hex()
        self.backend: Any = "nccl" if device.type == "cuda" else "gloo"
        self._device = device
        try:
            self._rendezvous = Rendezvous(host)
        except OSError as error:
            # An unknown name has an error of the resolver, below 0.
            if error.errno != errno.EADDRNOTAVAIL and (error.errno or 0) >= 0:
                raise
            text = f"host: {host!r} is no address of this machine: {error.strerror}"
            raise BadRequest(text, field="host") from None
        self.address = self._rendezvous.address
        self._group: ProcessGroup | None = None
        self.lost = False

    def join(self, join: Join, timeout_s: float) -> ProcessGroup:
        """The group that `join` describes: the present one, if it is that group, else a new one. Raises CollectiveError."""
        group = self._group
        if group is None or (group.name, group.world) != (join.rendezvous, join.world):
            if group is not None:
                group.abort()
            self._group = None
            group = self._rendezvous.join(
                join.rendezvous,
                join.world,
                backend=self.backend,
                device=self._device,
                timeout_s=timeout_s,
                copies=buffers.copied(self._device),
            )
            if self.lost:
                group.abort()
                raise CollectiveError(f"group {join.rendezvous} formed too late")
            self._group = group
        return group

    def abort(self) -> None:
        """Leave the group and stop listening. Any thread; does not wait for other ranks, and takes seconds at most."""
        self.lost = True
        if self._group is not None:
            self._group.abort()
        self._rendezvous.close()
