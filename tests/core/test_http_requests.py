"""What OpenAI's API takes of a request for a pool, what it refuses, and how it names an error. No SGLang here."""

import asyncio
import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.client.openai_calls import OpenAICalls
from enginepool.errors import BadRequest, Busy, ConfigError, DeadlineExceeded, EngineFailed, Interrupted, PoolDown, UnknownGroup
from enginepool.http import endpoints
from enginepool.http.adapters import take_adapter
from enginepool.http.build import SETTINGS, check_settings
from enginepool.http.endpoints import Endpoints
from enginepool.http.failures import body_of, status_of
from enginepool.http.media import take_media
from enginepool.http.options import read_options
from enginepool.http.refusals import refuse_dangerous, refuse_template
from enginepool.http.sampling import pool_options
from enginepool.protocol.messages import StatusReport
from enginepool.protocol.messages.status import AdapterStatus, GroupLimits, GroupStatus


def request(parameters: Any = None, **given: Any) -> Any:
    """As SGLang's `GenerateReqInput`."""
    own: dict[str, Any] = {"text": "Hello", "input_ids": None, "sampling_params": parameters or {}, "logprob_start_len": -1}
    return SimpleNamespace(**own | given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"custom_logit_processor": '{"callable": "80"}'}, "custom_logit_processor"),
        ({"custom_logit_processor": [None, "80"]}, "custom_logit_processor"),
        ({"session_params": {"id": "a"}}, "session_params"),
        ({"return_hidden_states": "last"}, "return_hidden_states"),
        ({"routed_dp_rank": 0}, "routed_dp_rank"),
        ({"bootstrap_room": 0}, "bootstrap_room"),
        ({"cache_salt": "secret"}, "cache_salt"),
        ({"return_logprob": True, "logprob_start_len": 0, "stream": True}, "echo"),
        ({"return_logprob": True, "logprob_start_len": 5}, "logprob_start_len"),
        ({"return_logprob": [True], "logprob_start_len": [-1]}, "logprob_start_len"),
    ],
)
def test_what_is_dangerous_or_not_handed_on_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest, match=f"^{field}: not served by this pool") as failed:
        refuse_dangerous(request(**given))
    assert failed.value.field == field


@pytest.mark.parametrize(
    ("parameters", "more", "message"),
    [
        ({"custom_params": {"thinking_budget": 5}}, {}, "^custom_params: not served"),
        ({"beam_width": 4}, {}, "^beam_width: not served"),
        ({"n": 0}, {}, "^n: 0 for 1 prompts; 1 to 4096"),
        ({"n": 4097}, {}, "^n: 4097 for 1 prompts; 1 to 4096"),
        ({"n": 2000}, {"text": ["a", "b", "c"]}, "^n: 2000 for 3 prompts; 1 to 1365"),
        ({"n": 1 << 70}, {"text": None, "input_ids": [[1], [2]]}, "^n: 1180591620717411303424 for 2 prompts; 1 to 2048"),
        ([{"n": 1}, {"n": True, "beam_width": 2}], {}, "^beam_width: not served"),
        (
            {"regex": "a", "custom_params": {"__sglang_reasoning_in_grammar": True}},
            {"require_reasoning": True},
            "^response_format: not served.*turn thinking off",
        ),
        ({}, {"top_logprobs_num": [0, 3]}, r"^top_logprobs: \[0, 3\] \(logprobs of a completion\); 0 to 20"),
        ({}, {"top_logprobs_num": 21}, "^top_logprobs: 21 .*; 0 to 20"),
        ({}, {"top_logprobs_num": -1}, "^top_logprobs: -1 .*; 0 to 20"),
    ],
)
def test_sampling_parameters_are_held_to_what_the_pool_serves(parameters: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        refuse_dangerous(request(parameters, **more))


def test_what_the_pool_serves_passes() -> None:
    own = {"__sglang_reasoning_end_token_ids": [7]}
    refuse_dangerous(request({"n": 4096, "custom_params": own}, require_reasoning=True, image_data=None, routed_dp_rank=None))
    refuse_dangerous(request({"json_schema": "{}", "custom_params": own}))
    refuse_dangerous(request({"json_schema": "{}"}, require_reasoning=True))
    refuse_dangerous(request({"json_schema": "{}", "n": 1}, return_logprob=True))
    refuse_template({"enable_thinking": False})
    with pytest.raises(BadRequest, match="chat_template is a program"):
        refuse_template({"chat_template": "{{ 1 }}"})


def test_media_of_messages_go_to_the_pool_by_their_urls_and_sglang_is_left_none() -> None:
    image, audio = SimpleNamespace(url="data:image/png;base64,AAAA", detail="low"), "https://a.b/c.wav"
    asked = request(image_data=[image, image], video_data=None, audio_data=[audio])
    assert take_media(asked) == {"images": [image.url, image.url], "audio": [audio]}
    assert asked.image_data is asked.audio_data is None and take_media(asked) == {}


def test_the_adapter_goes_to_the_pool_by_its_name_and_sglang_is_left_none() -> None:
    asked = request(lora_path="french")
    assert take_adapter(asked) == {"adapter": "french"} and asked.lora_path is None
    for none in (None, ""):
        assert take_adapter(request(lora_path=none)) == {}
    with pytest.raises(
        BadRequest, match=r"^lora_path: not served by this pool: all prompts of a request have the same adapter"
    ):
        take_adapter(request(lora_path=["french", "german"]))
    unknown = BadRequest("adapter: 'dutch'; the workers of this group have french", field="adapter", limit="french")
    assert body_of(unknown)["error"]["param"] == "lora_path"


@pytest.mark.parametrize(
    "one", ["/etc/passwd", "file:///etc/passwd", "AAAA", ["data:,"], SimpleNamespace(url="a.png"), {"feature": 1}]
)
def test_a_medium_of_a_message_that_is_no_url_is_refused(one: Any) -> None:
    with pytest.raises(BadRequest, match=r"^messages: not served by this pool: a medium of a message is a URL") as failed:
        take_media(request(image_data=[one]))
    assert failed.value.field == "messages"


def test_an_id_of_a_request_is_a_text() -> None:
    refuse_dangerous(request(rid="mine"))
    with pytest.raises(BadRequest, match=r"^rid: not a text"):
        refuse_dangerous(request(rid=["a", "b"]))


def settled(**given: Any) -> Any:
    """As SGLang's `SamplingParams`, normalized."""
    own: dict[str, Any] = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "min_new_tokens": 0, "ignore_eos": False, "logit_bias": None, "sampling_seed": None,
        "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "stop_strs": [], "stop_regex_strs": [],
        "stop_token_ids": None, "max_new_tokens": None, "n": 1,
    }  # fmt: skip
    return SimpleNamespace(**own | given)


def test_sampling_parameters_become_options_of_the_pool() -> None:
    plain = pool_options(settled(), 10, 4096)
    assert (plain["top_k"], plain["max_new_tokens"], plain["sampling_seed"], plain["stop"]) == (-1, 4086, None, [])
    given = settled(
        top_k=1, n=3, max_new_tokens=7, sampling_seed=5, stop_strs=["a"], stop_regex_strs=["b+"], stop_token_ids={9, 3}
    )
    found = pool_options(given, 10, 4096)
    assert (found["top_k"], found["max_new_tokens"], found["sampling_seed"], found["n"]) == (1, 7, 5, 3)
    assert (found["stop"], found["stop_regex"], found["stop_token_ids"]) == (["a"], ["b+"], [3, 9])


def test_a_grammar_is_not_for_thoughts() -> None:
    assert pool_options(settled(regex="a"), 10, 4096, reasoning=True)["require_reasoning"] is True
    assert pool_options(settled(regex="a"), 10, 4096)["require_reasoning"] is False
    assert pool_options(settled(), 10, 4096, reasoning=True)["require_reasoning"] is False


def test_headers_hold_what_the_api_has_no_field_for() -> None:
    assert read_options({}) == {"timeout": None, "min_version": 0, "version": None, "retry_busy": True}
    headers = {"x-enginepool-timeout": "2.5", "x-enginepool-min-version": "7", "x-enginepool-retry-busy": "false"}
    assert read_options(headers, 9.0) == {"timeout": 2.5, "min_version": 7, "version": None, "retry_busy": False}
    assert read_options({"x-enginepool-version": "3"})["version"] == 3
    assert read_options({}, 9.0)["timeout"] == 9.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", "soon"),
        ("timeout", "nan"),
        ("timeout", "-1"),
        ("min-version", "1.5"),
        ("version", "x"),
        ("retry-busy", "1"),
    ],
)
def test_a_header_that_cannot_be_served_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(BadRequest) as failed:
        read_options({f"x-enginepool-{name}": value})
    assert failed.value.field == f"x-enginepool-{name}"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest("max_new_tokens: 0", field="max_new_tokens"), 400),
        (UnknownGroup("group: none"), 404),
        (Busy("the queue is full", retry_after_s=1.5), 429),
        (EngineFailed("NaN"), 500),
        (PoolDown("no worker is left"), 503),
        (Interrupted("interrupted"), 503),
        (DeadlineExceeded("too late"), 504),
    ],
)
def test_an_error_of_the_pool_has_a_status_and_its_own_code(error: Any, status: int) -> None:
    assert status_of(error) == status
    assert (body_of(error)["error"]["code"], body_of(error)["error"]["type"]) == (status, error.code)


def test_an_error_names_the_field_as_the_api_does() -> None:
    error = body_of(BadRequest("max_new_tokens: 0 is outside 1..9", field="max_new_tokens"))["error"]
    assert (error["message"], error["param"]) == ("max_tokens: 0 is outside 1..9", "max_tokens")
    assert body_of(BadRequest("stop[3]: empty", field="stop[3]"))["error"]["param"] == "stop[3]"
    assert body_of(EngineFailed("NaN"))["error"]["param"] is None


def test_settings_that_would_touch_an_engine_are_refused() -> None:
    check_settings(None, dict.fromkeys(SETTINGS))
    for name in ("tp_size", "enable_custom_logit_processor", "lora_paths", "trust_request_chat_template", "device"):
        with pytest.raises(ValueError, match=f"has no argument '{name}'"):
            check_settings(None, {name: 1})
    with pytest.raises(ValueError, match=r"^model: int"):
        check_settings(3, {})


class NoPool(OpenAICalls):
    _openai_endpoints: dict[str, Any] = {}  # noqa: RUF012


def test_what_is_not_installed_is_named_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        return None if name in ("openai", "jsonschema") else name

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(
        ConfigError, match=r'^openai: jsonschema, openai: not installed here; pip install "enginepool\[openai\]"$'
    ):
        NoPool().openai()


def test_each_adapter_is_one_model_whether_engines_started_with_it_or_it_was_loaded_later() -> None:
    limits = GroupLimits("causal", 8, 8, 8, operations=("generate",), adapters=("later", "math"))
    group = GroupStatus("policy", limits=limits, adapters=[AdapterStatus("later", 1, "")])

    class Status:
        async def status(self, within: float | None) -> StatusReport:
            return StatusReport(1, groups=[group])

    class Ready(Endpoints):
        async def _serving(self, within: float | None) -> Any:
            return SimpleNamespace(manager=SimpleNamespace(served_model_name="m"))

    reply = asyncio.run(Ready(Status(), "", None, {}).answer("GET", "/v1/models", {}, b"", None))
    assert isinstance(reply.body, bytes)
    assert [card["id"] for card in json.loads(reply.body)["data"]] == ["m", "m:later", "m:math"]


def test_the_context_of_the_engines_counts_also_where_it_was_not_known_to_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that needs weights counts as ready, and has no limits."""
    limits = GroupLimits("causal", 8, 100, 8, operations=("generate",))
    manager = SimpleNamespace(context_len=4096, served_model_name="m")

    def build(model: str, settings: Any) -> Any:
        return SimpleNamespace(manager=manager)

    monkeypatch.setattr(endpoints, "build", build)
    group = GroupStatus("policy", model="m", needs_weights="publish them")

    class Status:
        async def status(self, within: float | None) -> StatusReport:
            return StatusReport(1, groups=[group])

        async def ready(self, group: str) -> StatusReport:
            return await self.status(None)

    async def main() -> None:
        served = Endpoints(Status(), "", None, {})
        await served.answer("GET", "/v1/models", {}, b"", None)
        assert manager.context_len == 4096
        group.limits = limits
        for _ in range(2):
            await served.answer("GET", "/v1/models", {}, b"", None)
            assert manager.context_len == 100

    asyncio.run(main())
