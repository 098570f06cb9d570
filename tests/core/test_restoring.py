"""A worker's way back to the committed weights: which of engine, stager, snapshot and checkpoint it takes, and what it says."""

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weights import MemoryRegion, Restore, Restored
from enginepool.transfer.checksum import digest_of_bytes
from enginepool.workers.engine import EngineDied, EngineError, OnlyAtStart
from enginepool.workers.engine_weights import EngineWeights, NewWeights
from enginepool.workers.stager.link import StagerGone, StagerLink
from enginepool.workers.stager.messages import AskHeld, StagerHolds
from enginepool.workers.stager.snapshot import Footer, write_footer
from enginepool.workers.weights.checkpoint import checkpoint_tensors
from enginepool.workers.weights.restoring import restore

MANIFEST = [Tensor("a", "float32", (3,))]
NBYTES = layout(MANIFEST).nbytes
DIGEST, OTHER = "d" * 32, "e" * 32
SPACES = [MemoryRegion("file", NBYTES, path="/of/the/stager")]


class FakeEngine:
    """Notes what it takes; a checkpoint's digest is what the test says."""

    def __init__(self, digest: str = "", *, checkpoint: str = "", fails: Mapping[str, str] = MappingProxyType({})) -> None:
        """`fails`: the paths of regions that it cannot take, and why."""
        self.digest, self.version = digest, 1
        self.took: list[tuple[NewWeights, int, str]] = []
        self._checkpoint, self._fails = checkpoint, fails

    async def load_weights(self, weights: NewWeights, version: int, digest: str) -> None:
        self.took.append((weights, version, digest))
        for space in weights.regions:
            if space.path in self._fails:
                raise EngineError(self._fails[space.path])
        self.version, self.digest = version, self._checkpoint if weights.checkpoint else digest


class FakeStager:
    """Holds this, or is gone."""

    def __init__(self, held: StagerHolds | None) -> None:
        self._held = held
        self.asked: list[str] = []

    async def ask(self, message: AskHeld, _kind: type[StagerHolds]) -> StagerHolds:
        self.asked.append(message.digest)
        if self._held is None:
            raise StagerGone("no stager here")
        return self._held


HOLDS = StagerHolds(3, DIGEST, MANIFEST, SPACES)


def restored(engine: FakeEngine, held: StagerHolds | None, message: Restore) -> Restored:
    """The answer; without a code the engine has the weights."""
    stager = FakeStager(held)
    answer = asyncio.run(restore(cast(EngineWeights, engine), cast(StagerLink, stager), message, ["/"]))
    assert stager.asked in ([], [message.digest])
    assert answer.version == message.version and answer.code in ("", "needs_weights")
    if not answer.code:
        assert (message.version, message.digest) == (engine.version, engine.digest)
    return answer


def refusal(engine: FakeEngine, held: StagerHolds | None, message: Restore) -> str:
    answer = restored(engine, held, message)
    assert answer.code
    return answer.message


def snapshot(path: Path) -> tuple[str, str]:
    """A snapshot of drawn weights: where it is, and their digest."""
    space = os.urandom(NBYTES)
    digest = digest_of_bytes(np.frombuffer(space, np.uint8))
    path.write_bytes(space)
    with path.open("r+b") as file:
        write_footer(file.fileno(), NBYTES, Footer(3, digest, MANIFEST))
    return str(path), digest


def test_an_engine_that_has_them_under_another_version_is_told_its_name_and_no_publisher_is_asked() -> None:
    engine = FakeEngine(DIGEST)
    assert restored(engine, None, Restore(3, DIGEST)).code == ""
    assert engine.took == [(NewWeights(), 3, DIGEST)]


def test_only_a_new_engine_has_the_weights_that_it_started_with() -> None:
    engine = FakeEngine(OTHER)
    with pytest.raises(EngineDied, match="starts with them again"):
        restored(engine, HOLDS, Restore(0, ""))
    assert not engine.took


def test_an_engine_that_takes_weights_only_at_its_start_is_started_again_for_a_checkpoint_alone() -> None:
    """For others it would be started again and again."""

    class AtStart(FakeEngine):
        async def load_weights(self, weights: NewWeights, version: int, digest: str) -> None:
            raise OnlyAtStart("this engine takes weights only at its start")

    assert "publish a checkpoint" in refusal(AtStart(OTHER), HOLDS, Restore(3, DIGEST))
    with pytest.raises(EngineDied, match="other weights are committed"):
        restored(AtStart(OTHER), HOLDS, Restore(3, DIGEST, path="/checkpoints/3"))


def test_what_the_stager_holds_comes_before_any_file(tmp_path: Path) -> None:
    engine = FakeEngine(OTHER)
    message = Restore(3, DIGEST, snapshot(tmp_path / "g")[0], str(tmp_path))
    assert restored(engine, HOLDS, message).code == ""
    assert engine.took == [(NewWeights(tuple(MANIFEST), tuple(SPACES)), 3, DIGEST)]


@pytest.mark.parametrize(
    "held", [None, StagerHolds(), StagerHolds(2, OTHER, MANIFEST, SPACES)], ids=["gone", "nothing", "others"]
)
def test_a_snapshot_comes_before_a_checkpoint(tmp_path: Path, held: StagerHolds | None) -> None:
    path, digest = snapshot(tmp_path / "g")
    engine = FakeEngine(OTHER)
    assert restored(engine, held, Restore(3, digest, path, str(tmp_path))).code == ""
    assert engine.took == [(NewWeights(tuple(MANIFEST), (MemoryRegion("file", NBYTES, path=path),)), 3, digest)]


def test_a_checkpoint_is_believed_when_the_engine_has_read_it(tmp_path: Path) -> None:
    """It has no digest until a worker reports one."""
    make_tiny_model(tmp_path)
    path = str(tmp_path)
    loaded = NewWeights(tuple(checkpoint_tensors(path)), checkpoint=path)
    engine = FakeEngine(OTHER, checkpoint=DIGEST)
    assert restored(engine, None, Restore(3, DIGEST, path=path)).code == ""
    assert engine.took == [(loaded, 3, "")]
    engine = FakeEngine(OTHER, checkpoint="f" * 32)
    assert f"{path} no longer holds the committed weights" in refusal(engine, None, Restore(3, DIGEST, path=path))
    assert engine.took == [(loaded, 3, ""), (NewWeights(), 0, "f" * 32)], "what is loaded is no committed version"
    assert (engine.version, engine.digest) == (0, "f" * 32)


@pytest.mark.parametrize("held", [None, StagerHolds(2, OTHER, MANIFEST, SPACES)], ids=["gone", "others"])
def test_a_snapshot_that_others_could_have_put_there_is_not_opened_and_the_checkpoint_serves(
    tmp_path: Path, held: StagerHolds | None
) -> None:
    """Its name can be foreseen, and so can be its digest, which is a checksum."""
    forged = tmp_path / "enginepool-0123456789ab"
    forged.mkdir()
    path, digest = snapshot(forged / f"g-{DIGEST}")
    make_tiny_model(tmp_path)
    for mode in (0o755, 0o777, 0o1777):
        forged.chmod(mode)
        engine = FakeEngine(OTHER, checkpoint=digest)
        assert restored(engine, held, Restore(3, digest, path, str(tmp_path))).code == ""
        assert [weights.checkpoint for weights, _, _ in engine.took] == [str(tmp_path)]
        said = refusal(FakeEngine(OTHER), held, Restore(3, digest, path)).split("; ")[1]
        advice = "name a directory of your own" if mode & stat.S_ISVTX else "chmod 700 it"
        assert said == f"the snapshot in {forged}: others can enter {forged} (mode {mode:04o}): {advice}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which can give a folder to another user")
@pytest.mark.parametrize("way", ["folder", "link"])
def test_a_snapshot_in_a_folder_or_behind_a_link_of_another_user_is_not_opened(tmp_path: Path, way: str) -> None:
    forged = tmp_path / "enginepool-0123456789ab"
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    if way == "link":
        forged.symlink_to(real)
    else:
        forged.mkdir(mode=0o700)
    path, digest = snapshot(forged / f"g-{DIGEST}")
    os.chown(forged, 12345, 12345, follow_symlinks=False)
    engine = FakeEngine(OTHER)
    said = refusal(engine, None, Restore(3, digest, path))
    assert said.endswith("belongs to another user") and str(forged) in said
    assert not engine.took


def test_what_is_said_of_a_snapshot_names_no_digest(tmp_path: Path) -> None:
    for path in (tmp_path / f"g-{DIGEST}", tmp_path / "gone" / f"g-{DIGEST}"):
        said = refusal(FakeEngine(OTHER), None, Restore(3, DIGEST, str(path)))
        assert said == f"no stager here; the snapshot in {path.parent}: No such file or directory"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (None, "no stager here"),
        (StagerHolds(), "the stager holds nothing"),
        (StagerHolds(2, OTHER), "the stager holds version 2"),
    ],
)
def test_all_that_was_tried_is_said(tmp_path: Path, held: StagerHolds | None, said: str) -> None:
    path, _ = snapshot(tmp_path / "g")
    nowhere = str(tmp_path / "nowhere")
    engine = FakeEngine(OTHER)
    assert refusal(engine, held, Restore(3, DIGEST)) == said
    assert refusal(engine, held, Restore(3, DIGEST, f"{nowhere}-g", nowhere)).split("; ") == [
        said,
        f"the snapshot in {tmp_path}: No such file or directory",
        f"{nowhere}: there is no such directory here",
    ]
    wrong = f"the snapshot in {tmp_path}: its digest is not that of the committed weights"
    assert refusal(engine, held, Restore(3, DIGEST, path)) == f"{said}; {wrong}"
    assert not engine.took


def test_what_the_engine_refuses_from_one_it_is_given_from_the_next(tmp_path: Path) -> None:
    """A stager may hold them in memory that the engine cannot reach."""
    path, digest = snapshot(tmp_path / "g")
    stager, saved = SPACES[0].path, f"the engine cannot open {path}"
    held = StagerHolds(3, digest, MANIFEST, SPACES)
    engine = FakeEngine(OTHER, fails={stager: "the engine cannot reach it"})
    assert restored(engine, held, Restore(3, digest, path)).code == ""
    assert [weights.regions[0].path for weights, _, _ in engine.took] == [stager, path]
    make_tiny_model(tmp_path)
    engine = FakeEngine(OTHER, checkpoint=digest, fails={stager: "the engine cannot reach it", path: saved})
    assert restored(engine, held, Restore(3, digest, path, str(tmp_path))).code == ""
    assert [weights.checkpoint for weights, _, _ in engine.took] == ["", "", str(tmp_path)]
    engine = FakeEngine(OTHER, fails={stager: "the engine cannot reach it", path: saved})
    saved = f"the engine cannot open the snapshot in {tmp_path}"
    assert refusal(engine, held, Restore(3, digest, path)) == f"the engine cannot reach it; {saved}"
    assert engine.digest == OTHER
