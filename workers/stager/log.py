"""What a stager tells its worker of what went wrong."""

from enginepool.workers.log import report


def why(error: Exception) -> str:
    """One line; what nobody foresaw is told with its kind, and in full on stderr."""
    from enginepool.transfer.process_group import CollectiveError

    if isinstance(error, CollectiveError):
        return str(error)
    report(error, "an update")
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
