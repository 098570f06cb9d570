"""One sequence as SGLang's scheduler would report it: its new tokens, in the message that goes to the detokenizer.

Which tokens the detokenizer needs for a text, and when a text may be the beginning of a stop string, SGLang's own request class
says.
"""

import asyncio
import importlib
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

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
        #: tokens that were reported, and ids that the detokenizer has
        self._reported = self._decoded = 0
        self._over = False
        #: [version, tokens] of the weights that computed them
        self._spans: list[list[int]] = []

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, version: int) -> None:
        """The next tokens."""
        self.output_ids.extend(token_ids)
        self.update_reasoning_tokens(list(token_ids), self._think_end)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.extend(logprobs)
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1][1] += len(token_ids)
        elif len(token_ids):
            self._spans.append([version, len(token_ids)])

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
            known |= {
                "input_token_logprobs_val": [[]],
                "input_token_logprobs_idx": [[]],
                "output_token_logprobs_val": [self._logprobs[self._reported :]],
                "output_token_logprobs_idx": [new.tolist()],
            }
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
