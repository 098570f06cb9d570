"""An epoch below one that a peer has heard: the journal was lost and the clock was set back.

Workers and clients take no word from a coordinator of a lower epoch. `register` and `hello` say the highest epoch that they
have heard; a coordinator below it writes a higher one into its journal and starts again. Two bounds hold against a peer that
lies: MAX_EPOCH, above which there is room for more starts than any pool has, and how often peers of a role may raise the epoch
in the life of a journal. Each time costs callers one restart of the coordinator. Workers may do it more often: they compute the
answers, and the models that they have loaded are worth a restart.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import RaiseEpoch
from enginepool.protocol.messages import MAX_EPOCH

#: By at least how much more than what was heard: a second of the clock that epochs follow, so that no other start has used the
#: epoch. The part of a second at which this coordinator started is added: if the journal is lost twice, the peer may not have
#: heard the epoch that was raised the first time.
STEP = 1_000_000
#: how often peers of a role may raise the epoch, all times counted together
RAISES_BY_CLIENTS, RAISES_BY_WORKERS = 8, 64


def rise_above(core: Context, heard: int, who: str, most: int) -> str:
    """Raise the epoch above one that `who` has heard; returns why that is refused, or ""."""
    told = f"{who} has heard epoch {heard}, and this coordinator has {core.epoch}: was the journal lost and the clock set back?"
    if heard > MAX_EPOCH:
        return f"{told} It is not followed: the highest epoch that is followed is {MAX_EPOCH}"
    if core.raises >= most:
        return f"{told} It is not followed: peers of this role have raised the epoch of this journal {most} times"
    epoch = heard + STEP + core.epoch % STEP
    core.effects.append(RaiseEpoch(epoch, f"{told} The coordinator starts again with a higher epoch"))
    return ""
