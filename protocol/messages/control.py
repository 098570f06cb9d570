"""Commands to all workers of a group: asked by an operator or a publisher, run by each worker, one outcome each."""

from typing import Literal

import msgspec

from enginepool.protocol.basis import Message, TaskId

CommandName = Literal["flush"]


class Control(Message, tag="control"):
    """Run `command` on all workers of `group`; answered by `control_report`. flush: forget all prefixes that engines keep."""

    id: int
    command: CommandName
    group: str = ""


class WorkerOutcome(msgspec.Struct, omit_defaults=True):
    """What became of a command at one worker. `code`, `message`: why it failed; without `code` it did not."""

    name: str
    code: str = ""
    message: str = ""


class ControlReport(Message, tag="control_report"):
    """The answer to `control`: a row for each worker of the group."""

    id: int
    group: str
    command: CommandName
    workers: list[WorkerOutcome] = []


class Command(Message, tag="command"):
    """Run a command of `control` between two batches. Answered by `commanded`."""

    task: TaskId
    command: CommandName


class Commanded(Message, tag="commanded"):
    """The answer to `command`."""

    task: TaskId
    code: str = ""
    message: str = ""
