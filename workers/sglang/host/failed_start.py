"""Why an engine did not start, and whether a later start with the same settings may succeed. No SGLang here."""

from pathlib import Path

from enginepool.workers.engine import EngineDied, EngineError, EngineUnusable
from enginepool.workers.sglang.host.lifetime import one_line
from enginepool.workers.sglang.host.settings import SettingsError

#: by name, errors of the model hub that come again at every try: it has no such model for us, or no such version of it
_UNKNOWN_MODEL = {"RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"}


def failed_start(model: str, error: Exception, logged: str) -> EngineDied:
    """What to raise. `logged`: the last error in the log of a process of the engine, or ""."""
    # What such a process logged explains more than that the process is gone; our own refusals need no more.
    ours = isinstance(error, SettingsError | EngineError)
    reason = one_line(error) if ours else logged or one_line(error)
    remote = isinstance(error, OSError) and "://" not in model and not Path(model).exists()
    name = f"{model} (no folder here, so looked for on the model hub)" if remote else model
    permanent = isinstance(error, SettingsError) or _unknown_model(error)
    return (EngineUnusable if permanent else EngineDied)(f"{name}: {reason}")


def _unknown_model(error: BaseException) -> bool:
    """Whether this came of a model that the hub does not have. A hub that was not reached may have it at the next try."""
    cause: BaseException | None = error
    while cause is not None:
        if any(kind.__name__ in _UNKNOWN_MODEL for kind in type(cause).__mro__):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
