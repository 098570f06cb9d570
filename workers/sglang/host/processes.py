"""The scheduler processes of an engine, as its settings have them: ranks, replicas and stages. Pure: no SGLang here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def replicas_of(settings: Mapping[str, Any]) -> int:
    """Replicas inside the engine, each with a key-value pool and a running batch of its own."""
    return settings.get("dp_size") or 1


#: Settings with which SGLang has KV caches in a storage. A flush leaves them, and they are found by tokens alone: prompts would
#: get those of old weights.
STORAGES = ("hicache_storage_backend", "enable_lmcache", "enable_unified_cache_external_linker")
#: setting -> what weight updates do not reach
_APART = {
    "dp_size": "its replicas",
    "pp_size": "its later stages",
    "speculative_draft_model_path": "the draft model",
    **dict.fromkeys(STORAGES, "the KV caches in its storage"),
}


@dataclass(frozen=True, slots=True)
class Processes:
    """The schedulers of an engine: `ranks` that share a forward, and how often each of these is there, as a replica or a stage.
    `why_no_updates`: why weight updates do not reach all of them, or ""."""

    ranks: int
    times: int = 1
    why_no_updates: str = ""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Processes":
        """Those of an engine with these settings."""
        replicas = 1 if settings.get("enable_dp_attention") else replicas_of(settings)
        apart = [name for name in ("dp_size", "pp_size") if (settings.get(name) or 1) > 1]
        apart += [name for name in ("speculative_draft_model_path", *STORAGES) if settings.get(name)]
        why = f"engine option {apart[0]}={settings[apart[0]]}: weight updates do not reach {_APART[apart[0]]}" if apart else ""
        return cls(settings.get("tp_size") or 1, replicas * (settings.get("pp_size") or 1), why)
