"""Weights that are saved in Redis: the keys that SGLang reads, whole or not at all, and a Redis that ends or is silent."""

import asyncio
import importlib
import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool import Pool, errors
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.control import Command
from enginepool.protocol.redis_url import parse_redis
from enginepool.workers import redis_model
from enginepool.workers.engine import EngineError
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.engine_weights import LOST_WEIGHTS, NewWeights
from enginepool.workers.saving import WeightSaving
from enginepool.workers.sim.engine import SimEngine
from tests.process.commands import call
from tests.process.daemons import sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.redis_server import RedisServer, redis_server
from tests.process.test_flush import all_ready
from tests.process.test_restarts import checkpoint

OPTIONS = {"tensors": [["w", "float32", [20, 30]]]}


class Worker:
    """What saves the weights of a sim engine."""

    def __init__(self, root: str, folder: Path, model: str = "m") -> None:
        self._root = root
        self.engine = SimEngine(EngineSettings(model=model, options=OPTIONS))
        trained = folder / "trained"
        new = NewWeights(
            (Tensor("w", "float32", (20, 30)),), checkpoint=str(trained if trained.is_dir() else checkpoint(trained, 1))
        )
        asyncio.run(self.engine.weights.load_weights(new, 7, ""))
        self._saving = WeightSaving(self.engine, [root], "g", model)

    def save(self, name: str, number: int = 1) -> str:
        command = Command((1, number), "save", path=f"{self._root}{name}")
        return asyncio.run(asyncio.wait_for(self._saving.run(command), 60))


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def files(name: str, *others: str) -> set[str]:
    return {f"{name}/files/{file}" for file in ("enginepool.json", *others)}


def weights(name: str) -> set[str]:
    return {f"{name}/keys/rank_0/{tensor}" for tensor in ("w",)}


def test_the_keys_have_the_weights_and_the_texts_of_the_model_and_say_which_weights_they_are(
    redis: RedisServer, tmp_path: Path
) -> None:
    texts = {"config.json": "{}", "tokenizer.json": '"é"', "merges.txt": "a b\r\n"}
    for file, text in texts.items():
        (tmp_path / file).write_bytes(text.encode())
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xfe")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    worker = Worker(redis.root, tmp_path, str(tmp_path))
    said = worker.save("team/step-400")
    assert said == "version 7: 5 keys; without tokenizer.model, which SGLang reads from folders alone"
    assert redis.all_keys() == weights("team/step-400") | files("team/step-400", *texts)
    assert {file: redis.client.get(f"team/step-400/files/{file}").decode() for file in texts} == texts
    record = json.loads(redis.client.get("team/step-400/files/enginepool.json"))
    expected = {
        "group": "g",
        "model": str(tmp_path),
        "version": 7,
        "digest": worker.engine.weights.digest,
        "load_format": "remote",
    }
    assert record == expected
    assert len(redis.client.get("team/step-400/keys/rank_0/w")) == 2400


def test_what_was_started_from_redis_is_saved_with_its_files_from_there(redis: RedisServer, tmp_path: Path) -> None:
    redis.client.set("a/files/config.json", "{}")
    redis.client.set("a/files/enginepool.json", "old")
    redis.client.set("ab/files/other.json", "{}")
    worker = Worker(redis.root, tmp_path, f"{redis.root}a")
    assert worker.save("b") == "version 7: 3 keys"
    assert {key for key in redis.all_keys() if key.startswith("b/")} == weights("b") | files("b", "config.json")
    assert json.loads(redis.client.get("b/files/enginepool.json"))["model"] == f"{redis.root}a"


def test_a_name_that_has_keys_is_refused_and_left_as_it_is_and_another_one_that_begins_so_is_not(
    redis: RedisServer, tmp_path: Path
) -> None:
    for key in ("step-4/keys/rank_0/x", "text/files/config.json", "claimed/saving"):
        redis.client.set(key, "kept")
    worker, before = Worker(redis.root, tmp_path), redis.all_keys()
    cases = (("step-4", "exists already"), ("text", "exists already"), ("claimed", "is being saved, or its save was killed"))
    for number, (name, why) in enumerate(cases):
        with pytest.raises(EngineError, match=f"^{redis.root}{name}: {why}") as refused:
            worker.save(name, number)
        assert "\n" not in str(refused.value) and redis.all_keys() == before
    for number, name in enumerate(("step-40", "step", "step-4/a"), len(cases)):
        assert worker.save(name, number) == "version 7: 2 keys"
    assert redis.all_keys() == before.union(*(weights(name) | files(name) for name in ("step-40", "step", "step-4/a")))


def test_a_url_of_another_server_is_refused_by_the_worker_too(redis: RedisServer, tmp_path: Path) -> None:
    worker = WeightSaving(
        Worker(redis.root, tmp_path).engine, ["/saved", "redis://127.0.0.1:1/", f"{redis.root}team/"], "g", "m"
    )
    for number, path in enumerate((f"{redis.root}a", f"{redis.root}teams/a", f"{redis.root}team/a*", "/redis:/a")):
        with pytest.raises(EngineError, match="not under save_roots"):
            asyncio.run(worker.run(Command((1, number), "save", path=path)))
    assert not redis.all_keys()


def test_a_save_that_fails_leaves_no_key_and_the_next_one_succeeds(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = Worker(redis.root, tmp_path)
    real = worker.engine.weights.save

    async def fails(target: str) -> str:
        await real(target)
        assert weights("a") < redis.all_keys()
        raise EngineError("not saved: other weights were loaded meanwhile; save again")

    async def loses(target: str) -> str:
        """As a Redis does that starts again without what it had."""
        await real(target)
        redis.client.delete("a/saving", "a/keys/rank_0/w")
        return "remote"

    async def is_replaced(target: str) -> str:
        """By a whole model of another worker, after that."""
        await loses(target)
        redis.client.set("a/files/enginepool.json", "of another worker")
        return "remote"

    lost = "Redis has lost keys meanwhile"
    for number, (save, why) in enumerate(((fails, "other weights were loaded meanwhile"), (loses, lost), (is_replaced, lost))):
        monkeypatch.setattr(worker.engine.weights, "save", save)
        with pytest.raises(EngineError, match=why):
            worker.save("a", number)
        assert redis.all_keys() == (files("a") if save is is_replaced else set())
    redis.client.delete("a/files/enginepool.json")
    monkeypatch.setattr(worker.engine.weights, "save", real)
    worker.engine.weights.digest = LOST_WEIGHTS
    with pytest.raises(EngineError, match="the engine has no weights"):
        worker.save("a", 8)
    assert not redis.all_keys()
    worker.engine.weights.digest = ""
    assert worker.save("a", 9) == "version 7: 2 keys"


@pytest.mark.parametrize("last", ["/keys/rank_0/w", "/files/config.json", "/files/enginepool.json"])
def test_a_redis_that_ends_in_the_middle_ends_the_save_and_what_is_left_is_no_model(tmp_path: Path, last: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with redis_server(ends_with=last) as first:
        with pytest.raises(EngineError, match=r"^redis://127\.0\.0\.1:\d+/a: (Connection|Watch)Error: ") as failed:
            Worker(first.root, tmp_path, str(tmp_path)).save("a")
        assert "\n" not in str(failed.value)
    assert "a/saving" in first.all_keys() and "a/files/enginepool.json" not in first.all_keys()
    with redis_server(kept=first.kept) as again:
        worker = Worker(again.root, tmp_path, str(tmp_path))
        with pytest.raises(EngineError, match="its save was killed: use another name, or remove its keys"):
            worker.save("a")
        assert worker.save("b", 2) == "version 7: 3 keys"


def test_a_redis_that_refuses_or_is_silent_and_a_host_without_its_client_are_one_line_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(redis_model, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        root = f"redis://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(EngineError, match=f"^{root}a: TimeoutError: ") as late:
            Worker(root, tmp_path).save("a")
    with pytest.raises(EngineError, match=rf"^{root}a: ConnectionError: .*Connection refused") as refused:
        Worker(root, tmp_path).save("a")
    assert "\n" not in f"{late.value}{refused.value}"
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(EngineError, match=r"^the package redis is not installed on this host; install enginepool\[redis\]$"):
        Worker(root, tmp_path).save("a")


def test_an_engine_starts_from_a_complete_model_alone(redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    Worker(redis.root, tmp_path, str(tmp_path)).save("whole")
    redis.client.set("half/saving", "by another worker")
    redis.client.set("embeds/files/config.json", "{}")
    redis.client.set("embeds/files/modules.json", '[{"type": "sentence_transformers.models.Pooling"}]')
    redis.client.set("ranks/files/config.json", "{}")
    redis.client.set(
        "ranks/files/modules.json", '[{"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]'
    )
    cases = (
        ("whole", ""),
        ("ranks", ""),
        ("who", "there is no model: no key who/files/config.json"),
        ("half", "is not complete"),
        ("embeds", r"modules\.json names folders, which SGLang does not read from Redis"),
    )
    for name, why in cases:
        at = parse_redis(f"{redis.root}{name}")
        assert at is not None
        with pytest.raises(EngineError, match=why) if why else nullcontext():
            redis_model.refuse_incomplete(at)


def test_a_tensor_that_is_too_large_for_a_value_is_named(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    at = parse_redis(f"{redis.root}a")
    assert at is not None
    redis_model.refuse_large(at, {"w": 1 << 40})  # this one does not tell

    def config_get(_client: Any, name: str) -> dict[str, str]:
        return {name: "536870912"}

    monkeypatch.setattr(importlib.import_module("redis").Redis, "config_get", config_get)
    redis_model.refuse_large(at, {"w": 500 << 20})
    with pytest.raises(
        ValueError, match=r"^not saved: v has 629145600 bytes, and this Redis takes 536870912: raise its proto-"
    ):
        redis_model.refuse_large(at, {"w": 500 << 20, "v": 600 << 20})


def test_a_pool_saves_into_the_redis_that_its_group_allows(processes: Processes, redis: RedisServer, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, options=OPTIONS)
    group = msgspec.structs.replace(config.groups["g"], save_roots=[f"{redis.root}team/"], checkpoint_roots=[str(tmp_path)])
    daemon = ForkedDaemon(processes, msgspec.structs.replace(config, groups={"g": group})).listening()

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)
            await pool.publish_checkpoint(checkpoint(tmp_path / "trained", 1), 7)
            row = await pool.save_weights(f"{redis.root}team/step-1", worker="g-1")
            assert (row.name, row.message) == ("g-1", "version 7: 2 keys")
            with pytest.raises(errors.EngineFailed, match=r"g-\d: redis://.*/team/step-1: exists already"):
                await pool.save_weights(f"{redis.root}team/step-1")
            with pytest.raises(errors.BadRequest, match="save_roots") as refused:
                await pool.save_weights(f"{redis.root}step-1")
            assert refused.value.field == "path"

    asyncio.run(main())
    code, out, err = call("weights", "save", f"{redis.root}team/again", "--connect", daemon.address)
    assert (code, err) == (0, "") and re.fullmatch(r"g-\d: version 7: 2 keys\n", out)
    code, _, err = call("weights", "save", f"{redis.root}team/a*", "--connect", daemon.address)
    assert code == 2 and "redis://HOST:PORT/NAME" in " ".join(err.replace("│", " ").split())
    assert redis.all_keys() == {one for name in ("team/step-1", "team/again") for one in weights(name) | files(name)}
