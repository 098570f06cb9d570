"""What a user installs: the right files under one top-level name, by wheel, sdist and editable install, links or none."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import enginepool

ROOT = Path(__file__).parents[2]
ROOMS = {"enginepool": "enginepool", "protocol": "enginepool/protocol", "workers": "enginepool/workers"}
SITE = sysconfig.get_path("purelib")
#: One PEP 517 hook of setuptools in the source folder that is the working directory: (hook, where to).
HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(hook: str, source: Path, to: Path) -> Path:
    """Run a build hook in `source` and give the file that it made in `to`."""
    to.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", HOOK, hook, str(to)], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return to / done.stdout.splitlines()[-1]


def checkout(to: Path) -> Path:
    """A copy of the sources as a clone has them, so that a build leaves nothing in the folder that people work in."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "tests", "bench")
    return Path(shutil.copytree(ROOT, to, symlinks=True, ignore=ignored))


def without_links(source: Path) -> Path:
    """What git makes where it may not make symbolic links: small text files that hold the target."""
    for link in (source / "enginepool").iterdir():
        if link.is_symlink():
            target = link.readlink().as_posix()
            link.unlink()
            link.write_text(target)
    return source


def python(code: str, *paths: Path, cwd: Path) -> str:
    """Run code in a fresh interpreter that has the libraries, but of this project only what `paths` hold."""
    start = f"import sys, site; [site.addsitedir(p) for p in {[str(p) for p in paths]!r}]; sys.path.append({SITE!r})\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", start + code]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_ALL = """
import json, os, enginepool, enginepool.protocol.messages, enginepool.workers.engine
rooms = [enginepool, enginepool.protocol.messages, enginepool.workers.engine]
files = [m.__file__ for m in list(sys.modules.values()) if m.__name__.startswith("enginepool")]
twice = len(files) - len({os.path.realpath(file) for file in files})
print(json.dumps({"rooms": [m.__file__ for m in rooms], "twice": twice}))
"""


def expected_files() -> set[str]:
    """Every file of the three rooms, by its place in the package."""
    found: set[str] = set()
    for room, package in ROOMS.items():
        for file in (ROOT / room).rglob("*"):
            place = file.relative_to(ROOT / room)
            linked = room == "enginepool" and place.parts[0] in ("protocol", "workers")
            if file.is_file() and not linked and "__pycache__" not in place.parts:
                found.add(f"{package}/{place.as_posix()}")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("source") / "enginepool")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel laid out as pip lays it out."""
    place = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(place)
    return place


def metadata(installed: Path) -> Message:
    return Parser().parsestr(next(installed.glob("*.dist-info/METADATA")).read_text("utf-8"))


def names(wheel: Path) -> set[str]:
    """What a wheel installs, without its metadata."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name and not name.endswith("/")}


def test_the_wheel_holds_every_file_of_the_three_rooms_and_no_other(wheel: Path) -> None:
    assert names(wheel) == expected_files()
    assert {"enginepool/py.typed", "enginepool/protocol/PROTOCOL.md", "enginepool/protocol/WEIGHTS.md"} <= names(wheel)


def test_the_wheel_installs_one_top_level_name(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names(wheel)} == {"enginepool"}


def test_the_wheel_names_its_command_version_and_licence(installed: Path) -> None:
    info = next(installed.glob("*.dist-info"))
    assert "enginepool = enginepool.cli.main:app" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").read_text("utf-8") == (ROOT / "LICENSE").read_text("utf-8")
    assert metadata(installed)["License-Expression"] == "Apache-2.0"
    assert metadata(installed)["Version"] == enginepool.__version__
    assert f"## [{enginepool.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_base_install_has_no_torch_and_the_extra_brings_sglang(installed: Path) -> None:
    required: list[str] = metadata(installed).get_all("Requires-Dist", [])
    base = [line for line in required if "extra ==" not in line]
    assert [line for line in base if line.startswith(("torch", "sglang", "transformers", "ray"))] == []
    assert [line.split(";")[0].strip() for line in required if 'extra == "sglang"' in line] == ["sglang<0.5.24,>=0.5.17"]
    asked = [line.split(";")[0].strip() for line in required if 'extra == "openai"' in line]
    assert asked == ["enginepool[sglang]", "jsonschema>=4", "openai>=2"]
    assert [line.split(";")[0].strip() for line in required if 'extra == "trl"' in line] == ["trl<2,>=1.16"]
    assert [line.split(";")[0].strip() for line in required if 'extra == "redis"' in line] == ["redis<9,>=8"]


def test_a_wheel_built_from_the_sdist_holds_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4; later ones warn without
            archive.extractall(tmp_path, filter="data")
        else:
            archive.extractall(tmp_path)
    unpacked = next(path for path in tmp_path.iterdir() if path.name.startswith("enginepool-"))
    assert (unpacked / "LICENSE").is_file()
    assert names(build("build_wheel", unpacked, tmp_path / "wheel")) == names(wheel)


def test_a_wheel_is_imported_from_any_folder(installed: Path, tmp_path: Path) -> None:
    found = json.loads(python(IMPORT_ALL, installed, cwd=tmp_path))
    places = ["__init__.py", "protocol/messages/__init__.py", "workers/engine.py"]
    assert found["rooms"] == [str(installed / "enginepool" / place) for place in places]


@pytest.fixture(scope="module", params=[True, False], ids=["with links", "without links"])
def editable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkout, and the folder of its editable install. Without links too: where git makes none, on a zip download, on some
    file systems."""
    place = tmp_path_factory.mktemp("editable")
    source = checkout(place / "clone") if request.param else without_links(checkout(place / "clone"))
    zipfile.ZipFile(build("build_editable", source, place / "wheel")).extractall(place / "site")
    return source, place / "site"


@pytest.mark.parametrize("inside", [True, False], ids=["in the checkout", "elsewhere"])
def test_an_editable_install_runs_the_checkout_and_no_file_twice(
    editable: tuple[Path, Path], inside: bool, tmp_path: Path
) -> None:
    source, site = editable
    found = json.loads(python(IMPORT_ALL, site, cwd=source if inside else tmp_path))
    real = [os.path.realpath(file) for file in found["rooms"]]
    places = ("enginepool/__init__.py", "protocol/messages/__init__.py", "workers/engine.py")
    assert real == [str(source / place) for place in places]
    assert found["twice"] == 0


def test_every_package_is_listed() -> None:
    """A folder that is not listed would be missing from the wheel and nowhere else."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed: list[str] = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = {place.rpartition("/")[0].replace("/", ".") for place in expected_files() if place.endswith("/__init__.py")}
    assert sorted(listed) == sorted(found)


def test_the_links_are_relative_and_point_at_the_rooms() -> None:
    for room in ("protocol", "workers"):
        link = ROOT / "enginepool" / room
        if link.is_symlink():
            assert link.readlink() == Path("..") / room
        else:
            assert link.read_text() == f"../{room}", "neither a link nor what git makes where it may not make one"
