"""Why a worker ended is read off the end of what it wrote."""

import pytest

from enginepool.coordinator.supervisor import last_line


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (b"", ""),
        (b"\n \r\n\r", ""),
        (b"first\nlast", "last"),
        (b"first\nlast\n\n", "last"),
        (b"windows\r\n", "windows"),
        (b"Loading:   0%\rLoading:  50%\rLoading: 100%\n", "Loading: 100%"),
        (b"Loading:   0%\rLoading:  50%\r", "Loading:  50%"),
        (b"Loading:  50%\rout of memory\r\n", "out of memory"),
        (b"\xe4\xb8 cut in the middle\nx" + 600 * b"y", "x" + 499 * "y"),
    ],
)
def test_the_last_line_is_what_a_terminal_shows_last(log: bytes, line: str) -> None:
    assert last_line(log) == line
