"""One sequence as SGLang's scheduler would report it: its new tokens, in the message that goes to the detokenizer.

Which tokens the detokenizer needs for a text, and when a text may be the beginning of a stop string, SGLang's own request class
says.
"""

import asyncio
import importlib
from array import array
from itertools import accumulate
from typing import Any

import msgspec

from enginepool.client.generations import Generation, Generations, TokenChunk

_schedule: Any = importlib.import_module("sglang.srt.managers.schedule_batch")
_messages: Any = importlib.import_module("sglang.srt.managers.io_struct")
_OUTPUT: Any = _messages.BatchTokenIDOutput
_FIELDS: tuple[str, ...] = _OUTPUT.__struct_fields__
#: Its required fields, for those that are not filled here.
_ABSENT: dict[str, Any] = {field.name: None for field in msgspec.structs.fields(_OUTPUT) if field.required}
#: SGLang's form of a span of weight versions; its oldest versions have none.
_Span: Any = None
if "weight_versions" in _FIELDS:
    _Span = importlib.import_module("sglang.srt.utils.weight_versions").WeightVersionSpan


class PoolSequence(_schedule.Req):
    """SGLang's request of a scheduler, with what its methods for the text need, and nothing else: no scheduler has it.

    Args:
        request: SGLang's `TokenizedGenerateReqInput`.
        tokenizer: of the model.
        think_end: the token ids that end its thoughts; empty: it has none.
    """

    def __init__(self, request: Any, tokenizer: Any, think_end: list[int]) -> None:
        self.rid = request.rid
        self.sampling_params = request.sampling_params
        self.tokenizer = tokenizer
        self.origin_input_ids_unpadded = array("q", request.input_ids)
        self.output_ids = array("q")
        self.surr_offset = self.read_offset = self.finished_len = None
        self.reasoning_tokens = self._think_end_match_len = 0
        self._is_reasoning_over = not (request.require_reasoning and think_end)
        self._think_end, self._think_end_matcher = think_end, None
        #: set once SGLang waits for its answers
        self.awaited = asyncio.Event()
        #: of the prompt, those that the engine had in its cache; known at the end
        self.cached_tokens = 0
        self._logprobs: list[float] | None = [] if request.return_logprob else None
        #: ids and logprobs of the most probable tokens in the place of each token; empty: they are not asked for
        self._top: tuple[list[Any], list[Any]] = ([], [])
        #: of the tokens of the prompt, as SGLang has them: logprobs, ids and logprobs of the most probable ones
        self._prompt: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        #: tokens that were reported, and ids that the detokenizer has
        self._reported = self._decoded = 0
        self._over = False
        #: [version, tokens] of the weights that computed them
        self._spans: list[list[int]] = []

    def add(self, new: Generation | TokenChunk, part: slice, version: int) -> None:
        """The next tokens: those in this part of `new`."""
        token_ids: list[int] = new.token_ids[part].tolist()
        self.output_ids.extend(token_ids)
        self.update_reasoning_tokens(token_ids, self._think_end)
        if self._logprobs is not None and new.logprobs is not None:
            self._logprobs.extend(new.logprobs[part].tolist())
            if new.top_ids is not None and new.top_logprobs is not None:
                self._top[0].extend(new.top_ids[part].tolist())
                self._top[1].extend(new.top_logprobs[part].tolist())
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1][1] += len(token_ids)
        elif len(token_ids):
            self._spans.append([version, len(token_ids)])

    def add_prompt(self, whole: Generations) -> None:
        """The log-probabilities of its prompt, the only one of `whole`. Its first token has none."""
        for into, found in zip(
            self._prompt, (whole.prompt_logprobs, whole.prompt_top_ids, whole.prompt_top_logprobs), strict=True
        ):
            if found is not None and found[0] is not None:
                into[:] = [None, *found[0][1:].tolist()]

    @property
    def has_ended(self) -> bool:
        """It was reported as finished."""
        return self._over

    @property
    def version(self) -> int | None:
        """Of the weights that computed its last token; None: it has none."""
        return self._spans[-1][0] if self._spans else None

    def report(self, finished: dict[str, Any] | None = None) -> Any:
        """A `BatchTokenIDOutput` of the tokens that were not reported yet.

        Args:
            finished: SGLang's finish reason; None while the sequence goes on. Then there is no message, None, where its text
                may be the beginning of a stop string, or nothing is new.
        """
        total = len(self.output_ids)
        if finished is None and (total == self._reported or self.check_match_stop_str_prefix()):
            return None
        ids, read_offset = self.init_incremental_detokenize()
        new = self.output_ids[self._reported :]
        decode = ids[self._decoded :]
        params = self.sampling_params
        known: dict[str, Any] = {
            "rids": [self.rid],
            "finished_reasons": [finished],
            "decoded_texts": [""],
            "decode_ids": [decode],
            "read_offsets": [read_offset],
            "output_ids": [new],
            "skip_special_tokens": [params.skip_special_tokens],
            "spaces_between_special_tokens": [params.spaces_between_special_tokens],
            "no_stop_trim": [params.no_stop_trim],
            "prompt_tokens": [len(self.origin_input_ids_unpadded)],
            "reasoning_tokens": [self.reasoning_tokens],
            "completion_tokens": [total],
            "cached_tokens": [self.cached_tokens],
            "retraction_counts": [0],
            "weight_versions": [self._version_spans()],
        }
        if self._logprobs is not None:
            logprobs, top_ids, top_logprobs = self._prompt
            known |= {
                "input_token_logprobs_val": [logprobs],
                "input_token_logprobs_idx": [self.origin_input_ids_unpadded.tolist() if logprobs else []],
                "input_top_logprobs_val": [top_logprobs],
                "input_top_logprobs_idx": [top_ids],
                "output_token_logprobs_val": [self._logprobs[self._reported :]],
                "output_token_logprobs_idx": [new.tolist()],
                "output_top_logprobs_val": [self._top[1][self._reported :]],
                "output_top_logprobs_idx": [self._top[0][self._reported :]],
            }
            self._prompt = ([], [], [])
        self._reported, self._decoded = total, len(ids)
        self._over = finished is not None
        return _OUTPUT(**(_ABSENT | {name: value for name, value in known.items() if name in _FIELDS}))

    def _version_spans(self) -> list[Any] | None:
        if _Span is None or not self._spans:
            return None
        ends = list(accumulate(count for _, count in self._spans))
        return [
            _Span(version=str(version), start=end - count, end=end)
            for (version, count), end in zip(self._spans, ends, strict=True)
        ]
