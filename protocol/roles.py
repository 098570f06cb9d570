"""Roles: which peer may send which message. PROTOCOL.md, "Roles", is the specification of this table; a test holds the two
together.

A key has one role. A role includes others: a publisher also asks, an operator also publishes. A worker is nothing else.
"""

from typing import Final, Literal, get_args

Role = Literal["client", "publisher", "admin", "worker"]

#: a role, and all roles that it includes
INCLUDES: Final[dict[Role, frozenset[Role]]] = {
    "client": frozenset({"client"}),
    "publisher": frozenset({"client", "publisher"}),
    "admin": frozenset({"client", "publisher", "admin"}),
    "worker": frozenset({"worker"}),
}
EVERY: Final[frozenset[Role]] = frozenset(get_args(Role))

#: On the worker endpoint a peer must have the role `worker` for every message. This is the client endpoint:
#: the role that a peer must have, or include, to send a message of this type
FROM_CLIENT: Final[dict[str, Role]] = {
    "hello": "client",
    "score": "client",
    "embed": "client",
    "logprobs": "client",
    "decode": "client",
    "tokenize_texts": "client",
    "generate": "client",
    "credit": "client",
    "cancel": "client",
    "ack": "client",
    "goodbye": "client",
    "status": "client",
    "ping": "client",
    "pong": "client",
    "inspect_weights": "publisher",
    "control": "publisher",
    "load_adapter": "publisher",
    "unload_adapter": "publisher",
    "publish": "publisher",
    "renew": "publisher",
    "sent": "publisher",
    "commit": "publisher",
    "abort": "publisher",
    "restart": "admin",
}
