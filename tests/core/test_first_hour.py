"""Mistakes of the first hour are answered with what to write instead."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from enginepool import BlockingPool, Pool
from enginepool.client.arguments import check_address, check_options
from enginepool.client.embedded import embedded_config
from enginepool.client.generate import GenerateOptions
from enginepool.client.payload import encode_pairs, encode_rows, encode_shared
from enginepool.client.sampling import sampling_of
from enginepool.client.score import ScoreOptions
from enginepool.config import PoolConfig
from enginepool.coordinator.operations.score import SCORE
from enginepool.errors import BadRequest, ConfigError
from enginepool.protocol.capabilities import halved
from enginepool.protocol.messages import Capabilities
from tests.core.machines import work
from tests.process.commands import call

ADDRESS = "tcp://127.0.0.1:1"
CHAT = [{"role": "user", "content": "Good day!"}]


@pytest.mark.parametrize(("pool", "wait"), [(Pool, "await "), (BlockingPool, "")])
@pytest.mark.parametrize(("given", "shown"), [((ADDRESS,), f"{ADDRESS!r}"), ((), "...")])
def test_a_pool_that_is_made_by_its_class_says_how_to_open_one(pool: Any, wait: str, given: Any, shown: str) -> None:
    with pytest.raises(TypeError) as caught:
        pool(*given)
    assert f"write {wait}{pool.__name__}.connect({shown})" in str(caught.value)


def test_a_pool_that_was_not_awaited_says_so() -> None:
    for called, opening in (("Pool.connect", Pool.connect(ADDRESS)), ("Pool.start", Pool.start("m", engine="sim"))):
        assert not hasattr(opening, "score")
        with pytest.raises(AttributeError) as caught:
            cast("Any", opening).score  # noqa: B018 (it raises)
        assert f"write pool = await {called}(...) or async with {called}(...) as pool" in str(caught.value)


@pytest.mark.parametrize("kind", [Pool, BlockingPool])
def test_an_attribute_that_a_pool_does_not_have_is_named(kind: Any) -> None:
    pool = kind.__new__(kind)
    assert not hasattr(pool, "scores")
    with pytest.raises(AttributeError, match=f"'{kind.__name__}' object has no attribute 'scores'"):
        pool.scores  # noqa: B018 (it raises)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("label_ids", "score() has no argument 'label_ids'; did you mean label_token_ids?"),
        ("label_token_id", "did you mean label_token_ids?"),
        ("softmax", "did you mean apply_softmax?"),
        ("max_new_tokens", "score() has no argument 'max_new_tokens'"),
    ],
)
def test_an_option_by_another_name_is_told_its_own(option: str, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        check_options("score", {"priority": 1, option: 1}, ScoreOptions)
    assert said in str(caught.value)


def test_a_hint_names_an_option_that_the_call_has() -> None:
    with pytest.raises(TypeError, match=r"no argument 'seed'; did you mean sampling_seed\?$"):
        check_options("generate", {"seed": 1}, GenerateOptions)
    with pytest.raises(TypeError, match=r"no argument 'seed'$"):
        check_options("score", {"seed": 1}, ScoreOptions)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("stop_token_ids", list(range(300)), "stop_token_ids: 300 entries; at most 256"),
        ("logit_bias", dict.fromkeys(range(257), 1.0), "logit_bias: 257 entries; at most 256"),
        ("stop", ["a", "b" * 5000], "stop[1]: 5000 characters; at most 1024"),
    ],
)
def test_what_is_too_long_is_told_its_length(option: str, value: object, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        sampling_of({option: value})
    assert str(refused.value) == said and refused.value.limit == said.rpartition(" ")[2]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("json_schema", '{"type": ', "json_schema: Expecting value: line 1 column 10 (char 9); a text of JSON"),
        ("structural_tag", "<tag>", "structural_tag: Expecting value: line 1 column 1 (char 0); a text of JSON"),
        ("stop_regex", ["a", "b**"], "stop_regex[1]: multiple repeat at position 2; a pattern of Python's re"),
    ],
)
def test_what_no_engine_can_read_is_refused_before_it_is_sent(option: str, value: object, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        sampling_of({option: value})
    assert str(refused.value) == said and refused.value.field == said.partition(":")[0]
    assert sampling_of({"json_schema": "$$ANY$$"}).json_schema == "$$ANY$$", "SGLang has a name for any JSON"


@pytest.mark.parametrize(
    ("query", "items", "field"),
    [
        (CHAT, ["a"], "query"),
        (CHAT[0], ["a"], "query"),
        ("q", CHAT, "items[0]"),
        ("q", CHAT[0], "items"),
        ("q", ["a", CHAT], "items[1]"),
        ([1], [CHAT], "items[0]"),
        ([1], [[1], CHAT[0]], "items[1]"),
    ],
)
def test_messages_of_a_chat_are_told_from_other_mistakes(query: Any, items: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        encode_shared(query, items)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: chat messages; apply the chat template first")
    with pytest.raises(BadRequest, match=r"prompts\[0\]: chat messages"):
        encode_pairs([cast("Any", CHAT)], [[1]])


@pytest.mark.parametrize("wrong", [np.array(3), np.array("a text")])
def test_an_array_without_an_axis_is_no_list(wrong: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        encode_rows("prompts", wrong)
    assert str(caught.value) == "prompts: an array of shape []; a list of texts, or a list of token id sequences"


def test_what_is_no_chat_is_not_called_one() -> None:
    for wrong in ({"input_ids": [1]}, [{"input_ids": [1]}], [None], None):
        with pytest.raises(BadRequest) as caught:
            encode_shared(cast("Any", wrong), [[1]])
        assert "chat" not in str(caught.value)


def test_the_address_comes_from_the_environment_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEPOOL_ADDRESS", "ipc:///run/pool.sock")
    assert check_address(None) == "ipc:///run/pool.sock"
    assert check_address(ADDRESS) == ADDRESS
    monkeypatch.setenv("ENGINEPOOL_ADDRESS", "pool:5755")
    with pytest.raises(BadRequest, match=r"^ENGINEPOOL_ADDRESS: 'pool:5755'; write tcp://pool:5755"):
        Pool.connect()
    with pytest.raises(BadRequest, match="ENGINEPOOL_ADDRESS"):
        BlockingPool.connect()
    monkeypatch.delenv("ENGINEPOOL_ADDRESS")
    default = check_address(None)
    monkeypatch.setenv("ENGINEPOOL_ADDRESS", "")
    assert check_address(None) == default
    with pytest.raises(BadRequest, match=r"^address: ''; write "):
        check_address("")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pool_that_is_not_open_is_not_copied(copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"^Pool\.connect\(\.\.\.\) cannot be copied or pickled: call it once for each pool$"):
        copied(Pool.connect(ADDRESS))


@pytest.mark.parametrize("kind", [Pool, BlockingPool])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pool_for_another_process_is_told_to_be_opened_there(copied: Callable[[object], object], kind: Any) -> None:
    pool = Pool.__new__(Pool)
    pool.address = ADDRESS
    if kind is BlockingPool:
        pool, pool._async = kind.__new__(kind), pool  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(TypeError) as caught:
        copied(pool)
    said = f"a {kind.__name__} cannot be copied or pickled: open one in each process, by {kind.__name__}.connect({ADDRESS!r})"
    assert str(caught.value) == said


def test_a_timeout_of_the_start_is_told_which_calls_have_one() -> None:
    group = {"model": "m", "workers": 1, "engine": "sim", "device": "auto", "timeout": 3}
    said = (
        r"^Pool\.start\(\) has no argument 'timeout': it does not wait for the workers, `await pool\.ready\(timeout=3\)` does; "
        r"start_timeout is for the coordinator$"
    )
    with pytest.raises(ConfigError, match=said):
        embedded_config(None, group)
    with pytest.raises(ConfigError, match=said):
        embedded_config(PoolConfig(groups={}), group)


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("ready --timeout 0", "0"),
        ("score in out --concurrency 9999", "9999"),
        ("serve --workers -2", "-2"),
        ("serve --workers two", "two"),
        ("status --every 0", "0"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_shown(command: str, value: str) -> None:
    code, _, err = call(*command.split())
    assert (code, err.count("\n")) == (2, 1)
    assert f"got '{value}'" in err or f"{value} is not" in err


def test_a_setting_of_the_engine_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"unknown key tp_size; a setting of the engine is written as options\.tp_size$"):
        embedded_config(None, {"model": "m", "workers": 1, "engine": "sglang", "device": "auto", "tp_size": 2})
    with pytest.raises(ConfigError, match=r"unknown key gpu; did you mean gpus\?$"):
        embedded_config(None, {"model": "m", "workers": 1, "engine": "sglang", "device": "auto", "gpu": ["0"]})
    with pytest.raises(ConfigError, match=r"unknown key timing; it is a setting of the pool, not of a group$"):
        embedded_config(None, {"model": "m", "workers": 1, "engine": "sglang", "device": "auto", "timing": {"forward_s": 3.0}})


def test_a_row_of_nearly_the_context_is_told_which_reserve_it_does_not_fit() -> None:
    can = Capabilities("causal", 1000, 505, 2048, 8, 4096, 16, reserved=7)
    error = SCORE.refuse(work(rows=2, length=506), can)
    assert error is not None and error.limit == "505"
    reserve = ": the model's context of 512, less 7 that the engine reserves"
    assert error.message == f"items[0]: 506 tokens with its query; at most 505{reserve}"
    assert SCORE.refuse(work(rows=2, length=505), can) is None
    # Halved, another bound is what a row does not fit.
    smaller = SCORE.refuse(work(rows=2, length=506), halved(can, 4))
    assert smaller is not None and smaller.message == "items[0]: 506 tokens with its query; at most 256"
