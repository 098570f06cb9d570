"""What is written to disk of a worker process: the next coordinator adopts the worker, or ends it."""

from enginepool.config import GroupConfig
from enginepool.host.child_process import ProcessRecord


class WorkerRecord(ProcessRecord, frozen=True, kw_only=True):
    """A worker process as written to disk."""

    group: str
    index: int
    incarnation: str
    #: that of its group when it was started
    model: str = ""
    #: the GPUs that the pool gave it, as CUDA_VISIBLE_DEVICES has them; "": none
    gpus: str = ""

    def why_ended(self, config: GroupConfig | None, gpus: str) -> str:
        """Why a new coordinator does not adopt this worker; "": it does. `config`: of its group; `gpus`: of its slot."""
        name = f"{self.group}-{self.index}"
        if config is None or self.index >= config.workers:
            return f"the configuration has no worker {name}"
        if self.model != config.model:  # the answers of one group would be of two models
            return f"the configuration gives {name} the model {config.model}, and it has {self.model or 'an unknown one'}"
        gives = f"the configuration gives {name} GPU {gpus or 'none'}, and it has {self.gpus or 'none'}"
        return "" if self.gpus == gpus else gives
