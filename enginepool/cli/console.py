"""Where tables are printed."""

from rich.console import Console

#: Rich takes 80 columns where it finds no terminal.
_WIDE = 10_000


def console() -> Console:
    """The terminal; a file or a pipe has tables in full."""
    shown = Console()
    return shown if shown.is_terminal else Console(width=_WIDE)
