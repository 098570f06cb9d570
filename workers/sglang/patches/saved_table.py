"""The part of `table.py` that is about weights which are saved, and engines that start from Redis."""

from enginepool.workers.sglang.patches.modules import CONNECTORS, LOADER, REDIS
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.private_name import private as _private

# fmt: off
OF_SAVED: tuple[Private, ...] = (
    *_private(
        "weights/saved_state.py", LOADER,
        ("ShardedStateLoader.save_model", "called", "the command save", "model, path, pattern, max_size"),
        ("RemoteModelLoader.save_model", "called", "the command save", "model, model_path, url"),
    ),
    *_private(
        "patches/connectors.py", CONNECTORS,
        ("signal", "replaced", "connectors install no handlers, which a thread cannot"),
        ("tempfile", "replaced", "files of a model in Redis go when the engine does"),
    ),
    *_private(
        "patches/connectors.py", REDIS,
        ("RedisConnector.__init__", "replaced", "Redis that is silent ends a save or a start", "self, url"),
        ("RedisConnector.connection", "replaced", "Redis that is silent ends a save or a start"),
    ),
)
# fmt: on
