"""Which GPUs workers are given where nobody names them: as many as this host, or its container, has device files of."""

from pathlib import Path

import pytest

from enginepool.coordinator.supervisor import visible_gpus

#: what stands beside the GPUs' own files
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
def test_gpus_are_counted_from_0_whatever_their_numbers_are_on_the_host(
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
    [("", []), ("4", ["4"]), ("3,1", ["3", "1"]), ("GPU-8932f937,MIG-3eb8", ["GPU-8932f937", "MIG-3eb8"])],
)
def test_gpus_that_are_named_are_taken_as_they_are(
    named: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus(tmp_path) == expected
