"""The command line keeps its promises: quick help, errors of one line, a doctor who tells the truth."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from enginepool import __version__
from enginepool.cli import doctor_checks as examination
from enginepool.cli.connect import DEFAULT_ADDRESS
from enginepool.config import GroupConfig, Limits, PoolConfig, RestartConfig, Timing
from enginepool.config_loader import load_config
from enginepool.host import kernel_caches
from enginepool.net.address import default_address
from tests.process.commands import LIMIT_S, ROOT, call, import_nothing


def without(*names: str) -> Callable[[str], str | None]:
    """A stand-in for looking packages up, where these are missing."""

    def look(name: str) -> str | None:
        return None if name in names else "1.0"

    return look


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom enginepool.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n"
        "    print('LOADED', *sorted({'torch', 'sglang', 'zmq', 'numpy', 'rich.progress'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_every_command_has_help_with_examples() -> None:
    ours = [
        "demo",
        "doctor",
        "serve",
        "ready",
        "keys",
        "score",
        "embed",
        "generate",
        "chat",
        "logprobs",
        "status",
        "restart",
        "flush",
        "sleep",
        "wake",
        "pause",
        "resume",
        "abort",
        "profile",
        "tiny-model",
        "worker",
        "weights",
        "adapters",
    ]
    assert commands() == ours
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `enginepool ([\w-]+)` \|", page, re.MULTILINE)) == sorted(ours)
    about_weights = commands("weights")
    assert about_weights == ["versions", "history", "digest", "validate", "get", "publish", "save", "set-version"]
    about_adapters = commands("adapters")
    assert about_adapters == ["list", "load", "unload"]
    groups = {"weights": about_weights, "adapters": about_adapters}
    nested = [[group, name] for group, names in groups.items() for name in names]
    for name in [[name] for name in commands() if name not in groups] + nested:
        code, out, _ = call(*name, "--help")
        assert code == 0
        assert f"Examples:\n    enginepool {' '.join(name)}" in out


def commands(*group: str) -> list[str]:
    """The names that the help of a group of commands lists."""
    code, out, _ = call(*group, "--help")
    assert code == 0
    listed = out.partition("Commands:")[2]
    assert "..." not in listed, "a first sentence is too long for the list"
    return re.findall(r"^  ([a-z][a-z-]+)  ", listed, re.MULTILINE)


def test_without_arguments_it_shows_the_help() -> None:
    assert call() == call("--help")
    assert call("weights") == call("weights", "--help")


def test_version_is_the_packages() -> None:
    assert call("--version") == (0, f"enginepool {__version__}\n", "")


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "enginepool", "--version"], capture_output=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout.decode()) == (0, f"enginepool {__version__}\n")


def test_shell_completion_knows_the_commands() -> None:
    asked = {**os.environ, "_ENGINEPOOL_COMPLETE": "complete_bash", "COMP_WORDS": "enginepool t", "COMP_CWORD": "1"}
    code = "from enginepool.cli.main import app; app(prog_name='enginepool')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, env=asked, cwd=ROOT)
    assert done.stdout.split() == ["tiny-model"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an input file, a broken config and a full directory."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"query": "a", "items": ["b"]}\n')
    Path("key.toml").write_text('listem = "tcp://127.0.0.1:1"\n[groups.a]\nmodel = "x"\n')
    Path("remote.toml").write_text('listen = "tcp://0.0.0.0:5000"\n[groups.a]\nmodel = "x"\nengine = "sim"\n')
    Path("cut.toml").write_text('listen = "tcp://127.0.0.1:1\n')
    Path("bytes.toml").write_bytes(b"\xff\xfe")
    Path("negative.toml").write_text('[groups.a]\nmodel = "x"\nworkers = -3\n')
    Path("kind.toml").write_text('[groups.a]\nmodel = "x"\nworkers = "two"\n')
    Path("key_of_sim.toml").write_text('[groups.a]\nmodel = "x"\nengine = "sim"\noptions = { vocap = 300 }\n')
    Path("value_of_sim.toml").write_text('[groups.a]\nmodel = "x"\nengine = "sim"\noptions = { vocab = 0 }\n')
    Path("full").mkdir()
    Path("full/file").touch()
    return tmp_path


BAD_USAGE = [
    ("nosuch", "no such command 'nosuch'"),
    ("--nope", "no such option: --nope"),
    ("serve", "serve needs --config POOL.TOML or --model MODEL"),
    ("serve --config none.toml", "none.toml: No such file"),
    ("serve --config key.toml", "key.toml: unknown key listem"),
    ("serve --config remote.toml", "remote.toml: listen = 'tcp://0.0.0.0:5000': TCP needs keys"),
    ("serve --config key.toml --workers 2", "--config and --workers exclude each other"),
    ("serve --config key.toml --operation generate", "--config and --operation exclude each other"),
    ("serve --engine sim --operation dance", "operations[0] = 'dance': one of score, embed, logprobs, generate"),
    ("serve --engine sim --workers -1", "invalid value for '--workers'"),
    ("serve --engine other", "invalid value for '--engine'"),
    ("serve --engine sim --listen nowhere", "listen = 'nowhere': write tcp://HOST:PORT or ipc://PATH"),
    ("score", "missing argument 'IN.jsonl'"),
    ("score none.jsonl out.jsonl", "none.jsonl: no such file"),
    ("score full out.jsonl", "full: not a file"),
    ("score in.jsonl in.jsonl", "in.jsonl: answers go to a file of their own"),
    ("score in.jsonl full", "full: answers go to a file of their own"),
    ("score in.jsonl none/out.jsonl", "none: no such directory"),
    ("score in.jsonl out.jsonl --connect localhost", "'localhost': write tcp://HOST:PORT or ipc://PATH"),
    ("score in.jsonl out.jsonl --priority 1001", "invalid value for '--priority'"),
    ("score in.jsonl out.jsonl --concurrency 0", "invalid value for '--concurrency'"),
    ("score in.jsonl out.jsonl --label-token-ids 1,b", "--label-token-ids = '1,b': write token ids with commas"),
    (f"score in.jsonl out.jsonl --label-token-ids {'9' * 5000}", "write token ids with commas"),
    ("score in.jsonl out.jsonl --timeout 1e300", "--timeout: over 1000000000 seconds, which is the most"),
    ("score in.jsonl out.jsonl --label-token-ids 1,9999999999", "--label-token-ids[1]: token id 9999999999 does not fit"),
    ("score in.jsonl out.jsonl --timeout inf", "--timeout: inf; a finite number of seconds"),
    ("score in.jsonl out.jsonl --timeout 0", "invalid value for '--timeout'"),
    ("score in.jsonl", "missing argument 'OUT.jsonl'"),
    ("serve --config full", "full: Is a directory"),
    ("serve --config cut.toml", "cut.toml: not TOML"),
    ("serve --config bytes.toml", "bytes.toml: not TOML"),
    ("serve --config negative.toml", "negative.toml: groups.a.workers = -3: 0 to 4096"),
    ("serve --config kind.toml", "kind.toml: groups.a.workers = 'two': must be a whole number"),
    (
        "serve --config key_of_sim.toml",
        "key_of_sim.toml: groups.a.options.vocap: the engine sim has no such option; did you mean 'vocab'?",
    ),
    ("serve --check --config key_of_sim.toml", "key_of_sim.toml: groups.a.options.vocap: "),
    ("serve --check --config value_of_sim.toml", "value_of_sim.toml: groups.a.options: options of engine sim: vocab = 0"),
    ("serve --engine sim --state-dir in.jsonl", "state_dir = 'in.jsonl': a file, not a directory"),
    ("serve --engine sim --state-dir st --listen ipc://none/pool.sock", "ipc://none/pool.sock: cannot listen: No such file"),
    ("status --connect tcp://127.0.0.1:0", "write tcp://HOST:PORT or ipc://PATH; a port is 1 to 65535"),
    ("status --every 0", "invalid value for '--every'"),
    ("restart judge/", "'judge/': write GROUP or GROUP/WORKER"),
    ("restart /judge-0", "'/judge-0': write GROUP or GROUP/WORKER"),
    ("sleep judge/", "'judge/': write GROUP or GROUP/WORKER"),
    ("wake judge/", "'judge/': write GROUP or GROUP/WORKER"),
    ("pause judge --mode later", "'later' is not one of 'abort', 'in_place', 'retract'"),
    ("abort --client 7075", "'7075': write the id that `enginepool status` shows, of 8 or more hex digits"),
    ("abort --client 70756230X", "'70756230X': write the id that `enginepool status` shows, of 8 or more hex digits"),
    ("abort judge --request 4", "invalid value for '--request': goes with --client"),
    ("weights save saved/step-1", "'saved/step-1': write an absolute path without '..'"),
    ("weights save /saved/../step-1", "'/saved/../step-1': write an absolute path without '..'"),
    ("profile judge/", "'judge/': write GROUP or GROUP/WORKER"),
    ("restart judge/judge-0/1", "'judge/judge-0/1': write GROUP or GROUP/WORKER"),
    ("tiny-model", "missing argument 'DIR'"),
    ("tiny-model full", "full: not empty"),
    ("tiny-model in.jsonl", "in.jsonl: a file stands there"),
    ("tiny-model new --head none", "invalid value for '--head'"),
    ("demo --engine none", "invalid value for '--engine'"),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("line", "said"), BAD_USAGE, ids=[line[:80] for line, _ in BAD_USAGE])
def test_wrong_usage_is_one_line_and_exit_code_2(line: str, said: str) -> None:
    code, out, err = call(*line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("enginepool")
    assert said in err
    assert not Path("out.jsonl").exists()


def test_a_model_that_cannot_be_anything_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without())
    assert call("serve", "--model", "./none")[::2] == (
        2,
        f"enginepool: configuration: groups.default.model = './none': no folder {folder}/none\n",
    )
    assert "has no config.json" in call("serve", "--check", "--model", "full")[2]
    assert call("serve", "--check", "--model", "some/model/of/mine")[::2] == (
        2,
        f"enginepool: configuration: groups.default.model = 'some/model/of/mine': no folder {folder}/some/model/of/mine\n",
    )
    for name in ("gpt2", "some/model", "s3://bucket/model"):
        assert call("serve", "--check", "--model", name)[::2] == (0, "")


def test_the_real_engine_without_its_packages_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without("sglang", "torch"))
    for command in (["serve", "--model", "some/model"], ["demo"]):
        code, _, err = call(*command)
        assert (code, err.count("\n")) == (1, 1)
        assert "sglang" in err
        assert "sim" in err


@pytest.mark.skipif(examination.find_spec("sglang") is None, reason="needs the sglang package: make setup")
def test_an_option_that_the_installed_sglang_does_not_have_is_found_before_a_worker_starts(tmp_path: Path) -> None:
    config = tmp_path / "pool.toml"
    config.write_text('[groups.a]\nmodel = "some/model"\noptions = { tp_size = 2, mem_fraction = 0.5 }\n')
    code, _, err = call("serve", "--config", config, "--check")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{config}: groups.a.options.mem_fraction: " in err and "did you mean 'mem_fraction_static'?" in err
    config.write_text('[groups.a]\nmodel = "some/model"\noptions = { tp_size = 2, mem_fraction_static = 0.5 }\n')
    assert call("serve", "--config", config, "--check")[0] == 0


@pytest.mark.skipif(examination.find_spec("sglang") is None, reason="needs the sglang package: make setup")
def test_more_gpus_than_there_are_is_found_before_a_worker_starts(tmp_path: Path) -> None:
    config = tmp_path / "pool.toml"
    config.write_text('[groups.a]\nmodel = "some/model"\nworkers = 2\noptions = { tp_size = 2 }\n')
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    code, _, err = call("serve", "--config", config, "--check", env=gpus)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{config}: groups: a: 2 workers x 2 need 4 GPUs, and of 3 visible here (4, 5, 6) 3 are present" in err
    config.write_text('[groups.a]\nmodel = "some/model"\nworkers = 2\ngpus = ["4,5", "5,6"]\noptions = { tp_size = 2 }\n')
    assert call("serve", "--config", config, "--check", env=gpus)[0] == 0


def test_a_wrong_choice_is_answered_with_the_right_ones(tmp_path: Path) -> None:
    code, _, err = call("tiny-model", tmp_path / "m", "--head", "rewards")
    assert (code, err.count("\n")) == (2, 1)
    assert "invalid value for '--head': 'rewards' is not one of 'causal', 'reward'" in err
    assert err.count("'rewards'") == 1


def test_a_bug_of_ours_is_one_line_that_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(examination, "verify", broken)
    code, _, err = call("doctor")
    assert (code, err) == (
        1,
        "enginepool: internal error: KeyError: 'oops' (with ENGINEPOOL_TRACEBACK=1 set it shows where)\n",
    )
    assert "in broken" in call("doctor", env={"ENGINEPOOL_TRACEBACK": "1"})[2]


def test_no_pool_at_the_address_is_one_line_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginepool.cli.connect.CONNECT_S", 0.2)
    address = f"ipc://{tmp_path}/none.sock"
    for command in (["status"], ["score", ROOT / "pyproject.toml", tmp_path / "out.jsonl"]):
        code, out, err = call(*command, "--connect", address)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert address in err
    assert not (tmp_path / "out.jsonl").exists()


def test_commands_look_where_a_pool_listens_that_does_not_say_where() -> None:
    assert PoolConfig(groups={}).listen == DEFAULT_ADDRESS == ""


def test_the_example_config_holds_the_defaults(tmp_path: Path) -> None:
    example = ROOT / "examples" / "pool.toml"
    assert call("serve", "--config", example, "--check")[0] == (0 if examination.find_spec("sglang") else 1)
    plain = tmp_path / "all.toml"
    plain.write_text(re.sub(r"^# (\[|\w+ = )", r"\1", example.read_text(), flags=re.MULTILINE))
    config = load_config(plain)
    assert (config.limits, config.timing, config.restart) == (Limits(), Timing(), RestartConfig())
    assert config.groups["judge"].options == {"tp_size": 2}
    for struct in (PoolConfig, GroupConfig, Limits, Timing, RestartConfig):
        unexplained = [key for key in struct.__struct_fields__ if not re.search(rf"\b{key}\b( =|\]|\.)", example.read_text())]
        assert unexplained == []
    said = load_config(example)
    assert msgspec.structs.replace(config, groups=said.groups) == said


# --- doctor, tiny-model ------------------------------------------------------------------------------------------------


def test_doctor_says_for_each_use_whether_it_can_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds when it imports SGLang, a command on a page shows."""
    import_nothing(monkeypatch)
    config = tmp_path / "pool.toml"
    config.write_text(f'[groups.g]\nmodel = "sim"\nengine = "sim"\nkernel_cache = "{tmp_path}/kernels"\n')
    code, out, _ = call("doctor", "--json", "--config", str(config))
    found = json.loads(out)
    assert code == 0
    assert [verdict["use"] for verdict in found["verdicts"]] == [
        "coordinator",
        "engine sim",
        "real engine, CPU",
        "real engine, GPU",
    ]
    assert [verdict["can"] for verdict in found["verdicts"][:2]] == [True, True]
    assert [line for line in found["findings"] if line["what"] == "kernel cache" and str(tmp_path / "kernels") in line["said"]]


def test_doctor_fails_only_where_no_coordinator_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import_nothing(monkeypatch)
    monkeypatch.setattr(examination, "find_spec", without("torch", "sglang"))
    code, out, _ = call("doctor")
    assert code == 0
    assert re.search(r"^  no +real engine, CPU +not installed: sglang, torch;", out, re.MULTILINE)
    assert re.search(r"^  yes +coordinator ", out, re.MULTILINE)
    monkeypatch.setattr(examination, "version_of", without("pyzmq"))
    code, out, _ = call("doctor")
    assert code == 1
    assert re.search(r"^  no +coordinator +missing: pyzmq", out, re.MULTILINE)


def test_doctor_says_how_large_the_kernel_caches_of_a_pool_are_and_who_can_write_to_them(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir(mode=0o700)
    (tmp_path / "kernels" / "one.so").write_bytes(bytes(2_000))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "file").write_text("")

    def found(name: str) -> tuple[str, str]:
        [result] = examination.kernel_caches([str(tmp_path / name)])
        return result.state, result.said

    assert kernel_caches.size_of(tmp_path / "kernels") == 2_000
    assert found("kernels") == ("good", f"{tmp_path}/kernels, 0.0 GB in it, {found('kernels')[1].split(', ')[-1]}")
    assert found("new") == ("good", f"{tmp_path}/new, 0.0 GB in it, {found('new')[1].split(', ')[-1]}")
    wide = f"engines run what lies there, and others can write to {tmp_path}/shared (mode 0777): chmod go-w it"
    for name in ("shared", "shared/new", "shared/of/new"):
        assert found(name)[0] == "note" and wide in found(name)[1], "others can make it, or put another one in its place"
    assert f"{tmp_path}/file cannot be written: engines may not start with it" in found("file/below")[1]


def test_doctor_imports_what_it_calls_good(tmp_path: Path) -> None:
    """A package that is installed and cannot be imported is of no use, and one that fails must not take the others along."""
    for name, code in (
        ("works", ""),
        ("fails", "raise RuntimeError('operator does not exist\\nmore')"),
        ("ends", "raise SystemExit(3)"),
    ):
        (tmp_path / f"doctor_{name}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        errors = examination.probe(["doctor_fails", "doctor_works", "doctor_ends", "doctor_absent"]).errors
        (tmp_path / "doctor_dies.py").write_text("import os; os._exit(7)")
        assert "exit code 7" in examination.probe(["doctor_dies"]).errors["doctor_dies"]
    assert errors == {
        "doctor_fails": "RuntimeError: operator does not exist",
        "doctor_ends": "SystemExit: 3",
        "doctor_absent": "ModuleNotFoundError: No module named 'doctor_absent'",
    }
    assert examination.probe([]).errors == {}


def test_doctor_says_that_a_package_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"torchvision": "RuntimeError: operator torchvision::nms does not exist"}

    def version_of(name: str) -> str:
        return "0.5.24" if name == "sglang" else "1.0"

    def probe(_: object) -> examination.Probe:
        return examination.Probe(broken)

    monkeypatch.setattr(examination, "find_spec", str)
    monkeypatch.setattr(examination, "version_of", version_of)
    monkeypatch.setattr(examination, "probe", probe)
    _, out, _ = call("doctor")
    assert "torchvision::nms does not exist; an engine on a CPU does without: pip uninstall torchvision" in out.replace(
        "\n", " "
    )
    assert "0.5.24 is not supported: 0.5.17 to 0.5.23 are" in out
    assert re.search(r"^  no +real engine, CPU +sglang 0\.5\.24 is not supported", out, re.MULTILINE)
    broken["transformers"] = "ValueError: no"
    _, out, _ = call("doctor")
    assert re.search(r"^  no +real engine, CPU +cannot be imported: transformers", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("version", "good"),
    [("0.5.16", 0), ("0.5.17", 1), ("0.5.23", 1), ("0.5.23.post1", 1), ("0.5.24", 0), ("0.6.0", 0), ("", 0)],
)
def test_doctor_knows_which_versions_of_sglang_are_supported(version: str, good: int) -> None:
    assert examination.supported(version) == bool(good)


def test_doctor_says_that_the_default_endpoint_is_taken_or_open_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert examination.endpoint().state == "good"
    path = Path(default_address().removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700, parents=True)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        assert "in use" in examination.endpoint().said
    assert examination.endpoint().state == "good"
    path.parent.chmod(0o755)
    assert "others can enter" in examination.endpoint().said


def test_tiny_model_makes_a_model_that_serve_accepts(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the tokenizers package: make setup")
    pytest.importorskip("safetensors", reason="needs the safetensors package: make setup")
    for head in ("causal", "reward"):
        code, out, _ = call("tiny-model", tmp_path / head, "--head", head)
        assert code == 0
        assert f"{tmp_path / head}: a {head} model" in out
        assert (tmp_path / head / "config.json").is_file()
