"""What an engine is started with: one struct, from the worker's configuration to the engine."""

from typing import Any, Literal

import msgspec


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one engine.

    model: a checkpoint directory or a name that the engine can load; for `sim` any name.
    origin: the model of the group, if the engine starts on a checkpoint of it, whose folder may have less than the model's.
    device, dtype: as the engine names them; `auto` lets it choose: CUDA where there is some, else the CPU; the checkpoint's own
        dtype on a GPU, and float32 on a CPU.
    operations: what the engine is for: `generate`, rows, or both; (): the rows that its model answers.
    packing: whether it can join rows into sequences, by SGLang's multi-item scoring: "auto": if engine, model and device allow
        it; "on": it does not start where they do not.
    cached_query_tokens: a query of so many tokens or more, which rows share, is computed once, ahead of them; none: never.
    options: further settings for the engine, by its own names; those with which a batch could be cut are refused at start.
    max_batch_tokens, max_batch_rows: caps on one batch, below what the engine's settings give.
    forwards_in_flight: forwards of tokens, or batches of full size, that may be in flight at this worker.
    nccl_port: the one TCP port that SGLang opens, for its own process group; none: it looks for a free one.
    """

    model: str
    origin: str = ""
    device: str = "auto"
    dtype: str = "auto"
    operations: tuple[str, ...] = ()
    packing: Literal["auto", "on", "off"] = "auto"
    cached_query_tokens: int | None = None
    options: dict[str, Any] = {}
    max_batch_tokens: int | None = None
    max_batch_rows: int | None = None
    forwards_in_flight: int = 2
    nccl_port: int | None = None

    @property
    def packs(self) -> bool:
        """Whether it is an engine that packs, once that is decided."""
        return self.packing == "on"

    @property
    def generates(self) -> bool:
        """Whether it is an engine that generates."""
        return "generate" in self.operations

    @property
    def mixed(self) -> bool:
        """Whether it is an engine that generates and runs rows."""
        return self.generates and len(self.operations) > 1
