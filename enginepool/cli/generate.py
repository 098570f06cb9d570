"""`enginepool generate`: a file of prompts through a running pool, into a file of generations."""

import base64
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginepool.cli.file_command import file_command
from enginepool.cli.jsonl import InputLine

if TYPE_CHECKING:
    import numpy.typing as npt

    from enginepool.client.pool import Pool

#: below the requests of others who share the pool
LOW_PRIORITY = -100


class GenerateLine(InputLine, forbid_unknown_fields=True):
    """An input line: the options of `Pool.generate`, by their own names."""

    prompt: str | list[int] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool | None = None
    hidden_states: bool | None = None
    routed_experts: bool | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    allowed_token_ids: list[int] | None = None
    disallowed_token_ids: list[int] | None = None
    temperature_schedule: list[float | int] | None = None
    require_reasoning: bool | None = None
    images: str | list[str] | None = None
    videos: str | list[str] | None = None
    audio: str | list[str] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt: empty" if self.prompt is not None else "needs prompt")
        for name in ("images", "videos", "audio"):
            media: str | list[str] | None = getattr(self, name)
            for at, url in enumerate([media] if isinstance(media, str) else media or ()):
                if not url.lower().startswith(("data:", "https:", "http:")):
                    where = name if isinstance(media, str) else f"{name}[{at}]"
                    raise ValueError(f"{where}: {url[:40]!r}; a URL (https:, http: or data:)")


def _encoded(array: "npt.NDArray[Any]") -> dict[str, Any]:
    """A large array, in a third of the space that its numbers would take as text."""
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": data}


def _own_key(text: str) -> str:
    """`prompt` instead of the name at the beginning that the client has for the prompts of a call."""
    return re.sub(r"^prompts(\[0\])?(?!\w)", "prompt", text)


async def _ask(pool: "Pool", line: GenerateLine, settings: dict[str, Any]) -> dict[str, Any]:
    from enginepool.errors import EnginepoolError

    assert line.prompt is not None
    try:
        found = await pool.generate(line.prompt, **settings)
    except EnginepoolError as error:
        error.args, error.field = (_own_key(error.args[0]),), _own_key(error.field)
        raise
    samples: list[dict[str, Any]] = []
    for one in found[0]:
        sample: dict[str, Any] = {"token_ids": one.token_ids.tolist(), "finish_reason": one.finish_reason}
        if one.matched is not None:
            sample["matched"] = one.matched
        if one.logprobs is not None:
            sample["logprobs"] = one.logprobs.tolist()
        if one.top_ids is not None and one.top_logprobs is not None:
            sample |= {"top_ids": one.top_ids.tolist(), "top_logprobs": one.top_logprobs.tolist()}
        for name in ("hidden_states", "routed_experts"):
            if (array := getattr(one, name)) is not None:
                sample[name] = _encoded(array)
        samples.append(sample)
    columns: dict[str, Any] = {"samples": samples}
    if found.prompt_logprobs is not None and found.prompt_logprobs[0] is not None:
        columns["prompt_logprobs"] = found.prompt_logprobs[0].tolist()
        if found.prompt_top_ids is not None and found.prompt_top_logprobs is not None:
            ids, chances = found.prompt_top_ids[0], found.prompt_top_logprobs[0]
            assert ids is not None and chances is not None
            columns |= {"prompt_top_ids": ids.tolist(), "prompt_top_logprobs": chances.tolist()}
    return columns | {"version": found.version, "tokens": found.usage.output_tokens, "workers": found.workers}


@file_command(GenerateLine, _ask, priority=LOW_PRIORITY)
def generate(
    n: Annotated[int, typer.Option("--n", min=1, help="Samples of each prompt.")] = 1,
    max_new_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens of a sample, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", min=0.0, help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="Of the likeliest tokens, those that make up P.")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Of the K likeliest tokens; -1: of all.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a sample; may be given several times.")] = None,
    sampling_seed: Annotated[
        int | None, typer.Option("--seed", metavar="SEED", min=0, help="Equal prompts get equal samples.")
    ] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="The logarithm of each token's probability, too.")] = False,
    top_logprobs: Annotated[
        int, typer.Option(metavar="K", min=0, max=20, help="And of the K likeliest tokens in its place.")
    ] = 0,
    prompt_logprobs: Annotated[
        bool, typer.Option("--prompt-logprobs", help="The same of each token of the prompts; null for the first.")
    ] = False,
    hidden_states: Annotated[
        bool, typer.Option("--hidden-states", help="The hidden state from which each token was chosen, as base64.")
    ] = False,
    routed_experts: Annotated[
        bool, typer.Option("--routed-experts", help="To which experts each layer routed each token, as base64.")
    ] = False,
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="The LoRA adapter of the group that generates.")] = None,
) -> dict[str, Any]:
    """Continue a file of prompts through a running pool.

    It reads, writes, stops and continues as `enginepool score` does. A sample whose worker is lost goes on elsewhere.

    A line of IN is {"prompt": ...}: a text, or a list of token ids. It may have an "id", which comes back with the answer, and
    any of n, logprobs, top_logprobs, prompt_logprobs, hidden_states, routed_experts, adapter, the sampling parameters of
    Pool.generate, group, priority, timeout, min_version, version for itself; and "images", "videos" and "audio", each a data:
    or https: URL or a list of them.

    A line of OUT has "line", the number of the line in IN (answers come in any order), and "samples", each with its
    "token_ids", its "finish_reason" and what else was asked for; or "error" with a code and a message. Exit code 1 if any line
    has an error. The tokenizer of the model makes text of the ids. Hidden states and routed experts are arrays: "dtype",
    "shape", and "base64" of their little-endian bytes.

    \b
    Examples:
      enginepool generate prompts.jsonl samples.jsonl --max-new-tokens 256 --temperature 0
      enginepool generate prompts.jsonl samples.jsonl --n 8 --logprobs --group policy
    """
    settings = dict.fromkeys(GenerateLine.__struct_fields__)
    for name in ("id", "prompt", "group", "priority", "timeout", "min_version", "version"):
        del settings[name]
    settings |= {"n": n, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    settings |= {"logprobs": logprobs, "top_logprobs": top_logprobs, "prompt_logprobs": prompt_logprobs}
    settings |= {"hidden_states": hidden_states, "routed_experts": routed_experts}
    return settings | {"stop": stop or None, "sampling_seed": sampling_seed, "adapter": adapter}
