"""The calls of a `Pool` about weights: versions, digests, single weights, and updates that send no tensors."""

from collections.abc import Sequence
from os import PathLike

from enginepool.client.arguments import check_group, check_name, check_path, check_timeout
from enginepool.client.connection import Connection
from enginepool.client.metadata_update import publish_message, publish_unsent
from enginepool.client.results import Floats, WeightReader
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages.weight_reports import InspectWeights, UpdateRecord, WeightsReport
from enginepool.protocol.messages.weights import InFlight, RunningGenerations


class WeightCalls:
    """Base of `Pool`."""

    _connection: Connection

    async def weights(self, group: str = "", *, timeout: float | None = 10.0) -> WeightsReport:  # noqa: ASYNC109
        """The committed version of a group, the version that each worker holds, and the history of updates, newest last.

        Raises:
            UnknownGroup: there is no such group.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        return (await self._ask_weights(InspectWeights(0, check_group(group)), timeout))[0]

    async def weights_digest(self, group: str = "", *, timeout: float | None = 120.0) -> WeightsReport:  # noqa: ASYNC109
        """The digest of every worker's weights as they are in its engine now; equal ones are the same weights.

        An engine that computes or rounds what it loads is not comparable: `code` is `unsupported`, and `message` says why.

        Raises what `weights` does. A worker that cannot say has `code` and `message`.
        """
        return (await self._ask_weights(InspectWeights(0, check_group(group), "digest"), timeout))[0]

    async def validate_weights(self, group: str = "", *, timeout: float | None = 120.0) -> WeightsReport:  # noqa: ASYNC109
        """Look for NaN, infinity and tensors of nothing but zeros in every engine: the `findings` of each worker.

        Raises what `weights` does. A worker that cannot say has `code` and `message`.
        """
        return (await self._ask_weights(InspectWeights(0, check_group(group), "validate"), timeout))[0]

    async def weight(self, name: str, group: str = "", *, timeout: float | None = 60.0) -> Floats:  # noqa: ASYNC109
        """One weight as an engine holds it, by its name in the checkpoint: float32, in the shape that the engine has.

        It comes in chunks of 4 MiB at most, so that a large one does not delay requests.

        Raises what `weights` does; EngineFailed: the engine has no weight of that name, or no worker is ready.
        """
        seconds, reader = check_timeout(timeout), WeightReader()
        group, name = check_group(group), check_name(name)
        left = self._connection.within(seconds)
        while reader.weight is None:
            question = InspectWeights(0, group, "tensor", name, offset=reader.offset)
            reader.take(*await self._ask_weights(question, left()))
        return reader.weight

    async def set_version(
        self,
        version: int,
        group: str = "",
        *,
        new_run: bool = False,
        timeout: float | None = 60.0,  # noqa: ASYNC109 (the error says what is known)
    ) -> UpdateRecord:
        """Call the weights that a group has `version`, which is above the committed one. Returns what the history keeps of it.

        Args:
            new_run: versions begin again, so that any will do: for an operator who starts another training in the same pool.
            timeout: seconds, after which it is given up.

        Raises:
            VersionBackwards: `version` is not above the committed one, which `limit` names.
            Publishing: an update of the group is under way; `limit` names its publisher.
            UpdateAborted: the message says why.
        """
        publish = publish_message(version, group=group, transfer="set_version", in_flight="drain", drain=10.0, new_run=new_run)
        return await publish_unsent(self._connection, publish, check_timeout(timeout))

    async def publish_checkpoint(
        self,
        path: str | PathLike[str],
        version: int,
        group: str = "",
        *,
        in_flight: InFlight = "drain",
        drain: float = 10.0,
        after_drain: RunningGenerations = "abort",
        new_run: bool = False,
        timeout: float | None = 600.0,  # noqa: ASYNC109 (as in `set_version`)
    ) -> UpdateRecord:
        """Let every worker of a group load the checkpoint directory `path`, which each must be able to see, as `version`.

        It is not searched for NaN and infinity before; `validate_weights` does that afterwards. Engines that take weights only
        at their start are restarted on it, as the group's `restart_updates` says: `timeout` has to be long enough for that.

        Args:
            path: a relative one is of this program's folder if there is such a directory, else of each worker's.
            in_flight: work in flight finishes before (`drain`), or runs again on the new weights (`abort`). With `in_place` and
                `retract`, batches of rows finish, and generations go on in their engines: over the KV that they have, or after
                their KV was computed again on the new weights.
            drain: seconds that batches, and with `drain` generations, are waited for at most; batches are put back then.
            after_drain: what happens to generations that `drain` did not wait for: `abort`, `in_place` or `retract`.
            new_run, timeout: as in `set_version`.

        Raises what `set_version` does, and WeightsRefused: the checkpoint does not fit the model.
        """
        publish = publish_message(
            version,
            group=group,
            transfer="checkpoint",
            in_flight=in_flight,
            drain=drain,
            new_run=new_run,
            after_drain=after_drain,
        )
        publish.path = check_path(path)
        return await publish_unsent(self._connection, publish, check_timeout(timeout))

    async def _ask_weights(self, question: InspectWeights, seconds: float | None) -> tuple[WeightsReport, Sequence[Buffer]]:
        return await self._connection.ask(question, WeightsReport, check_timeout(seconds))
