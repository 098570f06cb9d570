"""Times and sizes of a client's session."""

import msgspec


class SessionSettings(msgspec.Struct, frozen=True):
    """Times are in seconds. The defaults are for a coordinator on the same host or network."""

    #: no word for this long after a ping, or a Hello: new socket, new Hello
    silence_s: float = 5.0
    #: an unanswered Hello is said again after this
    hello_s: float = 1.0
    #: pings to a coordinator that has said that it ends come this often: the first one that the next coordinator hears finds it
    seek_s: float = 0.25
    #: at least this much between two Hellos, for any answer of the coordinator
    hello_gap_s: float = 0.1
    #: a sent request fails here so long after its deadline
    grace_s: float = 1.0
    #: a cancelled request is waited for so long
    cancel_wait_s: float = 1.0
    #: a request without an answer is sent again after this, then after twice as long (up to 16 times), on a link
    #: that seems well
    resend_s: float = 30.0
    #: an unanswered question for the status is asked again after this
    status_s: float = 1.0
    #: an unanswered question about weights, which workers may have to work on, is asked again after this
    question_s: float = 30.0
    #: an aborted update is waited for so long: the coordinator may have committed it
    abort_wait_s: float = 10.0
    ack_batch: int = 64
    ack_delay_s: float = 0.1
    #: backoff after `busy` without `retry_after_ms`, doubling up to the cap
    busy_s: float = 0.05
    busy_cap_s: float = 5.0
    #: a tick that is this late means that this process was stopped: the silence is not the fault of the coordinator
    stall_s: float = 1.0
    #: more often `superseded` than this, each within ten seconds of the one before: another process has this identity
    superseded_limit: int = 5


DEFAULTS = SessionSettings()
