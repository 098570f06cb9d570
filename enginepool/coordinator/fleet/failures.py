"""Whether two failures of workers are the same one: their reasons, without what each process has of its own."""

import re

#: what differs between two processes that fail in the same way, longer forms first
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
#: what is put before a worker's own words by where they were found: told to the coordinator, or last in its log
_FOUND = re.compile(r"^(?:exit code \d+: )?(?:[^\n]{0,200}? ends: )?")


def signature(reason: str) -> str:
    """What is equal for two failures that are the same. Small whole numbers count: they are exit codes, layers, HTTP codes."""
    return _OWN.sub("#", _FOUND.sub("", reason))
