"""What an engine's tokenizer makes of texts and of token ids, and how long the text of a token is. No SGLang here."""

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any, TypeVar

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import EngineError
from enginepool.workers.log import say
from enginepool.workers.sglang.host.lifetime import one_line
from enginepool.workers.sglang.host.tokenizer import tokenizer_of
from enginepool.workers.sglang.text.text_ids import text_ids
from enginepool.workers.texts import TextIds, TextTask

T = TypeVar("T")
#: bytes of U+FFFD, which stands for each byte that is no UTF-8
_REPLACED = 3


def token_bytes(tokenizer: Any) -> int:
    """The bytes of text that one token adds at most; 0: there is no tokenizer, or it has no vocabulary to look at.

    The text of several tokens has at most as many bytes as the texts of each, and a space more for each: a part of a character
    alone is replaced by what is not shorter. The text of a token is decoded only if its name is so long that it might be the
    longest: a name has at least a character for each byte, and that byte may be replaced.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return 0
    bounds = sorted(((_longest(name), token) for name, token in tokenizer.get_vocab().items()), reverse=True)
    longest = 0
    for bound, token in bounds:
        if bound <= longest:
            break
        longest = max(longest, len(tokenizer.decode([token]).encode("utf-8", "replace")))
    return longest + 1


def _longest(name: str | bytes) -> int:
    return max(_REPLACED * len(name), len(name if isinstance(name, bytes) else name.encode("utf-8", "replace")))


class EngineTokenizer:
    """The model's tokenizer in one thread, because its state may not be borrowed twice; and for what takes long, a copy of it
    in another one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._long_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-long")
        #: the copy, once it is needed; (): there is none
        self._copy: tuple[Any, ...] | None = None

    async def ids(self, tm: Any, task: TextTask, can: Capabilities) -> TextIds:
        """Token ids of texts. Raises WireError `bad_request`, or EngineError."""
        pairs = tm.model_config.hf_config if can.separator is not None else None
        # transformers 5 lets the tokenizer of EmbeddingGemma forget it; SGLang adds it to texts.
        last = getattr(tm.tokenizer, "eos_token_id", None) if tm.model_config.is_embedding_gemma else None
        return await self._run(tm, "text", lambda of: text_ids(of, task, pairs, can.context, last), long=task.asked.long)

    async def texts(self, tm: Any, rows: list[list[int]], *, skip_special_tokens: bool, long: bool) -> list[str]:
        """The text of each row. Raises EngineError."""

        def decode(tokenizer: Any) -> list[str]:
            return [tokenizer.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

        return await self._run(tm, "ids", decode, long=long)

    async def _run(self, tm: Any, what: str, work: Callable[[Any], T], *, long: bool) -> T:
        loop, tokenizer, thread = asyncio.get_running_loop(), tokenizer_of(tm), self._thread
        if tokenizer is None:
            raise EngineError("the model has no tokenizer: send token ids")
        if long and self._copy is None:
            self._copy = await loop.run_in_executor(thread, _copied, tokenizer)
        if long and self._copy:
            [tokenizer], thread = self._copy, self._long_thread
        try:
            return await loop.run_in_executor(thread, work, tokenizer)
        except (ValueError, TypeError) as error:
            raise EngineError(f"the tokenizer refused the {what}: {one_line(error)}") from error

    def close(self) -> None:
        """Take nothing more."""
        self._thread.shutdown(wait=False)
        self._long_thread.shutdown(wait=False)


def _copied(tokenizer: Any) -> tuple[Any, ...]:
    """A copy; (): there can be none. A function that the object itself holds would go on to use the original."""
    try:
        held: dict[str, object] = getattr(tokenizer, "__dict__", {})
        if own := [name for name, value in held.items() if type(value) is FunctionType]:
            raise ValueError(f"it has functions of its own: {', '.join(own)}")
        return (copy.deepcopy(tokenizer),)
    except Exception as error:  # tokenizers raise what they like
        say(f"a long text holds up others, because the tokenizer cannot be copied: {one_line(error)}")
        return ()
