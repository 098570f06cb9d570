"""A configuration that cannot work is refused in one line that names the key."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import check_config, check_models, checked_config, decode_config, encode_config, load_config
from enginepool.errors import ConfigError

GOOD = '[groups.a]\nmodel = "m"\nengine = "sim"\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[groups]", "groups = {}: a pool needs at least one group"),
        (GOOD + "enginee = 1", "unknown key groups.a.enginee; did you mean engine?"),
        (GOOD + "tp_size = 2", "unknown key groups.a.tp_size; a setting of the engine is written as options.tp_size"),
        (GOOD + "listen_workers = ''", "unknown key groups.a.listen_workers; it is a setting of the pool, not of a group"),
        ("listn = 1\n" + GOOD, "unknown key listn; did you mean listen?"),
        (GOOD + "[groups.b]\nmodel = 5", "groups.b.model = 5: must be a string"),
        (GOOD + 'workers = "2"', "groups.a.workers = '2': must be a whole number"),
        ('[groups."a.b"]\nmodel = "m"\nworkers = "x"', "groups.a.b.workers = 'x': must be a whole number"),
        ('[groups."[x]"]\nmodel = 3', "groups.[x].model = 3: must be a string"),
        ('[groups."a.b"]\nmodel = "m"\ntp_size = 2', "unknown key groups.a.b.tp_size; a setting of the engine"),
        ("[groups]\na = 3", "groups.a = 3: must be a table"),
        (GOOD + "workers = 1.5", "groups.a.workers = 1.5: must be a whole number"),
        (GOOD + "gpus = [0]", "groups.a.gpus[0] = 0: must be a string"),
        (GOOD + 'gpus = "0,1"', "groups.a.gpus = '0,1': must be a list"),
        (GOOD + 'ageing_s = "1"', "groups.a.ageing_s = '1': must be a number, or left out"),
        (GOOD + "options = 3", "groups.a.options = 3: must be a table"),
        (GOOD + "reserve_staging = 1", "groups.a.reserve_staging = 1: must be true or false, or left out"),
        ("groups = 3", "groups = 3: must be a table"),
        ('[groups.a]\nengine = "sim"', "groups.a.model: missing, and needed"),
        ("listen_workers = ''", "groups: missing, and needed"),
        (GOOD + "[limits]\nqueue_items = 1.5", "limits.queue_items = 1.5: must be a whole number"),
        (GOOD + "workers = -1", "groups.a.workers = -1: 0 to 4096"),
        (GOOD + "ageing_s = inf", "groups.a.ageing_s = inf: more than 0 and less than 1e9"),
        (GOOD + "[timing]\ndrain_s = 1e20", "timing.drain_s = 1e+20: more than 0 and less than 1e15"),
        ('state_dir = ""\n' + GOOD, "state_dir = '': must name a directory"),
        ('listen = "ipc://x"\nlisten_workers = "ipc://x"\n' + GOOD, "listen_workers = 'ipc://x': workers have an address of"),
        (GOOD + 'device = "gpu"', "groups.a.device = 'gpu': one of auto, cpu, cuda"),
        (GOOD + 'dtype = "float33"', "groups.a.dtype = 'float33': one of auto, bfloat16, float16, half, float32, float"),
        (GOOD + 'operations = ["chat"]', "groups.a.operations[0] = 'chat': one of score, embed, logprobs, generate"),
        (
            GOOD + 'operations = ["embed", "embed"]',
            "groups.a.operations = ['embed', 'embed']: each of score, embed, logprobs and generate once",
        ),
        (GOOD + 'operations = ["generate", "embed"]', "a model that embeds does not generate"),
        (
            GOOD + 'operations = ["generate", "score"]\npacking = "on"',
            "groups.a.packing = 'on': auto or off where operations has 'generate'",
        ),
        (
            GOOD + 'operations = ["logprobs"]\npacking = "on"',
            "groups.a.packing = 'on': auto or off where operations has no 'score': scores alone are packed",
        ),
        (
            GOOD + 'operations = ["generate"]\nmax_batch_rows = 4',
            "groups.a.max_batch_rows = 4: none with operations = ['generate']",
        ),
        (GOOD + 'snapshot = "ram"', "groups.a.snapshot = 'ram': one of memory, disk, none"),
        (GOOD + "ageing_s = 0", "groups.a.ageing_s = 0"),
        (GOOD + "ageing_s = nan", "groups.a.ageing_s = nan"),
        (GOOD + 'workers = 2\ngpus = ["0"]', "groups.a.gpus = ['0']: one entry for each of 2 workers"),
        ('[groups."A B"]\nmodel = "m"', "groups.A B = 'A B': a name has"),
        ("queue = 3\n" + GOOD, "unknown key queue"),
        (GOOD + "[limits]\nqueue_item = 3", "unknown key limits.queue_item; did you mean queue_items?"),
        (GOOD + "[limits]\nwindow_bytes = 5", "limits.window_bytes = 5: at least limits.max_message_bytes"),
        (GOOD + "[limits]\nmax_message_bytes = 999", "limits.max_message_bytes = 999: 1000 or more: the messages that open"),
        (GOOD + "[restart]\nmax_restarts = -1", "restart.max_restarts = -1: 0 or more and less than 1e15"),
        (GOOD + "[restart]\nwindow_s = 0", "restart.window_s = 0.0: more than 0 and less than 1e15"),
        (GOOD + 'adapter_roots = ["/a"]', "groups.a.adapter_roots = ['/a']: only where operations has 'generate'"),
        (
            GOOD + 'operations = ["generate", "score"]\nadapter_roots = ["/a", "x"]',
            "groups.a.adapter_roots[1] = 'x': an absolute path of a directory, or one that begins with ~",
        ),
        (GOOD + "[timing]\nsilence_s = 0", "timing.silence_s = 0.0: more than 0"),
        (GOOD + "[timing]\nping_s = 9.0", "timing.ping_s = 9.0: at most half of silence_s"),
        (GOOD + "[timing]\nping_s = 60\nsilence_s = 150", "timing.ping_s = 60.0: at most half of client_silence_s"),
        ('listen = "127.0.0.1:5755"\n' + GOOD, "listen = '127.0.0.1:5755': write tcp://HOST:PORT or ipc://PATH"),
        ('listen_workers = "h:1"\n' + GOOD, "listen_workers = 'h:1': write tcp://HOST:PORT or ipc://PATH"),
        ('listen = "tcp://h:abc"\n' + GOOD, "PATH; a port is 1 to 65535, or * for a free one"),
        ('listen = "http://x"\n' + GOOD, "listen = 'http://x': write tcp://HOST:PORT or ipc://PATH"),
        ('listen = "tcp://0.0.0.0:5"\n' + GOOD, "listen = 'tcp://0.0.0.0:5': TCP needs keys"),
        ('listen = "tcp://127.0.0.1:99999"\n' + GOOD, "listen = 'tcp://127.0.0.1:99999': write"),
        (f'listen = "ipc://{"x" * 108}"\n' + GOOD, "an ipc path has at most 107 bytes"),
        ("groups = ", "not TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert line in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("x = " + "[" * 3000 + "]" * 3000)
    with pytest.raises(ConfigError, match=r"deep\.toml: "):
        load_config(path)


def test_workers_and_clients_may_both_leave_the_port_to_the_system() -> None:
    tcp = "tcp://127.0.0.1:*"
    config = PoolConfig({"a": GroupConfig(model="m")}, listen=tcp, listen_workers=tcp, insecure_loopback=True)
    assert check_config(config, where="test") is config


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml: No such file"):
        load_config(tmp_path / "no.toml")


def test_a_config_survives_its_journey_to_another_process() -> None:
    config = PoolConfig(groups={"a": GroupConfig(model="m", options={"page_size": 16, "x": [1.5, "y"]})})
    assert decode_config(encode_config(config)) == config


@pytest.mark.parametrize("key", ["listen", "listen_workers"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "10.1.2.3", "*", "0.0.0.0", "eth0"])
def test_tcp_needs_keys_and_only_of_the_loopback_interface_may_they_be_left_out(key: str, host: str) -> None:
    config = msgspec.structs.replace(PoolConfig({"a": GroupConfig(model="m")}), **{key: f"tcp://{host}:5755"})
    with pytest.raises(ConfigError, match=rf"^test: {key} = .*: TCP needs keys: run `enginepool keys DIR`"):
        check_config(config, where="test")
    check_config(msgspec.structs.replace(config, keys="keys"), where="test")
    open_ = msgspec.structs.replace(config, insecure_loopback=True)
    if host in ("127.0.0.1", "localhost", "[::1]"):
        check_config(open_, where="test")
    else:
        with pytest.raises(ConfigError, match=r'set keys = "DIR"$'):
            check_config(open_, where="test")


def test_an_abstract_socket_is_refused_because_every_user_can_open_it() -> None:
    with pytest.raises(ConfigError, match="an abstract socket is open to every user"):
        check_config(PoolConfig(groups={"a": GroupConfig(model="m")}, listen="ipc://@pool"), where="test")


def of_model(model: str, **settings: Any) -> PoolConfig:
    return PoolConfig(groups={"g": GroupConfig(model=model, **settings)})


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        ("./none", "no folder {here}/none"),
        ("/none/at/all", "no folder /none/at/all"),
        ("~nobody-of-this-name/model", "no folder {here}/~nobody-of-this-name/model"),
        ("models/of/mine", "no folder {here}/models/of/mine"),
        ("empty", "{here}/empty has no config.json"),
        ("./empty", "{here}/empty has no config.json"),
        ("two words", "no folder here, and no name of a model hub: NAME or OWNER/NAME"),
        ("ends/", "no folder here, and no name of a model hub: NAME or OWNER/NAME"),
    ],
)
def test_a_model_that_cannot_be_anything_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        check_models(of_model(model), "pool.toml")
    assert str(caught.value) == f"pool.toml: groups.g.model = {model!r}: {wrong.format(here=tmp_path)}"
    # No worker here looks for it: an external worker does, on its own host.
    for config in (of_model(model, workers=0), of_model(model, engine="sim")):
        assert check_models(config, "pool.toml") is config


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B", "s3://bucket/a/model", "full", "./full", "deep/er/full"])
def test_a_folder_with_a_model_an_address_and_a_name_of_the_hub_are_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("full", "config.json"), ("deep/er/full", "params.json")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).touch()
    config = of_model(model)
    assert check_models(config, "pool.toml") is config


def test_a_program_may_give_paths() -> None:
    group = GroupConfig(model=cast("Any", Path("/models/a")), engine="sim", operations=["generate"])
    given = {"model": Path("/models/a"), "engine": "sim", "operations": ["generate"], "media_root": Path("/media")}
    assert checked_config(PoolConfig({"g": group})).groups["g"].model == "/models/a"
    assert checked_config({"groups": {"g": given}}).groups["g"].media_root == "/media"
    with pytest.raises(TypeError, match="a value of type object; what TOML has, or a path"):
        checked_config({"groups": {"g": {"model": object()}}})
