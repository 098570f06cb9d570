"""A coordinator with a planted fault, and a command whose coordinators have one; the product has no way to plant any.

    python -m tests.process.faulty_coordinator              a coordinator, as `enginepool.coordinator.shell.daemon` is one
    python -m tests.process.faulty_coordinator serve ...    the command, whose coordinators are started as above

The fault strikes when a request with the label LABEL is admitted. PLANTED says how: `raise`, or `abort` as libzmq's
assertions do. With `once:` before it, and a file named by PLANTED_ONCE, it strikes only while that file exists, and removes
the file.
"""

import os
import sys
from pathlib import Path

from enginepool.cli import coordinator_process
from enginepool.cli.main import app
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.requests.admission import Admission
from enginepool.coordinator.shell import daemon

LABEL = 666
COMMAND = (sys.executable, "-m", "tests.process.faulty_coordinator")


def plant() -> None:
    submit = Admission.submit
    once, _, how = os.environ["PLANTED"].rpartition(":")

    def faulty(self: Admission, e: ev.Submit) -> None:
        submit(self, e)
        if LABEL not in e.work.part.labels:
            return
        if once:
            file = Path(os.environ["PLANTED_ONCE"])
            if not file.exists():
                return
            file.unlink()
        if how == "abort":
            os.abort()
        raise KeyError("planted")

    Admission.submit = faulty


def main() -> int:
    if len(sys.argv) > 1:
        coordinator_process.COMMAND = COMMAND
        app()
    plant()
    return daemon.main()


if __name__ == "__main__":
    sys.exit(main())
