"""What the commands to a group print of their report."""

import pytest

from enginepool.cli.cli_errors import CommandFailed
from enginepool.cli.outcomes import show_outcomes
from enginepool.protocol.messages.control import CommandName, ControlReport


def test_a_group_without_workers_is_said_to_have_none_and_is_not_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    said = "g: no worker was asked, since all are retired or none is connected"
    done: tuple[CommandName, ...] = ("pause", "resume", "sleep", "wake", "flush")
    for command in done:
        show_outcomes(ControlReport(1, "g", command), "done")
        assert capsys.readouterr().out == f"{said}\n"
    failed: tuple[CommandName, ...] = ("start_profile", "stop_profile")
    for command in failed:
        with pytest.raises(CommandFailed, match=f"^{said}$"):
            show_outcomes(ControlReport(1, "g", command), "done")
