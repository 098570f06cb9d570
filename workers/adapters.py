"""The LoRA adapters that a worker's engine loads and unloads while it serves: one after the other, each whole or not at all."""

import asyncio
from collections.abc import Sequence

from enginepool.protocol.messages.adapters import AdapterChanged, ChangeAdapter
from enginepool.workers.adapter_files import read_adapter
from enginepool.workers.engine import Engine, EngineDied, EngineError
from enginepool.workers.failures import one_line
from enginepool.workers.weights.checkpoint import CheckpointError


class AdapterRunner:
    """Performs `change_adapter`.

    Args:
        roots: directories under which adapters that are loaded by path may lie.
        store: where the coordinator keeps those that came as tensors; "": out of reach.
    """

    def __init__(self, engine: Engine, roots: Sequence[str], store: str) -> None:
        self._engine, self._roots, self._store = engine, roots, store
        #: the digest of each that is loaded, by the engine's names
        self.loaded: dict[str, str] = {}
        self._turn = asyncio.Lock()

    async def run(self, message: ChangeAdapter) -> AdapterChanged:
        """Load or unload, and say what became of it. What is done already is not done again. Raises EngineDied."""
        answer = AdapterChanged(message.task)
        async with self._turn:
            try:
                if message.action == "load":
                    answer.digest = await self._load(message)
                elif message.name in self.loaded:
                    await self._engine.unload_adapter(message.name)
                    del self.loaded[message.name]
            except CheckpointError as error:
                answer.code, answer.message = "weights_refused", str(error)
            except EngineDied:
                raise
            except Exception as error:  # of any kind: engines raise what they like
                answer.code = "engine_error"
                answer.message = str(error) if isinstance(error, EngineError) else one_line(error)
        return answer

    async def _load(self, message: ChangeAdapter) -> str:
        """The digest of what is loaded under that name now."""
        known = self.loaded.get(message.name)
        if known is None:
            if message.stored and not self._store:
                text = "it came as tensors, which only workers that the pool starts itself can read; load it by a path"
                raise CheckpointError(text)
            folder, known = await asyncio.to_thread(self._read, message)
            _refuse_other(message, known)
            await self._engine.load_adapter(message.name, folder)
            self.loaded[message.name] = known
        _refuse_other(message, known)
        return known

    def _read(self, message: ChangeAdapter) -> tuple[str, str]:
        """In a thread. Raises CheckpointError."""
        try:
            tensors = self._engine.weights.model_tensors().tensors
        except EngineError:
            tensors = ()  # this engine takes no weights, and does not say what it has
        shapes = {one.name: one.shape for one in tensors}
        if message.stored:
            return read_adapter(message.path, (self._store,), "the coordinator's store", shapes)
        return read_adapter(message.path, self._roots, "adapter_roots", shapes)


def _refuse_other(message: ChangeAdapter, digest: str) -> None:
    if message.digest and digest != message.digest:
        text = f"has digest {digest}, and {message.name} is {message.digest}: its files have changed"
        raise CheckpointError(f"{message.path}: {text}")
