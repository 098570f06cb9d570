"""Which GPUs are visible here, and which of them each worker gets."""

from pathlib import Path
from typing import Any

import pytest

from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import check_config
from enginepool.coordinator.launchers.gpus import allocate_gpus, visible_gpus
from enginepool.errors import ConfigError

#: what lies next to the GPUs' own files
OTHERS = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps", "null")


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], []),
        ([0], ["0"]),
        ([4], ["0"]),
        ([0, 1, 10, 2], ["0", "1", "2", "3"]),
        ([3, 12], ["0", "1"]),
    ],
)
def test_gpus_are_counted_from_0_for_any_numbers_on_the_host(
    numbers: list[int], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in (*OTHERS, *(f"nvidia{number}" for number in numbers)):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == expected


def test_a_host_without_device_files_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path / "dev") == []


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("", []),
        ("-1", []),
        ("4", ["4"]),
        ("3, 1", ["3", "1"]),
        ("2,-1,3", ["2"]),
        ("GPU-8932f937,MIG-3eb8", ["GPU-8932f937", "MIG-3eb8"]),
    ],
)
def test_gpus_that_are_named_are_taken_as_they_are(
    named: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus(tmp_path) == expected


def group(workers: int = 1, **settings: Any) -> GroupConfig:
    return GroupConfig(model="m", workers=workers, **settings)


def pair(workers: int = 1, **settings: Any) -> GroupConfig:
    return group(workers, options={"tp_size": 2}, **settings)


FOUR = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("groups", "visible", "expected"),
    [
        ({"a": group(2), "b": group(1)}, FOUR, {"a": ["0", "1"], "b": ["2"]}),
        ({"a": pair(2)}, FOUR, {"a": ["0,1", "2,3"]}),
        ({"a": group(1), "b": pair(1), "c": group(1)}, FOUR, {"a": ["0"], "b": ["1,2"], "c": ["3"]}),
        ({"a": group(1, options={"tp_size": 2, "pp_size": 2})}, FOUR, {"a": ["0,1,2,3"]}),
        ({"a": group(1, options={"tp_size": 2, "dp_size": 2})}, FOUR, {"a": ["0,1,2,3"]}),
        ({"a": group(1, options={"tp_size": 2, "dp_size": 2, "enable_dp_attention": True})}, FOUR, {"a": ["0,1"]}),
        ({"a": group(1, options={"tp_size": None})}, FOUR, {"a": ["0"]}),
        ({"a": pair(1)}, ["GPU-5f", "GPU-1a"], {"a": ["GPU-5f,GPU-1a"]}),
        ({"a": group(2)}, ["5", "2"], {"a": ["5", "2"]}),
        # What is named is not given again, wherever its group stands.
        ({"a": group(2), "b": group(1, gpus=["1"])}, FOUR, {"a": ["0", "2"], "b": ["1"]}),
        ({"a": group(1), "b": pair(1, gpus=["0, 3"])}, FOUR, {"a": ["1"], "b": ["0, 3"]}),
        ({"a": group(1), "b": group(1, gpus=["GPU-5f"])}, ["GPU-5f29", "GPU-1a00"], {"a": ["GPU-1a00"], "b": ["GPU-5f"]}),
        # A shared GPU is shared because it is named twice.
        ({"a": group(2, gpus=["0", "0"]), "b": group(1, gpus=["0"])}, ["0"], {"a": ["0", "0"], "b": ["0"]}),
        # Engines on the CPU and simulated ones take none; nor do workers that another program starts.
        ({"a": group(9, device="cpu"), "b": group(9, engine="sim"), "c": group(0), "d": group(1)}, ["0"], {"d": ["0"]}),
        ({"a": group(2, engine="sim", gpus=["0", "1"]), "b": group(1)}, ["0"], {"a": ["0", "1"], "b": ["0"]}),
        # Nothing is known of GPUs: workers see what CUDA finds.
        ({"a": pair(9), "b": group(1, gpus=["7"])}, [], {"b": ["7"]}),
        # No group needs what could be one of them under another name.
        ({"a": group(1, gpus=["MIG-3eb8"])}, ["0"], {"a": ["MIG-3eb8"]}),
    ],
)
def test_each_worker_gets_as_many_gpus_as_its_engine_needs_and_none_twice(
    groups: dict[str, GroupConfig], visible: list[str], expected: dict[str, list[str]]
) -> None:
    assert allocate_gpus(groups, visible) == expected


@pytest.mark.parametrize(
    ("groups", "used", "expected"),
    [
        # A group before has one worker more than when the workers were started.
        ({"a": group(2), "b": group(1)}, {("a", 0): "0", ("b", 0): "1"}, {"a": ["0", "2"], "b": ["1"]}),
        ({"b": pair(1), "a": group(2)}, {("a", 0): "0", ("a", 1): "2"}, {"b": ["1,3"], "a": ["0", "2"]}),
        # It is not what the engine needs now, or a group names it, or it is there no more.
        ({"a": pair(1), "b": group(1)}, {("a", 0): "1"}, {"a": ["0,1"], "b": ["2"]}),
        ({"a": group(1), "b": group(1, gpus=["2"])}, {("a", 0): "2"}, {"a": ["0"], "b": ["2"]}),
        ({"a": group(1)}, {("a", 0): "7"}, {"a": ["0"]}),
        ({"a": group(1)}, {("a", 0): "", ("a", 3): "0", ("c", 0): "0"}, {"a": ["0"]}),
        ({"a": group(1, gpus=["3"])}, {("a", 0): "0"}, {"a": ["3"]}),
    ],
)
def test_workers_that_run_keep_their_gpus(
    groups: dict[str, GroupConfig], used: dict[tuple[str, int], str], expected: dict[str, list[str]]
) -> None:
    assert allocate_gpus(groups, FOUR, used) == expected


@pytest.mark.parametrize(
    ("groups", "visible", "line"),
    [
        (
            {"a": group(1), "b": pair(2)},
            FOUR,
            "groups: a: 1 worker x 1, b: 2 workers x 2 need 5 GPUs, and of 4 visible here (0, 1, 2, 3) 4 are present",
        ),
        ({"a": group(2)}, ["0"], "groups: a: 2 workers x 1 need 2 GPUs, and of 1 visible here (0) 1 are present"),
        ({"a": group(2), "b": group(1, gpus=["1"])}, ["0", "1"], "(0, 1) 1 are left after those that gpus names"),
        ({"a": group(1, gpus=["4"])}, FOUR, "groups.a.gpus = ['4']: GPU '4' is none of the 4 visible here (0, 1, 2, 3)"),
        ({"a": group(1, gpus=["0"])}, ["4", "5"], "groups.a.gpus = ['0']: GPU '0' is none of the 2 visible here (4, 5)"),
        # It may be the very GPU that b would get.
        ({"a": group(1, gpus=["GPU-5f"]), "b": group(1)}, FOUR, "groups.a.gpus = ['GPU-5f']: GPU 'GPU-5f' is none of"),
    ],
)
def test_more_gpus_than_there_are_is_refused_with_the_numbers(
    groups: dict[str, GroupConfig], visible: list[str], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        allocate_gpus(groups, visible)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (pair(1, gpus=["0"]), "groups.a.gpus[0] = '0': a worker with options.tp_size = 2 sees 2 GPUs, separated by commas"),
        (pair(2, gpus=["0,1", "2,3,4"]), "groups.a.gpus[1] = '2,3,4': a worker with options.tp_size = 2 sees 2 GPUs"),
        (pair(1, gpus=["0,0"]), "groups.a.gpus[0] = '0,0': a worker with options.tp_size = 2 sees 2 GPUs"),
        (
            group(1, gpus=["0"], options={"tp_size": 2, "dp_size": 2}),
            "a worker with options.tp_size = 2, dp_size = 2 sees 4 GPUs",
        ),
        (group(1, gpus=["0,1"]), "groups.a.gpus[0] = '0,1': a worker sees 1 GPU"),
        (group(1, gpus=[""]), "groups.a.gpus[0] = '': a worker sees 1 GPU"),
        (group(1, options={"tp_size": "2"}), "groups.a.options.tp_size = '2': a whole number, 1 to 4096"),
        (group(1, options={"pp_size": 0}), "groups.a.options.pp_size = 0: a whole number, 1 to 4096"),
        (group(1, options={"tp_size": True}), "groups.a.options.tp_size = True: a whole number, 1 to 4096"),
    ],
)
def test_named_gpus_are_as_many_as_the_engine_needs(wrong: GroupConfig, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(PoolConfig(groups={"a": wrong}), where="test")
    assert line in str(caught.value)


def test_gpus_of_an_engine_that_uses_none_may_be_named() -> None:
    config = PoolConfig(groups={"a": group(1, engine="sim", gpus=["0,1"], options={"tp_size": "none"})})
    assert check_config(config, where="test") is config


def test_a_gpu_that_is_visible_twice_is_that_of_two_workers_also_after_a_restart() -> None:
    groups = {"g": GroupConfig(model="m", workers=2, device="cuda")}
    assert allocate_gpus(groups, ["0", "0"], {("g", 0): "0", ("g", 1): "0"}) == {"g": ["0", "0"]}


def test_a_worker_that_had_a_gpu_twice_gets_others_where_it_is_visible_once() -> None:
    assert allocate_gpus({"a": pair(1)}, ["0", "1"], {("a", 0): "0,0"}) == {"a": ["0,1"]}
