"""Weights that are saved in Redis: which URLs a group allows, and what its configuration may say."""

from pathlib import Path

import msgspec
import pytest

from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import check_config, resolve_roots
from enginepool.coordinator.weights.publish_validation import outside
from enginepool.errors import ConfigError
from enginepool.protocol.redis_url import parse_redis
from tests.core.machines import Pool, failures
from tests.core.test_control import answer, commands, reports
from tests.core.test_save_weights import save

ROOTS = ["/saved", "redis://models.example.com:6379/", "redis://10.0.0.1:7000/team"]


@pytest.mark.parametrize(
    "url",
    [
        "redis://models.example.com:6379/step-400",
        "redis://Models.Example.com:6379/a/b_c/v1.0",
        "redis://10.0.0.1:7000/team/step-4",
    ],
)
def test_a_model_under_a_server_or_a_folder_of_it_may_be_saved(url: str) -> None:
    assert outside(url, ROOTS, "save_roots") == ""


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://other.example.com:6379/a", "must lie under one of the group's save_roots: /saved, redis://models"),
        ("redis://models.example.com:6380/a", "must lie under"),
        ("redis://10.0.0.1:7000/teams/a", "must lie under"),
        ("redis://10.0.0.1:7000/team", "must lie under"),
        ("redis://10.0.0.1:7000/other", "must lie under"),
        ("redis://models.example.com:6379/", "must lie under"),
        ("redis://models.example.com:6379", "must lie under"),
        *(
            (f"redis://models.example.com:6379/{name}", "must be redis://HOST:PORT/NAME")
            for name in ("a*", "a?", "[a]", "a\\b", "a/../b", ".a", "a//b", "a/", "a b", "a\n", "ä", "a?b=1", "a#b", "a%2f")
        ),
        # SGLang would read the keys of the one as parts of the other.
        ("redis://models.example.com:6379/a/keys", "must be redis://"),
        ("redis://models.example.com:6379/a/files/b", "must be redis://"),
        ("redis://models.example.com/a", "must be redis://"),
        ("redis://models.example.com:0/a", "must be redis://"),
        ("redis://models.example.com:65536/a", "must be redis://"),
        ("redis://user@models.example.com:6379/a", "must be redis://"),
        ("redis://user:word@models.example.com:6379/a", "must be redis://"),
        ("redis://models.example.com:6379@elsewhere:1/a", "must be redis://"),
        ("REDIS://models.example.com:6379/a", "must be redis://"),
        ("rediss://models.example.com:6379/a", "must be absolute, or redis://"),
        ("s3://models/a", "must be absolute, or redis://"),
        ("redis:/models.example.com:6379/a", "must be absolute, or redis://"),
    ],
)  # fmt: skip
def test_any_other_url_may_not(url: str, why: str) -> None:
    assert outside(url, ROOTS, "save_roots").startswith(f"path: {url!r}: {why}")


def test_a_url_needs_a_root_of_redis_and_is_for_saving_alone() -> None:
    url = "redis://models.example.com:6379/a"
    assert outside(url, [], "save_roots").endswith("save_roots, and its configuration has none")
    assert "must lie under" in outside(url, ["/"], "save_roots")
    assert "must be absolute" in outside(url, [url], "checkpoint_roots")
    assert outside("/saved/a", ROOTS, "save_roots") == ""
    assert "must lie under" in outside("/redis://models.example.com:6379/a", ROOTS, "save_roots")


def test_a_worker_of_the_group_is_given_the_url_as_it_is() -> None:
    pool = Pool()
    for group in pool.machine.core.groups.values():
        group.config = msgspec.structs.replace(group.config, save_roots=ROOTS)
    pool.worker("w")
    [(link, command)] = commands(save(pool, "redis://models.example.com:6379/step-4")).items()
    assert (command.command, command.path) == ("save", "redis://models.example.com:6379/step-4")
    [report] = reports(answer(pool, link, command, "", "version 0: 9 keys"))
    assert [(row.name, row.message) for row in report.workers] == [("w", "version 0: 9 keys")]
    refused = failures(save(pool, "redis://elsewhere:6379/step-4"))[1]
    assert (refused.code, refused.field) == ("bad_request", "path")


def test_a_configuration_has_servers_of_redis_among_its_folders_and_nothing_else(tmp_path: Path) -> None:
    def group(*roots: str) -> PoolConfig:
        return PoolConfig(groups={"g": GroupConfig("m", engine="sim", save_roots=list(roots))})

    right = check_config(group(str(tmp_path), "redis://h:6379/", "redis://[::1]:6379", "redis://h:6379/team/"), where="c")
    roots = resolve_roots(right).groups["g"].save_roots
    assert roots == [str(tmp_path), "redis://h:6379/", "redis://[::1]:6379", "redis://h:6379/team/"]
    for wrong in ("redis://h/", "redis://", "redis://h:6379/a*", "redis://u@h:6379/", "rediss://h:6379/", "s3://bucket/", "a"):
        with pytest.raises(ConfigError, match=r"groups\.g\.save_roots\[1\] = .*: an absolute path .*, or redis://HOST:PORT/"):
            check_config(group("/a", wrong), where="c")
    reads = PoolConfig(groups={"g": GroupConfig("m", engine="sim", checkpoint_roots=["redis://h:6379/"])})
    with pytest.raises(ConfigError, match=r"checkpoint_roots\[0\]"):
        check_config(reads, where="c")


def test_hosts_are_compared_without_case_and_addresses_may_be_in_brackets() -> None:
    assert parse_redis("redis://[::1]:6379/a") == ("[::1]", 6379, ("a",))
    assert outside("redis://[::1]:6379/a", ["redis://[::1]:6379/"], "save_roots") == ""
    assert parse_redis("redis://H:6379/a/B") == ("h", 6379, ("a", "B"))
