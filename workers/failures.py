"""One line about an error, for those who asked for the work that failed."""

from enginepool.protocol.errors import WireError
from enginepool.workers.engine import EngineError, RequestRefused
from enginepool.workers.log import report


def one_line(error: Exception) -> str:
    """Its kind and the first line of its text."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def reason_of(error: Exception, work: str) -> tuple[str, str]:
    """(one line, code) for the caller whose `work` failed. An error that no engine should raise is in the log as well."""
    if isinstance(error, WireError):
        return error.message, error.code
    if isinstance(error, EngineError):
        return str(error), "bad_request" if isinstance(error, RequestRefused) else "engine_error"
    report(error, work)
    return one_line(error), "engine_error"
