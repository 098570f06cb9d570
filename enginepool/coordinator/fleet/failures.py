"""What the reasons of failed workers say: whether two of them failed in the same way, and whether a disk had no room.

Two reasons are compared without the parts that differ between processes.
"""

import re

#: parts of a reason that differ between two processes that fail in the same way; longer forms first
_OWN = re.compile(
    r"""
      0x[0-9a-f]+                                                   # an address
    | [0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}  # a UUID, as of a request to a hub
    | (?<=-)\d+\.[0-9a-f]{1,16}\.\d+\b                              # of an incarnation: index, epoch, count
    | \d{4}-\d\d-\d\d                                               # a date
    | \d\d:\d\d:\d\d(?:[.,]\d+)?                                    # a time
    | \btmp[a-z0-9_]{8}\b                                           # a temporary file, as Python names them
    | \b(?:pid|process|thread|port|worker)[\s=:]{1,3}\d+                   # which process, which port
    | (?<=:)\d{4,5}\b                                               # a port in an address
    | \b\d+(?:\.\d+)?\s?(?:[munµ]?s|seconds|[kmgt]i?b|bytes)\b      # a duration, a size
    | \b\d+\.\d+\b
    | \b[0-9a-f]{12,}\b                                             # a hash, a session
    | \d{5,}
    """,
    re.VERBOSE | re.IGNORECASE,
)
#: the prefix of a reason, which depends on its source: a message to the coordinator, or the last line of the worker's log
_FOUND = re.compile(r"^(?:exit code \d+: )?(?:[^\n]{0,200}? ends: )?")

#: in a reason: a disk is full, or full for this user
_NO_ROOM = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
#: in a reason: the file is shared memory, as NCCL and torch name it. Its size is a setting of the host or of the container.
_SHARED_MEMORY = re.compile(r"/dev/shm\b|</torch_")


def lacks_disk_space(reason: str) -> bool:
    """Whether a worker failed because a disk has no room. Later it may have room."""
    return bool(_NO_ROOM.search(reason)) and not _SHARED_MEMORY.search(reason)


def signature(reason: str) -> str:
    """A text that is equal for two failures of the same kind. It keeps small whole numbers: exit codes, layers, HTTP codes."""
    return _OWN.sub("#", _FOUND.sub("", reason))
