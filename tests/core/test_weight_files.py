"""Weights in files: checkpoints and snapshots are read without torch, and what is not one is refused by name."""

import asyncio
import errno
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.host import SPARE_BYTES, unnamed_file
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.transfer.digest import digest_of
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.loop import WorkerProcess, wants_room
from enginepool.workers.main import started_on
from enginepool.workers.saving import RECORD
from enginepool.workers.sglang.host.build import prepare
from enginepool.workers.sglang.host.model_size import UnknownSize, model_bytes, model_config, quantized
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sim.scores import expected_scores
from enginepool.workers.spec import WorkerSpec
from enginepool.workers.stager.snapshot import (
    Footer,
    SnapshotError,
    copy_snapshot,
    digest_of_bytes,
    digest_of_file,
    name_snapshot,
    read_footer,
    remove_older,
    write_footer,
)
from enginepool.workers.weights.checkpoint import CheckpointError, checkpoint_space, checkpoint_tensors, refuse_damaged

torch: Any = importlib.import_module("torch")
safetensors: Any = importlib.import_module("safetensors.numpy")

MANIFEST = [Tensor("a", "float32", (100,)), Tensor("b", "int8", (7,))]
NBYTES = layout(MANIFEST).nbytes


def saved(path: Path, version: int = 1, digest: str = "0" * 32) -> bytes:
    """A snapshot, made as a stager does; its space."""
    space = random.Random(version).randbytes(NBYTES)
    fd = unnamed_file(path.parent)
    os.pwrite(fd, space, 0)
    write_footer(fd, NBYTES, Footer(version, digest, MANIFEST))
    name_snapshot(fd, str(path))
    os.close(fd)
    return space


def test_the_digest_without_torch_is_that_with_it() -> None:
    for nbytes in (256, 1 << 20, (16 << 20) + 512):
        drawn = np.frombuffer(random.Random(nbytes).randbytes(nbytes), np.uint8)
        smallest = np.full(nbytes // 4, -(1 << 31), np.int32).view(np.uint8)
        for data in (drawn, smallest):
            assert digest_of_bytes(data) == digest_of(torch.from_numpy(data.copy()))


def test_a_snapshot_says_what_it_holds_and_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "g-1"
    space = saved(path, 3, "f" * 32)
    assert read_footer(str(path)) == Footer(3, "f" * 32, MANIFEST)
    assert digest_of_file(str(path), NBYTES) == digest_of_bytes(np.frombuffer(space, np.uint8))
    fd = os.open(path, os.O_RDONLY)
    other = tmp_path / "elsewhere" / "g-1"
    other.parent.mkdir()
    copy_snapshot(fd, str(other))
    copy_snapshot(fd, str(other))  # it is there: fine
    os.close(fd)
    assert other.read_bytes() == path.read_bytes()
    assert os.listdir(other.parent) == ["g-1"]


def test_a_copy_that_would_fill_the_memory_of_the_host_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines answer there, and end where they cannot."""
    saved(tmp_path / "g-1")
    fd = os.open(tmp_path / "g-1", os.O_RDONLY)
    free = os.fstat(fd).st_size + SPARE_BYTES - 1

    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=free, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(OSError, match="No space left"):
        copy_snapshot(fd, str(tmp_path / "there"))
    assert os.listdir(tmp_path) == ["g-1"]
    free += 1
    copy_snapshot(fd, str(tmp_path / "there"))
    assert sorted(os.listdir(tmp_path)) == ["g-1", "there"]
    os.close(fd)


def test_two_stagers_with_the_same_pid_copy_a_snapshot_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two containers, say: neither writes to the other one's file, of which the pid is a part."""
    saved(tmp_path / "g-1")
    fd, target, flush, seen = os.open(tmp_path / "g-1", os.O_RDONLY), tmp_path / "there", os.fsync, list[bool]()

    def copy_meanwhile(copy: int) -> None:
        monkeypatch.setattr(os, "fsync", flush)
        copy_snapshot(fd, str(target))
        seen.append(os.path.samestat(os.fstat(copy), os.stat(target)))

    monkeypatch.setattr(os, "fsync", copy_meanwhile)
    copy_snapshot(fd, str(target))
    os.close(fd)
    assert seen == [False]
    assert target.read_bytes() == (tmp_path / "g-1").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["g-1", "there"]


def test_a_footer_that_the_system_takes_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[:100], at))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    fd = unnamed_file(tmp_path)
    write_footer(fd, NBYTES, Footer(3, "f" * 32, MANIFEST))
    name_snapshot(fd, str(tmp_path / "g-1"))
    os.close(fd)
    assert read_footer(str(tmp_path / "g-1")) == Footer(3, "f" * 32, MANIFEST)


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "g-1"
    saved(path)
    whole = path.read_bytes()
    for name, data in {"cut": whole[:-1], "empty": b"", "short": whole[256:], "foreign": b"x" * 10_000}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SnapshotError, match=name):
            read_footer(str(tmp_path / name))
    with pytest.raises(SnapshotError, match="No such file"):
        read_footer(str(tmp_path / "gone"))


def test_only_older_snapshots_of_the_same_group_are_removed(tmp_path: Path) -> None:
    names = {f"g-{i:032x}": i for i in (1, 2, 3)}
    for name, version in names.items():
        saved(tmp_path / name, version)
    saved(tmp_path / f"g-h-{1:032x}", 1)
    (tmp_path / "g-notes").write_text("kept")
    remove_older(str(tmp_path / f"g-{2:032x}"))
    assert sorted(os.listdir(tmp_path)) == sorted([f"g-{2:032x}", f"g-{3:032x}", f"g-h-{1:032x}", "g-notes"])


def test_a_snapshot_of_a_new_run_removes_those_of_the_runs_before_and_is_removed_by_none_of_them(tmp_path: Path) -> None:
    """Versions begin again with a run: the last snapshot of the one before must not stay in memory until they have come by."""
    old, first, second = (tmp_path / name for name in (f"g-{9:032x}", f"g+1-{1:032x}", f"g+1-{2:032x}"))
    saved(old, 1000)
    saved(first, 1)
    remove_older(str(old))
    assert first.exists()
    remove_older(str(first))
    assert sorted(tmp_path.iterdir()) == [first]
    saved(second, 2)
    saved(tmp_path / f"g+10-{1:032x}", 1)
    remove_older(str(second))
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / f"g+10-{1:032x}", second])


def test_half_a_snapshot_of_a_stager_that_died_is_removed_with_the_next_one(tmp_path: Path) -> None:
    """Where files cannot be without a name, as on NFS."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    half, mine = (tmp_path / f"g-{1:032x}.{pid}" for pid in (dead.pid, os.getpid()))
    half.write_bytes(b"half")
    mine.write_bytes(b"being written")
    saved(tmp_path / f"g-{2:032x}", 2)
    remove_older(str(tmp_path / f"g-{2:032x}"))
    assert sorted(os.listdir(tmp_path)) == sorted([mine.name, f"g-{2:032x}"])


def test_a_checkpoint_is_read_from_its_headers_in_the_order_of_its_bytes(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    tensors = checkpoint_tensors(str(model))
    loaded = safetensors.load_file(str(model / "model.safetensors"))
    assert {(one.name, one.dtype, one.shape) for one in tensors} == {
        (name, "float32", array.shape) for name, array in loaded.items()
    }
    space = checkpoint_space(str(model))
    for tensor, at in zip(tensors, layout(tensors).offsets, strict=True):
        assert space[at : at + tensor.nbytes] == loaded[tensor.name].tobytes()
    assert len(space) == layout(tensors).nbytes


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        checkpoint_tensors(str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="no safetensors files"):
        checkpoint_tensors(str(tmp_path))
    model = make_tiny_model(tmp_path / "model")
    file = model / "model.safetensors"
    whole = file.read_bytes()
    (model / "second.safetensors").write_bytes(whole)
    with pytest.raises(CheckpointError, match="is in another file too"):
        checkpoint_tensors(str(model))
    (model / "second.safetensors").unlink()
    for data, why in ((whole[:-4], "truncated"), (b"\xff" * 64, "not a safetensors file"), (b"", "not a safetensors file")):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=why):
            checkpoint_tensors(str(model))
    odd = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}'
    for header in (b"[]", b"null", b"[" * 100_000, odd):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            checkpoint_tensors(str(model))


@pytest.mark.parametrize("cut", [4, 100_000])
def test_an_engine_is_not_started_on_a_truncated_file_which_is_named(tmp_path: Path, cut: int) -> None:
    file = make_tiny_model(tmp_path) / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - cut)
    with pytest.raises(SettingsError, match=rf"^{file}: truncated: {size - cut} bytes, but its header says {size}$"):
        prepare(EngineSettings(model=str(tmp_path), device="cpu"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    refuse_damaged(tmp_path)  # a file that the index does not name is not loaded
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match="truncated"):
        refuse_damaged(tmp_path)


def test_files_that_the_load_format_does_not_read_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    os.truncate(make_tiny_model(tmp_path) / "model.safetensors", 4)
    with pytest.raises(SettingsError, match="not a safetensors file"):
        prepare(EngineSettings(model=str(tmp_path), device="cuda", options={"load_format": "safetensors"}))
    with pytest.raises(SettingsError, match="the device is cuda"):  # what is looked at next
        prepare(EngineSettings(model=str(tmp_path), device="cuda", options={"load_format": "dummy"}))


def test_an_engine_that_would_read_saved_weights_in_another_form_is_told_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    record = make_tiny_model(tmp_path) / RECORD
    record.write_text('{"load_format": "sharded_state"}')
    with pytest.raises(SettingsError, match=r"load_format='auto' is refused: .* as 'sharded_state'$"):
        prepare(EngineSettings(model=str(tmp_path), device="cuda"))
    with pytest.raises(SettingsError, match="the device is cuda"):  # what is looked at next
        prepare(EngineSettings(model=str(tmp_path), device="cuda", options={"load_format": "sharded_state"}))
    for other in ("[]", "{}", "{"):
        record.write_text(other)
        with pytest.raises(SettingsError, match="the device is cuda"):
            prepare(EngineSettings(model=str(tmp_path), device="cuda"))


def test_a_checkpoint_s_path_that_no_directory_can_have_here_is_refused_and_harms_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, why in (
        (f"/{'a' * 300}", "File name too long"),
        ("~no-such-user-here/model", "home directory"),
        ("/a\0b", "no such directory"),
    ):
        with pytest.raises(CheckpointError, match=why):
            checkpoint_tensors(path)

    def forbidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", forbidden)  # what it raises where a directory above may not be entered
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint_tensors(str(tmp_path))


def test_sim_scores_depend_on_the_digest_of_the_weights() -> None:
    def scores(digest: str) -> Any:
        return expected_scores([1], [[2], [3]], labels=[4], version=1, digest=digest)["scores"]

    assert np.array_equal(scores(""), scores("0" * 32))
    assert not np.array_equal(scores("1" + "0" * 31), scores(""))
    assert not np.array_equal(scores("0" * 31 + "1"), scores(""))
    assert not np.array_equal(scores("0" * 31 + "1"), scores("0" * 31 + "2"))


def test_an_engine_that_starts_on_a_checkpoint_is_told_of_which_model_it_is() -> None:
    """Its folder may not say what the model's does, such as how an embedding model pools."""
    plain = WorkerSpec(endpoint="ipc://x", group="g", incarnation="w", engine="sim", model="m")
    assert started_on(plain) is plain
    found = started_on(msgspec.structs.replace(plain, checkpoint="/checkpoints/7"))
    assert (found.model, found.origin) == ("/checkpoints/7", "m")


def test_memory_for_staged_updates_is_kept_where_it_is_wanted() -> None:
    def wanted(engine: str = "sglang", stager: str = "/run/stager", *, staged: bool = True, **setting: Any) -> bool:
        names: dict[str, Any] = {"endpoint": "ipc://x", "group": "g", "incarnation": "w", "model": "m"}
        return wants_room(WorkerSpec(**names, engine=engine, stager=stager, **setting), staged=staged)

    assert wanted() and not wanted(staged=False), "from the first staged update on"
    assert wanted(staged=False, reserve_staging=True) and not wanted(reserve_staging=False)
    assert not wanted(engine="sim") and not wanted(stager="")


def test_a_quantized_model_is_told_by_its_options_or_its_configuration(tmp_path: Path) -> None:
    """Its engine takes weights only at its start, so that no memory is kept for staged updates."""
    assert quantized({"quantization": "fp8"}, {}) and quantized({}, {"quantization_config": {"quant_method": "awq"}})
    for options, config in (({}, {}), ({"quantization": None}, {"quantization_config": None}), ({"tp_size": 2}, {"a": 1})):
        assert not quantized(options, config)
    assert model_config(str(tmp_path)) == {}
    for text in ("[]", "no JSON"):
        (tmp_path / "config.json").write_text(text)
        assert model_config(str(tmp_path)) == {}
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    assert quantized({}, model_config(str(tmp_path)))


@pytest.mark.parametrize(("options", "config", "reserved"), [({}, "{}", True), ({"quantization": "fp8"}, "{}", False)])
def test_a_quantized_model_reserves_no_memory(tmp_path: Path, options: dict[str, Any], config: str, reserved: bool) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    asked: list[int] = []

    async def make_room(nbytes: int) -> str:
        asked.append(nbytes)
        return ""

    worker: Any = WorkerProcess.__new__(WorkerProcess)
    worker.spec = WorkerSpec(
        endpoint="ipc://x", group="g", incarnation="w", model=str(tmp_path), engine="sglang", options=options
    )
    worker.weights = SimpleNamespace(make_room=make_room)
    asyncio.run(worker._make_room())
    assert bool(asked) == reserved


def test_the_size_of_a_model_in_a_folder_is_that_of_its_weights(tmp_path: Path) -> None:
    with pytest.raises(UnknownSize, match="no safetensors files"):
        model_bytes(str(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "b.safetensors").write_bytes(bytes(2_000_000))
    (tmp_path / "tokenizer.json").write_bytes(bytes(4_000_000))
    assert 5_000_000 <= model_bytes(str(tmp_path)) < 7_000_000
