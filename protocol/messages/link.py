"""Messages of a link: its first message, its answer, whether the peer is alive, errors, the end."""

from typing import Annotated

import msgspec

from enginepool.protocol.basis import MAX_CAPABILITIES, PROTOCOL_VERSION, Message


class Ping(Message, tag="ping"):
    """Are you there? Answered by `pong` with the same `at` (sender's clock, any unit)."""

    at: int = 0


class Pong(Message, tag="pong"):
    """The answer to `ping`. `epoch` is the coordinator's (0 from a worker); workers say their `stage`."""

    at: int = 0
    epoch: int = 0
    stage: str = ""


class ErrorReply(Message, tag="error"):
    """A request, or a message, that was refused or failed. `id` is absent when the message had no readable id. `incarnation`:
    of the `hello` that was refused; absent in every other error."""

    code: str
    message: str
    id: int | None = None
    seq: int = 0
    final: bool = True
    field: str = ""
    limit: str = ""
    retry_after_ms: int | None = None
    evidence: list[str] = []
    incarnation: int | None = None


class Hello(Message, tag="hello"):
    """First message on every link.

    `client` is 16 random bytes made once per client object; `token` 16 secret bytes made with it, which prove on a later
    link that it is the same client; `incarnation` grows with each new link, and the highest wins. `max_message_bytes`: the
    longest message, all frames together, that the client takes (0: as `welcome` says). `epoch`: the highest one that the
    client has heard (0: none).
    """

    client: bytes
    token: bytes
    protocol: int = PROTOCOL_VERSION
    incarnation: int = 0
    agent: str = ""
    capabilities: Annotated[list[str], msgspec.Meta(max_length=MAX_CAPABILITIES)] = []
    max_message_bytes: int = 0
    epoch: int = 0


class Goodbye(Message, tag="goodbye"):
    """This client leaves: its requests are cancelled and nothing is kept for it."""


class Welcome(Message, tag="welcome"):
    """Answer to the `hello` of this `incarnation`: the coordinator's epoch, what it can do, and the window that it grants."""

    epoch: int
    protocol: int = PROTOCOL_VERSION
    capabilities: list[str] = []
    groups: list[str] = []
    window_requests: int = 0
    window_bytes: int = 0
    max_message_bytes: int = 0
    ping_ms: int = 1000
    incarnation: int = 0


class Register(Message, tag="register"):
    """First message of a worker on every link. `incarnation` names this process alone; `epoch`: the last one it heard."""

    group: str
    incarnation: str
    protocol: int = PROTOCOL_VERSION
    pid: int = 0
    host: str = ""
    epoch: int = 0
    capabilities: list[str] = []


class GetSettings(Message, tag="get_settings"):
    """What are the settings of the workers of `group`? Asked before there is a worker, on a link that registers none. ""  means
    the group of a pool that has one. Answered by `settings`."""

    group: str = ""


class Exiting(Message, tag="exiting"):
    """The worker ends; `reason` is one line for the operator. `permanent`: starting it again cannot help. `out_of_memory`: its
    engine died of a batch for which there was not enough."""

    reason: str
    failed: bool = False
    permanent: bool = False
    out_of_memory: bool = False


class Accept(Message, tag="accept"):
    """Answer to `register`. After `orphan_s` seconds without a word from a coordinator the worker ends itself. `halvings`: how
    often an engine that is started now should halve its budgets. `counter`: of the last task of this epoch; generations up to
    it came on an earlier link, and end. `staged`: the group's weights have come by a `staged` transfer; a worker that starts
    its engine now may reserve memory for the next one."""

    epoch: int
    protocol: int = PROTOCOL_VERSION
    orphan_s: float = 60.0
    halvings: int = 0
    counter: int = 0
    staged: bool = False


class WorkerSettings(Message, tag="settings"):
    """With what the workers of `group` are started. `settings`: JSON with the keys of the pool's file. `path`: the checkpoint
    directory that an engine starts on in place of the model, where the committed weights can be had in no other way; they are
    `version`, and have this `digest`. `drain_s`: seconds that begun work has to finish when a worker drains."""

    group: str
    settings: str
    drain_s: float = 10.0
    path: str = ""
    digest: str = ""
    version: int = 0


class Expired(Message, tag="expired"):
    """The coordinator gave up `incarnation` because its link was silent. The worker is not to blame: it drops all work, takes a
    new incarnation and registers again, with its engine as it is."""

    incarnation: str
    reason: str = ""


class Drain(Message, tag="drain"):
    """Finish what is running, then end."""
