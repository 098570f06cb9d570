"""Sampling parameters as arguments of the Python API: their names and types, and how one that is wrong is named."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from enginepool.client.arguments import Ids, bad, kind, utf8
from enginepool.client.row_calls import RowOptions
from enginepool.conversion import too_long, wrong_type
from enginepool.protocol.errors import WireError, located
from enginepool.protocol.messages import Sampling
from enginepool.protocol.sampling import GRAMMARS, MASKS, check_sampling

_PYTHON = {"int": "an int", "float": "a number", "str": "a str", "bool": "True or False", "array": "a list", "object": "a dict"}
_TEXTS = ("stop", "stop_regex")
_LISTS = (*_TEXTS, "stop_token_ids", *MASKS, "temperature_schedule")

#: a schema that SGLang knows by name
_ANY_JSON = "$$ANY$$"

#: What the wire calls the sampling parameters.
SAMPLING_NAMES = {f"sampling.{name}": name for name in Sampling.__struct_fields__}


class SamplingOptions(RowOptions, total=False):
    """The sampling parameters of `Pool.generate` and `Pool.stream`: SGLang's, by their own names, and three of the pool's."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    stop: str | Sequence[str] | None
    stop_token_ids: Ids | None
    stop_regex: str | Sequence[str] | None
    ignore_eos: bool
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    sampling_seed: int | None
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    structural_tag: str | None
    allowed_token_ids: Ids | None
    disallowed_token_ids: Ids | None
    temperature_schedule: tuple[float, float, int] | None
    require_reasoning: bool


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """The sampling parameters among `options`; what is not given, or None, has the default of `Sampling`.

    Raises:
        BadRequest: one is out of its range, or of another type.
    """
    named = {name: options[name] for name in Sampling.__struct_fields__ if options.get(name) is not None}
    given = {name: _plain(name, value) for name, value in named.items()}
    try:
        sampling = msgspec.convert(given, Sampling)
    except msgspec.ValidationError as error:
        field, what = located(str(error))
        length, most = too_long(what, given, field)
        if most:
            raise bad(field, f"{field}: {length}; at most {most}", most) from None
        allowed, received = wrong_type(what, _PYTHON)
        if field == "temperature_schedule":
            allowed = "three numbers: the first temperature, the last one, and over how many tokens"
        name = field.partition("[")[0]
        shown = kind(given.get(name)) if field == name else received
        field = "logit_bias" if name == "logit_bias" else field
        raise bad(field, f"{field}: {shown}; must be {allowed}" if allowed else f"{field}: {what}") from None
    try:
        check_sampling(sampling)
    except WireError as error:
        field, message = (text.removeprefix("sampling.") for text in (error.field, error.message))
        raise bad(field, message, error.limit) from None
    for name in _TEXTS:
        for at, text in enumerate(getattr(sampling, name)):
            utf8(f"{name}[{at}]", text)
    for name in GRAMMARS:
        utf8(name, getattr(sampling, name) or "")
    _check_readable(sampling)
    return sampling


def _check_readable(sampling: Sampling) -> None:
    """Refuse texts that no engine can read. Grammars in other languages are read by the engine alone."""
    for name in ("json_schema", "structural_tag"):
        text = getattr(sampling, name)
        if text is None or text == _ANY_JSON:
            continue
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise bad(name, f"{name}: {error}; a text of JSON") from None
    for at, pattern in enumerate(sampling.stop_regex):
        try:
            re.compile(pattern)
        except (re.error, RecursionError) as error:
            raise bad(f"stop_regex[{at}]", f"stop_regex[{at}]: {error}; a pattern of Python's re") from None


def _plain(name: str, value: Any) -> Any:
    """A value of numpy's, one stop string, or ids in another sequence, as plain Python."""
    if isinstance(value, np.generic | np.ndarray):
        value = cast("Any", value).tolist()
    if name in _TEXTS and isinstance(value, str):
        return [value]
    if name in _LISTS and isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_number(one) for one in cast("Sequence[Any]", value)]
    if name == "logit_bias" and isinstance(value, Mapping):
        return {str(key): _number(bias) for key, bias in cast("Mapping[Any, Any]", value).items()}
    return value


def _number(value: Any) -> Any:
    return cast("Any", value).item() if isinstance(value, np.generic) else value
