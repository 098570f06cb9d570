"""Memory that an update's bytes lie in: made by one process, opened by another, lent with a seal."""

import errno
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from enginepool.errors import BadRequest
from enginepool.host import host_identity
from enginepool.protocol.layout import layout
from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import MemoryRegion, Published
from enginepool.trainer.buffers import Buffers
from enginepool.trainer.ipc_export import IpcExport, IpcExporter
from enginepool.trainer.tensor_feed import Stopped
from enginepool.trainer.tensors import make_plan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks
from enginepool.trainer.update_sender import UpdateSender
from enginepool.transfer import shared_memory as regions
from enginepool.transfer.shared_memory import HostSpace, break_seal, open_space, sealed, set_seal, verified, visible_gpus
from tests.open_files import lent_here, open_here

torch: Any = importlib.import_module("torch")

#: neither a whole number of blocks nor of buckets
SOURCE = {"a": torch.arange(1000.0), "b": torch.full((7,), 2.0, dtype=torch.bfloat16), "c": torch.ones(3, 50)}


@pytest.fixture
def lender() -> IpcExporter:
    return IpcExporter(Buffers(torch.device("cpu")), keep=False)


def lend(
    lender: IpcExporter, source: Any = SOURCE, *, stopped: Callable[[], bool] = lambda: False
) -> tuple[IpcExport, str, MemoryRegion]:
    loan = IpcExport(lender)
    progress: list[int] = []
    plan = make_plan(source)
    digest, nbytes, (space,) = loan.fill(
        plan, bucket_bytes=512, ranks=TrainerRanks(), stopped=stopped, progress=progress.append
    )
    assert nbytes == progress[-1] == layout(plan.manifest).nbytes
    return loan, digest, space


def test_another_process_sees_what_was_laid_out(lender: IpcExporter) -> None:
    loan, digest, space = lend(lender)
    code = (
        "import sys, msgspec\n"
        "from enginepool.protocol.manifest import Tensor\n"
        "from enginepool.protocol.messages.weights import MemoryRegion\n"
        "from enginepool.transfer.shared_memory import verified, open_space, sealed\n"
        "space, manifest = msgspec.json.decode(sys.argv[1], type=tuple[MemoryRegion, list[Tensor]])\n"
        "opened = open_space(space)\n"
        "print(*verified(opened, manifest), sealed(opened, space.seal))\n"
    )
    text = msgspec.json.encode((space, make_plan(SOURCE).manifest)).decode()
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.split() == [digest, "[]", "True"]
    loan.end()


def test_open_memory_stays_when_its_owner_gives_it_back_and_cannot_be_opened_again(lender: IpcExporter) -> None:
    loan, digest, space = lend(lender)
    opened = open_space(space)
    loan.end()
    manifest = make_plan(SOURCE).manifest
    assert verified(opened, manifest)[0] == digest
    assert not sealed(opened, space.seal), "but its content may have changed"
    with pytest.raises((OSError, RuntimeError)):
        open_space(space)


def test_torch_waits_for_the_maker_of_memory_on_a_gpu_and_for_none_who_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[tuple[bytes, int]] = []

    class Shared:
        device = torch.device("cuda", 1)

        def untyped_storage(self) -> Any:
            return self

        def _share_cuda_(self) -> tuple[Any, ...]:
            return (1, b"memory", 512, 0, b"/torch_counters", 7, b"event", True)

    def release(handle: bytes, offset: int, device: Any) -> None:
        released.append((handle, offset))
        assert device == Shared.device

    monkeypatch.setattr(regions.torch.UntypedStorage, "_release_ipc_counter", release)
    monkeypatch.setattr(regions, "gpu_uuid", str)
    memory = regions.DeviceSpace(512, [])
    memory.tensors = [Shared()]
    for _ in range(2):
        [space] = memory.regions()
        opened = msgspec.msgpack.decode(space.handle)
        assert opened == [1, b"memory", 512, 0, b"/enginepool-uncounted", 0, b"event", True]
    memory.close()
    assert released == [(b"/torch_counters", 7)]
    memory.regions()
    del memory
    assert len(released) == 2, "memory that was dropped is given back too"


class Cudart:
    """Stands in for CUDA: what it is told to pin, and no more to pin, and whether memory is mapped there at that moment."""

    def __init__(self, refusal: int = 0) -> None:
        self.told: list[tuple[str, int, bool]] = []
        self._refusal = refusal

    def __call__(self) -> "Cudart":
        return self

    def cudaHostRegister(self, at: int, nbytes: int, flags: int) -> int:
        self.told.append((f"register {nbytes} {flags}", at, _mapped(at)))
        return self._refusal

    def cudaHostUnregister(self, at: int) -> None:
        self.told.append(("unregister", at, _mapped(at)))


def _mapped(at: int) -> bool:
    lines = Path("/proc/self/maps").read_text("ascii").splitlines()
    return any(int(line.split("-")[0], 16) <= at < int(line.split("-")[1].split()[0], 16) for line in lines)


def test_pinned_memory_is_given_back_to_cuda_while_it_is_still_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    memory = HostSpace(1 << 20, pinned=True)
    at = memory.tensors[0].data_ptr()
    del memory
    assert cudart.told == [("register 1048576 0", at, True), ("unregister", at, True)]
    HostSpace(1024)
    assert len(cudart.told) == 2


def test_host_memory_that_a_gpu_copies_from_is_pinned_where_it_is_opened_until_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the process that copies: what its maker has pinned is slow for others all the same."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    memory = HostSpace(8192)
    [space] = memory.regions()
    content = open_space(space, pinned=True)
    at = content.data_ptr()
    memory.tensors[0].fill_(7)
    assert int(content.sum()) == 7 * 8192
    view = content[4096:]
    del content
    assert cudart.told == [("register 8192 8", at, True)], "what refers to a part of it copies from there"
    del view
    assert cudart.told[1:] == [("unregister", at, True)]
    assert int(open_space(space).sum()) == 7 * 8192
    assert len(cudart.told) == 2, "the caller did not ask for that"


def test_host_memory_that_cuda_does_not_pin_is_opened_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cudart = Cudart(801)
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    cleared: list[str] = []

    def zeros(_size: int, device: str) -> None:
        cleared.append(device)

    monkeypatch.setattr(torch, "zeros", zeros)
    path = tmp_path / "snapshot"
    path.write_bytes(b"\x03" * 4096)
    content = open_space(MemoryRegion("file", 4096, path=str(path)), pinned=True)
    assert int(content.sum()) == 3 * 4096
    at = content.data_ptr()
    del content
    assert (cudart.told, cleared) == ([("register 4096 8", at, True)], ["cuda"])


def test_a_file_that_may_only_be_read_is_opened_without_being_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    path = tmp_path / "snapshot"
    path.write_bytes(b"\x03" * 4096)

    def refused(_path: str, _flags: int) -> int:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "open", refused)
    content = open_space(MemoryRegion("file", 4096, path=str(path)), pinned=True)
    assert int(content.sum()) == 3 * 4096
    assert cudart.told == []


@pytest.mark.parametrize("there", [True, False])
def test_memory_that_is_not_there_whole_is_not_made_by_opening_it(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "snapshot"
    if there:
        path.write_bytes(bytes(4095))
    with pytest.raises(RuntimeError):
        open_space(MemoryRegion("file", 4096, path=str(path)), pinned=True)
    assert path.exists() == there
    assert not there or path.stat().st_size == 4095


def test_memory_that_cuda_does_not_pin_is_used_as_it_is_and_no_other_call_gets_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA keeps the last error and reports it to the next kernel of any thread."""
    last: list[str] = []

    class Cudart:
        def cudaHostRegister(self, _at: int, _nbytes: int, _flags: int) -> int:
            last.append("out of memory")
            return 2

        def cudaHostUnregister(self, _at: int) -> None:
            raise AssertionError("what was not pinned cannot be given back")

    def zeros(_size: int, device: str) -> None:
        assert device == "cuda"
        if last:
            raise RuntimeError(f"CUDA error: {last.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch, "zeros", zeros)
    memory = HostSpace(1024, pinned=True)
    assert last == []
    memory.tensors[0].fill_(1)
    memory.__del__()


def test_a_seal_is_another_one_each_time_and_breaks_before_the_content_changes() -> None:
    memory = HostSpace(1024)
    content = memory.tensors[0]
    first = set_seal(content)
    assert sealed(content, first) and sealed(content, b"")
    break_seal(content)
    assert not sealed(content, first)
    assert set_seal(content) != first
    assert not sealed(content, first)


def test_memory_is_given_back_after_each_update_unless_it_is_kept() -> None:
    before = lent_here()

    def files() -> int:
        return len(lent_here() - before)

    buffers = Buffers(torch.device("cpu"))
    for keep in (False, True):
        lender = IpcExporter(buffers, keep=keep)
        places: set[str] = set()
        for _ in range(3):
            loan, _, space = lend(lender)
            assert files() == 1
            loan.end()
            assert files() == keep
            places.add(space.path)
        # Its path has the number of a file, which what else this process closes may change for memory that is new.
        assert not keep or len(places) == 1
        lender.close()
        assert files() == 0


def test_memory_for_which_the_file_system_has_no_room_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, refused = os.posix_fallocate, list[int]()

    def small(fd: int, at: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm/"):
            refused.append(fd)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", small)
    before = open_here()
    memory = HostSpace(1024)
    assert refused and len(open_here() - before) == 1
    memory.tensors[0].fill_(3)
    assert int(open_space(memory.regions()[0]).sum()) == 3 * 1024
    memory.close()
    assert open_here() <= before


def test_kept_memory_that_is_too_small_is_replaced() -> None:
    lender = IpcExporter(Buffers(torch.device("cpu")), keep=True)
    loan, _, small = lend(lender, {"a": torch.ones(10)})
    loan.end()
    loan, digest, large = lend(lender)
    assert large.nbytes > small.nbytes
    assert verified(open_space(large), make_plan(SOURCE).manifest)[0] == digest
    loan.end()
    loan, _, again = lend(lender, {"a": torch.ones(10)})
    assert again.nbytes == large.nbytes
    loan.end()
    lender.close()


def test_an_update_that_is_stuck_does_not_touch_what_the_next_one_lends() -> None:
    lender = IpcExporter(Buffers(torch.device("cpu")), keep=True)
    reached, opened = threading.Event(), threading.Event()

    def stuck() -> Iterator[tuple[str, Any]]:
        yield "a", torch.zeros(500)
        reached.set()
        assert opened.wait(60)
        yield "b", torch.zeros(500)

    plan = make_plan(stuck, manifest=[("a", torch.float32, (500,)), ("b", torch.float32, (500,))])
    old = IpcExport(lender)
    done: list[object] = []

    def run() -> None:
        done.append(old.fill(plan, bucket_bytes=256, ranks=TrainerRanks(), stopped=lambda: False, progress=lambda _: None))
        old.end()

    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(60)
    loan, digest, space = lend(lender)
    content = open_space(space)
    opened.set()
    thread.join(60)
    assert done
    assert verified(content, make_plan(SOURCE).manifest)[0] == digest and sealed(content, space.seal)
    loan.end()
    lender.close()


def test_other_trainer_ranks_hear_how_an_update_ended_though_its_memory_is_beyond_reach(
    lender: IpcExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []

    def lost(export: IpcExport) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(IpcExport, "end", lost)

    class Ranks(TrainerRanks):
        def end(self, outcome: Published | ErrorReply, again_s: float | None = None) -> None:
            said.append(outcome)

    class Reports:
        """What an update hears from its sender."""

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *what: said.append(what)

    def post(call: Callable[..., None], *what: object) -> None:
        call(*what)

    update: Any = Reports()
    context: Any = SimpleNamespace(post=post, buffers=lender.buffers, exporter=lender, bucket_bytes=512, collective_timeout=1.0)
    sender = UpdateSender(update, context, lambda: make_plan(SOURCE), Ranks(), ipc=True)
    outcome = ErrorReply("update_aborted", "as a test")
    sender.end(RoundEnd(outcome))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sender._run()  # pyright: ignore[reportPrivateUsage]
    assert said[1:] == [outcome, ()]


def test_what_is_wrong_with_the_content_is_found_where_it_is_opened(lender: IpcExporter) -> None:
    source = {**SOURCE, "c": torch.full((3, 50), float("nan")), "z": torch.zeros(4)}
    loan, _, space = lend(lender, source)
    _, findings = verified(open_space(space), make_plan(source).manifest)
    assert findings == [Finding("c", "nan", 150), Finding("z", "zero", 4)]
    loan.end()


def test_a_space_that_is_too_small_is_refused() -> None:
    memory = HostSpace(256)
    with pytest.raises(ValueError, match="a space of 256 bytes for 4608"):
        verified(open_space(memory.regions()[0]), make_plan({"a": torch.ones(1100)}).manifest)


def test_a_source_that_gives_something_else_and_one_that_is_given_up_lend_nothing(lender: IpcExporter) -> None:
    with pytest.raises(Stopped):
        lend(lender, stopped=lambda: True)
    plan = make_plan(iter([("a", torch.ones(3))]), manifest=[("a", torch.float32, (4,))])
    loan = IpcExport(lender)
    with pytest.raises(BadRequest, match="shape"):
        loan.fill(plan, bucket_bytes=256, ranks=TrainerRanks(), stopped=lambda: False, progress=lambda _: None)
    loan.end()


def test_a_gpu_that_is_not_visible_is_named() -> None:
    space = MemoryRegion("cuda", 256, handle=b"\x90", gpu="a-b")
    with pytest.raises(RuntimeError, match="GPU a-b is not visible here"):
        open_space(space)


def test_a_host_is_the_same_for_all_its_processes() -> None:
    code = "from enginepool.host import host_identity; print(host_identity())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == host_identity()
    boot, _, namespace = host_identity().partition("/")
    assert len(boot) == 36 and namespace.startswith("pid:")
    assert visible_gpus() == [] or torch.cuda.is_available()
