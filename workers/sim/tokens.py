"""The tokens of the sim engine: each is a pure function of all tokens before it, the seed, and the weights.

With the names of `scores`, for the ids p of the prompt and the output so far, as little-endian int32:

    h     = mix((crc + 1) * k), with the column c = 2**34
    token = choices[((h >> 32) * n) >> 32], of n choices, or the next one (modulo n) that nothing forbids
    END   in place of it, if (h modulo 2**32) * end_every < 2**32
    its logprob: the logarithm of ((h >> 41) + 0.5) / 2**23

The most probable tokens in its place are (token + i) modulo vocab, with its logprob less i, for i from 0 on. The logprob of
a token of the prompt is computed as that of a new one, for p up to and with it, and NaN for the first one. The hidden state
from which a token is chosen are the u of `scores` with the columns c = 2**35, 2**35 + 1, … The experts to which a token is
routed are 128 u, rounded down, with the columns c = 2**36, 2**36 + 1, …, layer by layer, for p up to and with it.

The first token of a sample s > 0 has h = mix((crc + 1) * k + A * s), unless the temperature is 0. END ends a sequence, as the
token ids do that its request names; `ignore_eos` lets both pass. Before `min_new_tokens` both are forbidden, and always END as
`token`, and `disallowed_token_ids`. The choices are the vocabulary, or `allowed_token_ids`: one of these is chosen in any case.

With an adapter, the CRC-32 of its name is added to the seed.
"""

import math
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from enginepool.protocol.messages import Sampling
from enginepool.workers.engine import Floats
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.scores import A, C, mix, salt_of, uniform

#: the token with which the model ends a text
END = 2
#: one in so many tokens is END
END_EVERY = 100
_COLUMN, _STATES, _EXPERTS = 1 << 34, 1 << 35, 1 << 36
_64 = (1 << 64) - 1
_32 = 1 << 32


class Drawn(NamedTuple):
    """A token, and whether the sequence ends with it."""

    token: int
    logprob: float
    reason: Literal["", "stop", "length"]


class SimSequence:
    """One sequence while it is generated.

    Args:
        prompt: as bytes of int32.
        sample: which of the samples of its prompt it is.
    """

    __slots__ = ("_choices", "_crc", "_early", "_end_every", "_forbidden", "_sample", "_sampling", "_stops", "count")

    def __init__(self, prompt: bytes | memoryview, sampling: Sampling, sample: int, vocab: int, end_every: int) -> None:
        self._crc = zlib.crc32(prompt)
        self._sampling = sampling
        self._sample = sample if sampling.temperature else 0
        self._stops = {END, *sampling.stop_token_ids}
        self._choices = sorted({*sampling.allowed_token_ids}) if sampling.allowed_token_ids else range(vocab)
        disallowed = {*(sampling.disallowed_token_ids or ())}
        self._end_every = end_every if END in self._choices and END not in disallowed else 0
        #: tokens that are not chosen, and those before `min_new_tokens`
        self._forbidden, self._early = {END} | disallowed, self._stops | disallowed
        #: tokens so far
        self.count = 0

    def hidden_state(self, weights: Weights, size: int) -> Floats:
        """float32 [1, size]: from which its next token is chosen."""
        return uniform(np.array([self._crc + 1], np.uint64), range(_STATES, _STATES + size), salt_of(weights))

    def next(self, weights: Weights) -> Drawn:
        """Its next token, by these weights."""
        sampling, choices = self._sampling, self._choices
        h = (self._crc + 1) * _factor(weights)
        if self._sample:
            h += A * self._sample
            self._sample = 0
        h = mix(h & _64)
        early = self.count < sampling.min_new_tokens
        place = (h >> 32) * len(choices) >> 32
        token = choices[place]
        if self._end_every and not early and (h & (_32 - 1)) * self._end_every < _32:
            token = END
        else:
            forbidden = self._early if early else self._forbidden
            for _ in range(len(forbidden)):
                if token not in forbidden:
                    break
                place = (place + 1) % len(choices)
                token = choices[place]
        self._crc = zlib.crc32(token.to_bytes(4, "little"), self._crc)
        self.count += 1
        logprob = math.log(((h >> 41) + 0.5) / 2**23)
        if not early and not sampling.ignore_eos and token in self._stops:
            return Drawn(token, logprob, "stop")
        return Drawn(token, logprob, "length" if self.count >= sampling.max_new_tokens else "")


def top_of(drawn: Drawn, top: int, vocab: int) -> tuple[list[int], list[float]]:
    """(ids, logprobs) of the most probable tokens in the place of this one."""
    return [(drawn.token + i) % vocab for i in range(top)], [drawn.logprob - i for i in range(top)]


def prompt_logprobs(prompt: bytes | memoryview, count: int, weights: Weights) -> list[float]:
    """Of the first `count` tokens of a prompt, as bytes of int32."""
    out: list[float] = []
    factor, crc = _factor(weights), 0
    for first in range(0, 4 * count, 4):
        crc = zlib.crc32(prompt[first : first + 4], crc)
        out.append(math.log(((mix((crc + 1) * factor & _64) >> 41) + 0.5) / 2**23) if first else math.nan)
    return out


def routed_experts(tokens: bytes | memoryview, shape: tuple[int, int], weights: Weights) -> npt.NDArray[np.int16]:
    """int16 [tokens - 1, layers, k], of prompt and output as bytes of int32, by the weights of now."""
    crcs, (layers, k) = [0], shape
    for first in range(0, len(tokens) - 4, 4):
        crcs.append(zlib.crc32(tokens[first : first + 4], crcs[-1]))
    u = uniform(np.array(crcs[1:], np.uint64) + 1, range(_EXPERTS, _EXPERTS + layers * k), salt_of(weights))
    return (128 * u).astype(np.int16).reshape(-1, layers, k)


def prompt_top_of(
    prompt: bytes | memoryview, logprobs: Sequence[float], top: int, vocab: int
) -> tuple[list[list[int]], list[list[float]]]:
    """(ids, logprobs) of the most probable tokens in the place of each token of a prompt, which has these `logprobs`."""
    tokens = memoryview(prompt).cast("i")[: len(logprobs)]
    ids = [[(token + i) % vocab if at else -1 for i in range(top)] for at, token in enumerate(tokens)]
    return ids, [[logprob - i for i in range(top)] for logprob in logprobs]


@lru_cache(256)
def _factor(weights: Weights) -> int:
    return mix((salt_of(weights) + C * (_COLUMN + 1)) & _64) | 1


def next_token(
    tokens: Sequence[int],
    version: int = 0,
    vocab: int = 151_936,
    *,
    seed: int = 0,
    digest: str = "",
    end_every: int = END_EVERY,
) -> int:
    """The token that follows `tokens`, prompt and output, where nothing is forbidden."""
    sequence = SimSequence(_bytes(tokens), Sampling(), 0, vocab, end_every)
    return sequence.next(Weights(seed, version, digest)).token


def expected_output(
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    sample: int = 0,
    spans: Sequence[tuple[int, int]] = (),
    digests: Mapping[int, str] | None = None,
    vocab: int = 151_936,
    seed: int = 0,
    end_every: int = END_EVERY,
    adapter: str = "",
) -> tuple[list[int], list[float], str]:
    """(tokens, logprobs, reason) of a whole sequence, however often it was interrupted.

    Args:
        spans: (version, tokens) as its answer has them; the last version goes on without an end. Without any: version 0.
        digests: of the versions; "" where it has none.
    """
    sequence = SimSequence(_bytes(prompt), sampling, sample, vocab, end_every)
    tokens: list[int] = []
    logprobs: list[float] = []
    versions = [version for version, count in spans for _ in range(count)] or [0]
    while True:
        version = versions[min(len(tokens), len(versions) - 1)]
        weights = Weights(seed, version, (digests or {}).get(version, ""))
        drawn = sequence.next(weights.with_adapter(adapter))
        tokens.append(drawn.token)
        logprobs.append(drawn.logprob)
        if drawn.reason:
            return tokens, array("f", logprobs).tolist(), drawn.reason


def expected_states(prompt: Sequence[int], output: Sequence[int], size: int) -> Floats:
    """float32 [output, size]: the hidden states from which these tokens are chosen, by weights of version 0."""
    ends = range(len(prompt), len(prompt) + len(output))
    crcs = [zlib.crc32(_bytes([*prompt, *output][:end])) + 1 for end in ends]
    return uniform(np.array(crcs, np.uint64), range(_STATES, _STATES + size), salt_of(Weights()))


def expected_experts(prompt: Sequence[int], output: Sequence[int], shape: tuple[int, int]) -> npt.NDArray[np.int16]:
    """As `routed_experts`, by weights of version 0."""
    return routed_experts(_bytes([*prompt, *output]), shape, Weights())


def _bytes(tokens: Sequence[int]) -> bytes:
    ids = array("i", tokens)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tobytes()
