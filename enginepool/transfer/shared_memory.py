"""The memory that an update's bytes lie in: made by a stager or a publisher, opened by engines. Both ends of a `MemoryRegion`.

On a host it is an unnamed file in shared memory, on a GPU memory that torch shares by CUDA IPC. A *seal* makes it possible to
lend it: random bytes at its end, which are gone before its content changes. A reader that still finds the seal after
its copy has copied the content that was shared.
"""

import contextlib
import fcntl
import importlib
import os
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from enginepool.host import SHARED, check_room, unnamed_file
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import SEAL_BYTES, MemoryRegion
from enginepool.transfer.weight_scan import WeightScan

torch: Any = importlib.import_module("torch")

#: of `cudaHostRegister`: memory that a GPU only reads, which is pinned in two thirds of the time
_READ_ONLY = 8
#: name of a file with torch's counts of users, which does not exist: processes that open a region are not counted
_UNCOUNTED = b"/enginepool-uncounted"


class HostSpace:
    """A space in memory of this host that other processes map: an unnamed file, gone with its last user."""

    kind: Literal["host"] = "host"

    def __init__(self, nbytes: int, *, pinned: bool = False, lent: bool = False) -> None:
        """`lent`: a sealed memfd, so that other programs can rely on its size. Raises OSError: no room."""
        self.fd = -1
        try:
            if not lent:
                check_room(SHARED, nbytes)
            self.fd = _sealable() if lent else unnamed_file(SHARED)
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError:
            if lent:
                self.close()
                raise
            # The file system may be kept small where memory is not.
            self.close()
            self.fd = os.memfd_create("enginepool-weights", os.MFD_CLOEXEC)
            os.posix_fallocate(self.fd, 0, nbytes)
        if lent:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.nbytes = nbytes
        space = torch.from_file(f"/proc/self/fd/{self.fd}", shared=True, size=nbytes, dtype=torch.uint8)
        self._pinned = pinned and _pin(space)
        #: one for each device of the engine: here all of them map the same
        self.tensors = [space]
        _made[space.data_ptr()] = self

    def regions(self) -> list[MemoryRegion]:
        """As other processes open it."""
        return [MemoryRegion("file", self.nbytes, path=f"/proc/{os.getpid()}/fd/{self.fd}")]

    def close(self) -> None:
        """No process can open it any more; the memory is freed with its last mapping, here or elsewhere."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()
        if getattr(self, "_pinned", False) and hasattr(self, "tensors"):
            # While it is mapped: else the next memory at its address could not be pinned, and CUDA would have an error to tell.
            _unpin(self.tensors[0].data_ptr())


def _sealable() -> int:
    return os.memfd_create("enginepool-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _pin(space: Any, flags: int = 0) -> bool:
    """Have a GPU copy from it at full speed; whether it can."""
    if int(torch.cuda.cudart().cudaHostRegister(space.data_ptr(), space.numel(), flags)) == 0:
        return True
    # CUDA reports the error to the next kernel: to this one, and not to an unrelated one.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


class DeviceSpace:
    """The same space on each of some GPUs, or a part of `sizes` bytes on each, one after the other."""

    kind: Literal["device"] = "device"

    def __init__(self, nbytes: int, devices: Sequence[Any], sizes: Sequence[int] = ()) -> None:
        """Raises OSError: no room."""
        self.nbytes = nbytes
        sizes = sizes or [nbytes] * len(devices)
        self._shared: list[tuple[Any, ...]] = []
        try:
            self.tensors: list[Any] = [
                torch.empty(size, dtype=torch.uint8, device=device) for size, device in zip(sizes, devices, strict=True)
            ]
        except RuntimeError as error:
            raise OSError(str(error).splitlines()[0]) from None
        _made.update({tensor.data_ptr(): self for tensor in self.tensors})

    def regions(self) -> list[MemoryRegion]:
        """As other processes open them.

        Torch counts a user for each time that something is shared, keeps the memory until that one has opened and closed it,
        and never frees it if two have, or none. So it is shared once, and the user that it waits for is `close`.
        """
        self._shared = self._shared or [tensor.untyped_storage()._share_cuda_() for tensor in self.tensors]
        return [
            MemoryRegion("cuda", self.nbytes, handle=msgspec.msgpack.encode(_uncounted(shared)), gpu=gpu_uuid(tensor.device))
            for tensor, shared in zip(self.tensors, self._shared, strict=True)
        ]

    def close(self) -> None:
        """No process is to open it any more; the memory is freed with the last reference to it here."""
        shared, self._shared = self._shared, []
        for one in shared:
            torch.UntypedStorage._release_ipc_counter(one[4], one[5], device=torch.device("cuda", one[0]))

    def __del__(self) -> None:
        if getattr(self, "_shared", ()):
            self.close()


def _uncounted(shared: tuple[Any, ...]) -> tuple[Any, ...]:
    """What torch shares, for users that torch does not count. Torch accepts that the counter does not exist."""
    return (*shared[:4], _UNCOUNTED, 0, *shared[6:])


def _shared_cuda(handle: bytes) -> list[Any]:
    """What `_share_cuda_` of another process returned. The counter of users that it names is a file of shared memory, which
    torch would write to: no message decides which. Raises RuntimeError."""
    try:
        return list(_uncounted(msgspec.msgpack.decode(handle, type=tuple[int, bytes, int, int, bytes, int, bytes, bool])))
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"handle: not what torch shares: {error}") from None


Memory = HostSpace | DeviceSpace

#: those of this process, by where they begin
_made: "weakref.WeakValueDictionary[int, Memory]" = weakref.WeakValueDictionary()


def make_space(nbytes: int, device: Any) -> Memory:
    """A space on one device. Raises OSError: no room."""
    return DeviceSpace(nbytes, [device]) if torch.device(device).type == "cuda" else HostSpace(nbytes)


def place_of(part: Any) -> tuple[MemoryRegion, int]:
    """(the space that a uint8 tensor is a part of, where it begins there). Raises RuntimeError: it is part of none."""
    begin = part.untyped_storage().data_ptr()
    memory = _made.get(begin)
    if memory is None:
        raise RuntimeError("a bucket that others are to copy does not lie in memory that can be shared")
    which = next(k for k, tensor in enumerate(memory.tensors) if tensor.data_ptr() == begin)
    return memory.regions()[which], part.data_ptr() - begin


def gpu_uuid(device: Any) -> str:
    """The UUID of a GPU of this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that this process sees, by their index here. It must be one that uses them."""
    return [gpu_uuid(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def open_space(space: MemoryRegion, *, across: bool = False, by_current: bool = False, pinned: bool = False) -> Any:
    """Its bytes, in this process: a uint8 tensor. They stay while the tensor lives, also after their maker ended.

    Args:
        across: on a GPU that is not visible here they are opened by way of the current one, which can copy them.
        by_current: on each GPU they are opened by way of the current one, whose kernels then read them as its own. This process
            then needs no CUDA context on the other GPU, which takes some hundred MB of it.
        pinned: of memory of the host: a GPU is to copy out of it. That takes 50 ms for a gigabyte, in which the process's GPU
            stands still; the copies then take 18, and 150 otherwise.

    Raises:
        OSError, RuntimeError: they are gone, or cannot be reached from here; one line.
    """
    if space.kind == "file":
        return _open_file(space, pinned)
    gpus = visible_gpus()
    if space.gpu and space.gpu not in gpus and not (across or by_current):
        raise RuntimeError(f"GPU {space.gpu} is not visible here")
    shared = _shared_cuda(space.handle)
    if space.gpu:
        # Another process numbers GPUs as it sees them.
        own = space.gpu in gpus and not by_current
        shared[0] = gpus.index(space.gpu) if own else torch.cuda.current_device()
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: space.nbytes]


def _open_file(space: MemoryRegion, pinned: bool) -> Any:
    if not pinned or (content := _shared_mapping(space)) is None:
        return torch.from_file(space.path, shared=False, size=space.nbytes, dtype=torch.uint8)
    if _pin(content, _READ_ONLY):
        weakref.finalize(content, _unpin, content.data_ptr()).atexit = False
    return content


def _shared_mapping(space: MemoryRegion) -> Any:
    """A private one would be copied, page by page, to be pinned. None: this process may only read it, or not all is there."""
    try:
        fd = os.open(space.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size < space.nbytes:
            return None  # torch would make it longer
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=space.nbytes, dtype=torch.uint8)
    finally:
        os.close(fd)


def _unpin(at: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(at)


def verified(content: Any, manifest: Sequence[Tensor], targets: Sequence[str] = ()) -> tuple[str, list[Finding]]:
    """(digest, findings) of the bytes at the front of `content`, a space laid out by `protocol.layout`; on a GPU on
    a stream of its own. `targets` as `WeightScan` has them.

    Raises:
        ValueError: it is too small.
    """
    nbytes = layout(manifest).nbytes
    if content.numel() < nbytes:
        raise ValueError(f"a space of {content.numel()} bytes for {nbytes}")
    if content.is_cuda:
        with torch.cuda.device(content.device), torch.cuda.stream(torch.cuda.Stream(content.device)):
            return _verified(content, manifest, nbytes, targets)
    return _verified(content, manifest, nbytes, targets)


def _verified(content: Any, manifest: Sequence[Tensor], nbytes: int, targets: Sequence[str]) -> tuple[str, list[Finding]]:
    looking = WeightScan(content, manifest, [nbytes], targets).begin()
    looking.add(0)
    return looking.result()


def set_seal(content: Any) -> bytes:
    """Put a seal on a space whose content stays from now on; the content must be there."""
    seal = os.urandom(SEAL_BYTES)
    content[-SEAL_BYTES:].copy_(torch.frombuffer(bytearray(seal), dtype=torch.uint8))
    _wait(content)
    return seal


def break_seal(content: Any) -> None:
    """The content may change from now on."""
    content[-SEAL_BYTES:].zero_()
    _wait(content)


def sealed(content: Any, seal: bytes) -> bool:
    """Whether the bytes that were copied out of `content` are those that were lent; the copies must be over."""
    return not seal or content[-len(seal) :].cpu().numpy().tobytes() == seal


def _wait(content: Any) -> None:
    if content.is_cuda:
        torch.cuda.current_stream(content.device).synchronize()
