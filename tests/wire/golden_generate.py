"""The golden messages of generation, valid and invalid."""

from typing import Any

from tests.wire.golden import Array, Invalid, Valid, floats, ids, lengths, pack, text

EPOCH = 1_700_000_000_000_000
GENERATING: dict[str, Any] = {
    "kind": "causal",
    "vocab": 1000,
    "context": 16,
    "batch_tokens": 128,
    "batch_rows": 8,
    "inflight_tokens": 128,
    "inflight_rows": 8,
    "operations": ["generate"],
    "features": ["stop_text", "image", "media_url"],
}
MIXED = GENERATING | {
    "batch_rows": 4,
    "operations": ["score", "logprobs", "generate"],
    "sequences": 32,
    "sequence_tokens": 4096,
    "sequence_context": 512,
}
PROMPTS = (ids("items", 21, 22, 23), lengths("item_lengths", 2, 1))
OUTPUT = (ids("output", 31, 32), lengths("output_lengths", 2, 0, 0, 0))


#: two images of prompt 0: bytes, and a URL
MEDIA = (Array("media", "uint8", (11,), (137, 80, 78, 71, *b"https:a")), lengths("media_lengths", 4, 7))
IMAGES = [[0, "image", "bytes"], [0, "image", "url"]]


def _specs(*arrays: Array) -> list[Any]:
    return [array.spec() for array in arrays]


def _generate(*arrays: Array, **after: Any) -> dict[str, Any]:
    return {"type": "generate", "id": 1, "frames": _specs(*arrays), **after}


def _from_client() -> list[Valid]:
    way = "client-coordinator"
    words = (text("items", "Once upon a time"), lengths("item_lengths", 16))
    every = {
        "max_new_tokens": 8,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 40,
        "min_p": 0.125,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "stop": ["\n\n"],
        "stop_token_ids": [7],
        "stop_regex": ["[0-9]+"],
        "ignore_eos": True,
        "logit_bias": {"5": -2.5},
        "sampling_seed": 42,
    }
    return [
        Valid("generate", way, "two prompts, greedy", _generate(*PROMPTS, sampling={"temperature": 0.0}), PROMPTS, exact=False),
        Valid(
            "generate-text",
            way,
            "text, with every sampling parameter but the grammars",
            _generate(*words, sampling=every),
            words,
            exact=False,
        ),
        *(
            Valid(
                f"generate-{name.replace('_', '-')}",
                way,
                f"with {name}",
                _generate(*PROMPTS, sampling={name: value}),
                PROMPTS,
                exact=False,
            )
            for name, value in (
                ("json_schema", '{"type": "object"}'),
                ("regex", "[a-z]+"),
                ("ebnf", 'root ::= "a"'),
                ("structural_tag", '{"type": "structural_tag"}'),
                ("allowed_token_ids", [5, 9]),
                ("disallowed_token_ids", [7]),
                ("temperature_schedule", [1.0, 0.25, 6]),
            )
        ),
        Valid(
            "generate-reasoning",
            way,
            "a grammar that begins after the thoughts",
            _generate(*PROMPTS, sampling={"regex": "[a-z]+", "require_reasoning": True}),
            PROMPTS,
            exact=False,
        ),
        Valid(
            "generate-stream",
            way,
            "a stream with all other fields, sent again: sequence 0 has two tokens, sequence 3 has ended",
            _generate(
                *PROMPTS,
                *OUTPUT,
                group="policy",
                n=2,
                sampling={"max_new_tokens": 8},
                stream=True,
                credit=64,
                logprobs=True,
                top_logprobs=2,
                prompt_logprobs=True,
                partial=True,
                ended=[[3, "stop", 7]],
                priority=-5,
                timeout_ms=30000,
                min_version=3,
                version=4,
                adapter="french",
                hidden_states=True,
            ),
            (*PROMPTS, *OUTPUT),
            exact=False,
        ),
        Valid(
            "generate-media",
            way,
            "a stream whose first prompt has two images, sent again with a token",
            _generate(*PROMPTS, *OUTPUT, *MEDIA, n=2, sampling={"max_new_tokens": 8}, stream=True, media=IMAGES),
            (*PROMPTS, *OUTPUT, *MEDIA),
            exact=False,
        ),
        Valid(
            "generate-experts",
            way,
            "with the experts of each token",
            _generate(*PROMPTS, routed_experts=True),
            PROMPTS,
            exact=False,
        ),
        Valid("credit", way, "100 tokens of stream 1 were taken", {"type": "credit", "id": 1, "taken": 100}),
    ]


def _to_client() -> list[Valid]:
    way = "coordinator-client"
    tokens = (ids("tokens", 31, 32, 41), floats("logprobs", (3,), -0.5, -0.25, -1.0))
    details = (
        floats("logprobs", (2,), -0.5, -0.25),
        Array("top_ids", "int32", (2, 2), (31, 7, 32, 9)),
        floats("top_logprobs", (2, 2), -0.5, -2.0, -0.25, -3.0),
        floats("prompt_logprobs", (2,), 0.0, -1.5),
        Array("prompt_top_ids", "int32", (2, 2), (-1, -1, 22, 7)),
        floats("prompt_top_logprobs", (2, 2), 0.0, 0.0, -1.5, -2.5),
    )
    states = floats("hidden_states", (2, 3), 0.5, -1.0, 2.0, 0.25, 0.0, -4.0)
    hidden = (ids("tokens", 31, 32), states)
    experts = Array("routed_experts", "int16", (8, 2), (0, 5, 3, 1, 2, 4, 0, 1, 7, 6, 1, 0, 5, 2, 3, 4))
    with_experts = (ids("output", 31, 32, 33), lengths("output_lengths", 2, 1), experts)
    with_hidden = (ids("output", 31, 32), lengths("output_lengths", 2), states)
    top = (ids("tokens", 31, 32), *details)
    whole = (ids("output", 31, 32), lengths("output_lengths", 0, 2), *details)
    output = (ids("output", 31, 32, 33, 41), lengths("output_lengths", 3, 1), floats("logprobs", (4,), -0.5, -0.25, 0.0, -1.0))
    return [
        Valid(
            "tokens",
            way,
            "two tokens of one sequence, and the last one of another",
            {
                "type": "tokens",
                "runs": [[1, 0, 0, 2, 3], [1, 1, 0, 1, 3]],
                "frames": _specs(*tokens),
                "ended": [[1, 1, "stop", 41]],
            },
            tokens,
        ),
        Valid(
            "generated",
            way,
            "two sequences, the first computed by two weight versions",
            {
                "type": "generated",
                "id": 1,
                "version": 4,
                "usage": [2, 3, 4, 2],
                "timings": [150, 70000],
                "ended": [[0, "length", None], [1, "stop", 41]],
                "spans": [[[3, 2], [4, 1]], [[3, 1]]],
                "frames": _specs(*output),
            },
            output,
            exact=False,
        ),
        Valid(
            "tokens-top",
            way,
            "the two most probable tokens in the place of each token, and the log-probabilities of a prompt",
            {
                "type": "tokens",
                "runs": [[1, 0, 0, 2, 3]],
                "frames": _specs(*top),
                "prompts": [[1, 0, 2]],
            },
            top,
        ),
        Valid(
            "tokens-hidden",
            way,
            "two tokens with their hidden states",
            {"type": "tokens", "runs": [[1, 0, 0, 2, 3]], "frames": _specs(*hidden)},
            hidden,
        ),
        Valid(
            "generated-hidden",
            way,
            "with the hidden states of the tokens",
            {
                "type": "generated",
                "id": 1,
                "version": 3,
                "usage": [1, 3, 2, 0],
                "timings": [150, 70000],
                "ended": [[0, "length", None]],
                "spans": [[[3, 2]]],
                "frames": _specs(*with_hidden),
            },
            with_hidden,
            exact=False,
        ),
        Valid(
            "generated-experts",
            way,
            "of a prompt of three tokens: the experts of the first sequence, in two layers; the second one was interrupted",
            {
                "type": "generated",
                "id": 1,
                "version": 3,
                "usage": [2, 3, 3, 0],
                "timings": [150, 70000],
                "ended": [[0, "length", None], [1, "interrupted", None]],
                "spans": [[[3, 2]], [[3, 1]]],
                "frames": _specs(*with_experts),
                "experts": [4, 0],
            },
            with_experts,
            exact=False,
        ),
        Valid(
            "generated-top",
            way,
            "with the two most probable tokens, and the log-probabilities of the second of two prompts",
            {
                "type": "generated",
                "id": 1,
                "version": 3,
                "usage": [2, 3, 2, 0],
                "timings": [150, 70000],
                "ended": [[0, "interrupted", None], [1, "length", None]],
                "spans": [[], [[3, 2]]],
                "frames": _specs(*whole),
                "prompts": [[1, 2]],
            },
            whole,
            exact=False,
        ),
        Valid(
            "generated-continued",
            way,
            "the request brought two tokens of the first sequence along; two workers generated the others",
            {
                "type": "generated",
                "id": 1,
                "version": 4,
                "usage": [2, 3, 4, 0],
                "timings": [150, 70000],
                "ended": [[0, "interrupted", None], [1, "stop", "\n\n"]],
                "spans": [[[4, 1]], [[4, 1]]],
                "frames": _specs(ids("output", 33, 41), lengths("output_lengths", 1, 1)),
                "starts": [2, 0],
                "workers": ["policy-1", "policy-0"],
                "places": [[[0, 2]], [[1, 0]]],
                "adapters": [[[1, 2]], [[1, 0]]],
            },
            (ids("output", 33, 41), lengths("output_lengths", 1, 1)),
            exact=False,
        ),
    ]


def _workers() -> list[Valid]:
    prompt = (ids("prompt", 21, 22, 31, 32),)
    tokens = (ids("tokens", 33, 34, 41), floats("logprobs", (3,), -0.5, -0.25, -1.0))
    none = (ids("tokens"),)
    blocks = (Array("stored", "uint64", (2, 2), (0, 11, 11, 1 << 40)), Array("removed", "uint64", (1,), (9,)))
    gone = (Array("stored", "uint64", (0, 2), ()), Array("removed", "uint64", (0,), ()))
    routed = (ids("tokens", 33), Array("routed_experts", "int16", (4, 2), (0, 5, 3, 1, 2, 4, 0, 1)))
    hidden = (ids("tokens", 33), floats("hidden_states", (1, 3), 0.5, -1.0, 2.0))
    top = (
        ids("tokens", 33),
        floats("logprobs", (1,), -0.5),
        Array("top_ids", "int32", (1, 2), (33, 7)),
        floats("top_logprobs", (1, 2), -0.5, -2.0),
        floats("prompt_logprobs", (2,), 0.0, -1.5),
        Array("prompt_top_ids", "int32", (2, 2), (-1, -1, 22, 7)),
        floats("prompt_top_logprobs", (2, 2), 0.0, 0.0, -1.5, -2.5),
    )
    return [
        Valid(
            "ready-generating",
            "worker-coordinator",
            "a worker that generates",
            {"type": "ready", "capabilities": GENERATING},
            exact=False,
        ),
        Valid(
            "ready-mixed",
            "worker-coordinator",
            "a worker that generates and scores",
            {"type": "ready", "capabilities": MIXED},
            exact=False,
        ),
        Valid(
            "progress",
            "worker-coordinator",
            "two tokens of one task, and the last one of another",
            {
                "type": "progress",
                "epoch": EPOCH,
                "version": 4,
                "steps": [[8, 0, 2, 2, "", None], [9, 1, 0, 1, "stop", 41]],
                "frames": _specs(*tokens),
                "cached": [[8, 3]],
                "lengths": [[8, 270]],
            },
            tokens,
        ),
        Valid(
            "progress-top",
            "worker-coordinator",
            "a task with the two most probable tokens in the place of each token, and the log-probabilities of its prompt",
            {
                "type": "progress",
                "epoch": EPOCH,
                "version": 4,
                "steps": [[8, 0, 0, 1, "", None]],
                "frames": _specs(*top),
                "prompts": [[8, 2]],
            },
            top,
        ),
        Valid(
            "progress-hidden",
            "worker-coordinator",
            "a token with its hidden state",
            {
                "type": "progress",
                "epoch": EPOCH,
                "version": 4,
                "steps": [[8, 0, 0, 1, "", None]],
                "frames": _specs(*hidden),
            },
            hidden,
        ),
        Valid(
            "progress-experts",
            "worker-coordinator",
            "the end of a sequence, with the experts of its two tokens before the last one, in two layers",
            {
                "type": "progress",
                "epoch": EPOCH,
                "version": 4,
                "steps": [[8, 0, 0, 1, "stop", 33]],
                "frames": _specs(*routed),
                "experts": [[8, 0, 2]],
            },
            routed,
        ),
        Valid(
            "prefix-blocks",
            "worker-coordinator",
            "the engine has evicted a block, and has two others, the second after the first",
            {"type": "prefix_blocks", "frames": _specs(*blocks)},
            blocks,
        ),
        Valid(
            "prefix-blocks-cleared",
            "worker-coordinator",
            "the engine has forgotten all prefixes",
            {"type": "prefix_blocks", "frames": _specs(*gone), "cleared": True},
            gone,
        ),
        Valid(
            "progress-error",
            "worker-coordinator",
            "the engine refused a task",
            {
                "type": "progress",
                "epoch": EPOCH,
                "version": 4,
                "steps": [[8, 0, 0, 0, "error", "no grammar backend"]],
                "frames": _specs(*none),
            },
            none,
        ),
        Valid(
            "start",
            "coordinator-worker",
            "a sequence that has two tokens goes on",
            {
                "type": "start",
                "task": [EPOCH, 8],
                "frames": _specs(*prompt),
                "sampling": {"max_new_tokens": 6},
                "n": 2,
                "at": 2,
                "logprobs": True,
                "top_logprobs": 2,
                "prompt_logprobs": 2,
                "priority": 5,
                "adapter": "french",
                "hidden_states": True,
                "routed_experts": True,
            },
            prompt,
            exact=False,
        ),
        Valid(
            "start-media",
            "coordinator-worker",
            "a prompt with two images",
            {
                "type": "start",
                "task": [EPOCH, 10],
                "frames": _specs(*prompt, *MEDIA),
                "sampling": {"max_new_tokens": 6},
                "media": IMAGES,
            },
            (*prompt, *MEDIA),
            exact=False,
        ),
        Valid(
            "stop", "coordinator-worker", "two tasks are no longer wanted", {"type": "stop", "epoch": EPOCH, "tasks": [8, 9]}
        ),
    ]


VALID = [*_from_client(), *_to_client(), *_workers()]


def _refused(
    name: str, about: str, code: str, field: str, *arrays: Array, stage: str, model: str = "", **changes: Any
) -> Invalid:
    arrays = arrays or PROMPTS
    frames = [pack(_generate(*arrays, **changes)).hex(), *(array.payload().hex() for array in arrays)]
    return Invalid(f"generate-{name}", "client-coordinator", about, code, field, stage, frames, model)


def _sampling(name: str, about: str, field: str, stage: str = "content", **sampling: Any) -> Invalid:
    """A parameter that is refused by its name; at the stage `model`, by a small model."""
    model = "generating" if stage == "model" else ""
    if model:
        sampling = {"max_new_tokens": 4, **sampling}
    return _refused(name, about, "bad_request", f"sampling.{field}", stage=stage, model=model, sampling=sampling)


def _parameters() -> list[Invalid]:
    m = "model"
    return [
        _sampling("temperature-text", "temperature is a number", "temperature", "header", temperature="1"),
        _refused("sampling-unknown", "no such name", "bad_request", "sampling", stage="header", sampling={"temprature": 1.0}),
        _sampling("temperature-negative", "less than none", "temperature", temperature=-1.0),
        _sampling("stop-regex-many", "33 patterns", "stop_regex", "header", stop_regex=["a"] * 33),
        _sampling("stop-regex-long", "258 bytes of UTF-8", "stop_regex[1]", stop_regex=["a", "é" * 129]),
        _sampling("top-k-zero", "none of the tokens", "top_k", top_k=0),
        _sampling("no-tokens", "nothing to generate", "max_new_tokens", max_new_tokens=0),
        _sampling("grammar-empty", "no text", "regex", regex=""),
        _sampling("grammar-without-end", "its text ends", "ignore_eos", regex="a", ignore_eos=True),
        _sampling("temperature-too-high", "float32 ends", "temperature", temperature=1e7),
        _sampling("penalty-too-low", "float32 ends", "repetition_penalty", repetition_penalty=0.001),
        _sampling("bias-too-high", "float32 ends", "logit_bias", logit_bias={"7": 2e20}),
        _sampling("two-grammars", "one at most", "ebnf", regex="a", ebnf="b"),
        _sampling("allowed-none", "no token is left", "allowed_token_ids", allowed_token_ids=[]),
        _sampling("two-masks", "one at most", "disallowed_token_ids", allowed_token_ids=[1], disallowed_token_ids=[2]),
        _sampling("mask-and-grammar", "one at most", "allowed_token_ids", regex="a", allowed_token_ids=[1]),
        _sampling("schedule-of-none", "no token", "temperature_schedule", temperature_schedule=[1.0, 0.0, 0]),
        _sampling("two-temperatures", "one", "temperature_schedule", temperature=0.5, temperature_schedule=[1.0, 0.0, 4]),
        _sampling("reasoning-alone", "only with a grammar", "require_reasoning", require_reasoning=True),
        _refused("program", "none is taken", "bad_request", "sampling", stage="header", sampling={"custom_params": {}}),
        _sampling("mask-without-processor", "these workers have none", "allowed_token_ids", m, allowed_token_ids=[1]),
        _sampling("mask-outside", "the vocabulary has 1000", "disallowed_token_ids", m, disallowed_token_ids=[1000]),
        _sampling("bias-of-text", "a token id", "logit_bias", logit_bias={"x": 1.0}),
        _sampling("stop-id-outside", "the vocabulary has 1000", "stop_token_ids", m, stop_token_ids=[1000]),
        _sampling("grammar-without-backend", "these workers have none", "regex", m, regex="a"),
    ]  # fmt: skip


def _requests() -> list[Invalid]:
    bad, c, m = "bad_request", "content", "model"
    output, one, four = ids("output", 1), {"max_new_tokens": 1}, {"max_new_tokens": 4}
    few = (*PROMPTS, ids("output"), lengths("output_lengths", 0))
    more = (*PROMPTS, output, lengths("output_lengths", 2, 0))
    whole = (*PROMPTS, output, lengths("output_lengths", 1, 0))
    return [
        _refused("n-zero", "no sequence", bad, "n", stage=c, n=0),
        _refused("n-huge", "more sequences than a request has", bad, "n", stage=c, n=4096),
        _refused("credit-zero", "a stream that sends nothing", bad, "credit", stage=c, credit=0),
        _refused("with-query", "a prompt has no query", "malformed", "frames", ids("query", 1), *PROMPTS, stage=c),
        _refused("prompt-empty", "row 1", bad, "items[1]", ids("items", 21), lengths("item_lengths", 1, 0), stage=c),
        _refused("output-lengths-few", "two sequences", "malformed", "output_lengths", *few, stage=c),
        _refused("output-sum", "its lengths do not add up", "malformed", "output_lengths", *more, stage=c),
        _refused("output-whole", "it has all, and has not ended", bad, "output_lengths[0]", *whole, stage=c, sampling=one),
        _refused("ended-unknown", "two sequences", bad, "ended[0]", stage=c, ended=[[2, "stop"]]),
        _refused("too-long", "2 + 15 of 16", bad, "items[0]", stage=m, model="generating", sampling={"max_new_tokens": 15}),
        _refused("adapter-unknown", "these workers have none", bad, "adapter", stage=m, model="generating", adapter="french"),
        _refused("adapter-long", "129 characters", bad, "adapter", stage="header", adapter="a" * 129),
        _refused("hidden-and-stop", "one", bad, "sampling.stop", stage=c, sampling={"stop": ["a"]}, hidden_states=True),
        _refused("experts-and-stream", "none", bad, "routed_experts", stage=c, routed_experts=True, stream=True),
        _refused(
            "experts-without", "none", bad, "routed_experts", stage=m, model="generating", sampling=four, routed_experts=True
        ),
        _refused(
            "hidden-without", "none", bad, "hidden_states", stage=m, model="generating", sampling=four, hidden_states=True
        ),
        _refused("by-scoring", "this model scores", bad, "type", stage=m, model="causal", sampling=four),
    ]  # fmt: skip


def _media() -> list[Invalid]:
    bad, c, m = "bad_request", "content", "model"
    (data, sizes), image, one = MEDIA, IMAGES[0], {"max_new_tokens": 4}
    text_, long = Array("media", "utf8", (4,), "abcd"), Array("media", "uint8", (2049,), (97,) * 2049)

    def case(name: str, about: str, code: str, field: str, *arrays: Array, stage: str = c, **changes: Any) -> Invalid:
        model = "generating" if stage == m else ""
        return _refused(f"media-{name}", about, code, field, *PROMPTS, *arrays, stage=stage, model=model, **changes)

    return [
        case("without-frames", "two media", "malformed", "frames", media=IMAGES),
        case("of-text", "bytes are uint8", "malformed", "frames", text_, lengths("media_lengths", 4), media=[image]),
        case("few", "two lengths", "malformed", "frames", data, sizes, media=[image]),
        case("sum", "11 bytes", "malformed", "media_lengths", data, lengths("media_lengths", 4, 6), media=IMAGES),
        case("prompt-unknown", "two prompts", bad, "media[1]", data, sizes, media=[image, [2, "image", "bytes"]]),
        case("out-of-order", "prompt 1, then 0", bad, "media[1]", data, sizes, media=[[1, "image", "bytes"], image]),
        case("empty", "an image of no bytes", bad, "media[0]", data, lengths("media_lengths", 0, 11), media=IMAGES),
        case("kind-unknown", "no such kind", bad, "media[0][1]", data, sizes, stage="header", media=[[0, "smell"], image]),
        case("url-long", "2048 at most", bad, "media[0]", long, lengths("media_lengths", 2049), media=[IMAGES[1]]),
        case("logprobs", "of media", bad, "prompt_logprobs", data, sizes, media=IMAGES, prompt_logprobs=True),
        case("untaken", "no audio", bad, "media[1]", data, sizes, stage=m, media=[image, [0, "audio", "bytes"]], sampling=one),
        case("path", "no media_root", bad, "media[1]", data, sizes, stage=m, media=[image, [0, "image", "path"]], sampling=one),
    ]  # fmt: skip


INVALID = [*_parameters(), *_requests(), *_media()]
