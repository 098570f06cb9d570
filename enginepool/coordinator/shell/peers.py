"""The peer at the other end of a link, as the transport has proved it, and what it may say. Pure.

The roles and the tables of messages are the protocol's: `protocol/roles.py`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from enginepool.protocol.errors import WireError
from enginepool.protocol.roles import EVERY, Role


class Peer(NamedTuple):
    """`roles`: of the peer, included ones too."""

    roles: frozenset[Role] = frozenset()

    def may_send(self, message: Any, table: Mapping[str, Role]) -> None:
        """Raises WireError, `forbidden`: no role of this peer may send a message of this type; `unauthorized`: it has none."""
        if self.roles is not EVERY:
            type_ = str(message.__struct_config__.tag)
            self.need(table[type_], "type", type_)

    def need(self, role: Role, field: str, what: str) -> None:
        """The same for a value of a field. Raises WireError."""
        if not self.roles:
            raise WireError("unauthorized", "the key of this link is not authorized here")
        if role not in self.roles:
            has = ", ".join(sorted(self.roles)) or "none"
            raise WireError(
                "forbidden", f"{field}: {what} needs the role {role}; this link has: {has}", field=field, limit=role
            )


#: A peer on an ipc socket in a private directory: a process of this user.
SAME_USER = Peer(EVERY)
