"""What is measured on a field of the weights benchmark, step by step; the figures that are promised come first."""

import math
import time
from contextlib import suppress

import msgspec
import numpy as np

from bench.weights.field import LOOK_S, ORDER_S, START_S, Field
from bench.weights.figures import (
    ALONE,
    FLAT,
    LOADED,
    OURS_DIRECT,
    OURS_STAGED,
    PER_TENSOR,
    RAW,
    Continuous,
    Passed,
    Window,
    continuous_rows,
    gigabytes,
    load_rows,
    longest_gap_ms,
    size_of,
    taken_ms,
    update_rows,
    wrong_versions,
)
from bench.weights.parts import EVERYTHING, NO_LOOK, PARTS, Without
from enginepool.protocol.layout import ALIGNMENT

#: load runs so long before anything is measured under it
STEADY_S = 2.0
#: between two updates of which each is timed alone
REST_S = 0.02
#: How often `parts` measures each of them in turn, and updates each time; the first of those is for getting into step.
ROUNDS, TURN = 4, 3
#: buckets at least of an update in which a worker is killed
PIECES = 8
#: what is measured, in this order, and seconds that a step may take: with fewer left it is not begun
STEPS = {
    "raw": 10, "staged": 20, "loaded": 40, "continuous": 30, "parts": 40, "direct": 15, "kill": 120, "digests": 15, "bare": 90,
}  # fmt: skip
#: those that run by default
USUAL = tuple(step for step in STEPS if step != "parts")


class Steps:
    """Each method of a name in STEPS measures one thing, and leaves its rows in the field."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._bucket = field.scale.buckets[0]
        #: GB/s of the raw broadcast, by bucket size
        self._raw: dict[int, float] = {}
        #: the groups of the raw broadcast, and of bytes that go as a publisher's do
        self._group = self._path = ""

    def raw(self) -> None:
        """The same bytes, broadcast in the same buckets."""
        field = self._field
        self._group = field.join(field.receivers)
        for bucket in field.scale.buckets:
            order = {"nbytes": field.nbytes, "bucket_bytes": bucket, "times": 6}
            for receiver in field.receivers:
                receiver.tell({"do": "receive"} | order)
            took: list[list[float]] = [field.ask(field.trainer, do="raw", name=self._group, **order)["seconds"]]
            took += [field.heard(receiver.hear(ORDER_S))["seconds"] for receiver in field.receivers]
            seconds = float(np.median(np.max(took, axis=0)[1:]))
            speed = self._raw[bucket] = gigabytes(field.nbytes, seconds)
            field.add(f"{size_of(bucket)}, repeated: transfer", RAW, speed, "GB/s", 1.0)
            field.add(f"{size_of(bucket)}, repeated: transfer takes", RAW, 1000 * seconds, "ms")

    def staged(self) -> None:
        """Updates of an idle pool, and what its engines say then."""
        field = self._field
        for bucket in field.scale.buckets:
            updates = [field.publish("staged", bucket) for _ in range(1 + field.scale.idle)]
            passed = Passed(OURS_STAGED, bucket, updates)
            field.keep(update_rows(field.setting, field.nbytes, passed, self._raw.get(bucket)))
        for which in ("other", "first"):
            field.publish("staged", self._bucket, which)
            field.scores[f"pool, {which}"] = field.score()
        field.same("weights published again, against those loaded by the same engine", "pool, first", "pool, as loaded")
        field.same("the other weights, against the first", "pool, other", "pool, first")

    def loaded(self) -> None:
        """Updates under load."""
        field, bucket = self._field, self._bucket
        for burden in field.scale.burdens:
            before = field.version
            field.begin(burden)
            time.sleep(STEADY_S)  # what is measured is a length of time
            updates = [field.publish("staged", bucket) for _ in range(burden.updates)]
            time.sleep(1.0)
            answers, failures = field.stopped()
            phases: dict[int, dict[str, int]] = dict(field.ask(field.load, do="history")["phases"])
            updates = [msgspec.structs.replace(update, phases=phases[update.version]) for update in updates]
            # The group has formed already: none of these is a first one.
            passed = Passed(LOADED, bucket, [updates[0], *updates])
            whole = f"{field.setting}, {burden.name}"
            rows = update_rows(whole, field.nbytes, passed, self._raw.get(bucket))
            field.keep([row for row in rows if ", first: " not in row.what])
            field.keep(load_rows(whole, answers, failures, updates, before))

    def continuous(self) -> None:
        """Bytes of updates that follow each other, sent and received as a publisher and a stager do it, and nothing around
        them: alone, and for seconds while the engines are asked all the time. An update alone is too short to be noticed."""
        field, raw = self._field, self._raw.get(self._bucket)
        for without in (EVERYTHING, NO_LOOK):
            self._streamed(2, without=without)  # makes ready
        seconds = float(np.median(self._streamed(6, rest_s=REST_S)[1]))
        speed = gigabytes(field.nbytes, seconds)
        field.add(f"{size_of(self._bucket)}, repeated: transfer", ALONE, speed, "GB/s", speed / raw if raw else None)
        for burden in field.scale.burdens:
            whole = f"{field.setting}, {burden.name}"
            field.begin(burden)
            time.sleep(STEADY_S)
            quiet, streams = [self._quiet()], list[tuple[Window, list[float]]]()
            for without in (EVERYTHING, NO_LOOK):
                streams.append(self._streamed(max(2, math.ceil(field.scale.continuous_s / seconds)), without=without))
                quiet.append(self._quiet())
            answers, _ = field.stopped()
            continuous, unlooked = (Continuous(window, quiet[k : k + 2], len(took)) for k, (window, took) in enumerate(streams))
            speed = gigabytes(field.nbytes, float(np.median(streams[0][1])))
            field.keep(continuous_rows(whole, answers, continuous, speed, raw))
            what = f"{burden.name}: an update takes of its engine, without a look at its bytes"
            field.add(what, ALONE, taken_ms(answers, unlooked), "ms")

    def _quiet(self) -> Window:
        """A time with load alone."""
        began = time.monotonic()
        time.sleep(self._field.scale.continuous_s / 2)  # what is measured is a length of time
        return began, time.monotonic()

    def parts(self) -> None:
        """The same bytes with some of the work left out, all in turns."""
        field = self._field
        took: dict[tuple[int, str], list[float]] = {}
        for number in range(1 + ROUNDS):
            for bucket in field.scale.buckets:
                for name, without in PARTS.items():
                    seconds = self._streamed(TURN, bucket, without, REST_S)[1]
                    if number:  # before that it is made ready
                        took.setdefault((bucket, name), []).extend(seconds[1:])
        for (bucket, name), some in took.items():
            seconds, raw = float(np.median(some)), self._raw.get(bucket)
            ratio = gigabytes(field.nbytes, seconds) / raw if raw else None
            field.add(f"{size_of(bucket)}, {name}: transfer takes", ALONE, 1000 * seconds, "ms", ratio)

    def _streamed(
        self, times: int, bucket: int = 0, without: Without = EVERYTHING, rest_s: float = 0.0
    ) -> tuple[Window, list[float]]:
        """So many updates' bytes, one after the other: when, and the seconds of each until all have them."""
        field = self._field
        # As publishers and stagers do it: by copies, where they can.
        self._path = self._path or field.join(field.receivers, copies=field.backend == "nccl")
        manifest = field.ask(field.trainer, do="manifest")["manifest"]
        order = {"bucket_bytes": bucket or self._bucket, "times": times}
        for receiver in field.receivers:
            receiver.tell({"do": "take_in", "manifest": manifest, "without": without.receiver} | order)
        sent = field.ask(field.trainer, do="stream", name=self._path, without=without.sender, rest_s=rest_s, **order)
        came = [field.heard(receiver.hear(ORDER_S)) for receiver in field.receivers]
        whole = not without.receiver and "digest" not in without.sender
        for receiver in came:
            if whole and receiver["digests"] != sent["digests"]:
                raise RuntimeError(f"{receiver['digests'][0]} came, {sent['digests'][0]} was sent")
        ends = np.max([receiver["ends"] for receiver in came], axis=0)
        return (sent["starts"][0], float(ends[-1])), (ends - sent["starts"]).tolist()

    def direct(self) -> None:
        """Straight into the engines."""
        field = self._field
        updates = [field.publish("direct", self._bucket) for _ in range(1 + field.scale.direct)]
        passed = Passed(OURS_DIRECT, self._bucket, updates)
        field.keep(update_rows(field.setting, field.nbytes, passed, self._raw.get(self._bucket)))

    def kill(self) -> None:
        """A worker dies in the middle of an update, staged and direct: who goes on, and when is it back?"""
        self._killed("staged", OURS_STAGED)
        self._killed("direct", OURS_DIRECT)

    def _killed(self, transfer: str, who: str) -> None:
        field, bucket = self._field, self._bucket
        # There is no copy of what went straight into the engines.
        field.publish("staged", bucket)
        committed = field.version
        field.begin(field.scale.burdens[0])
        time.sleep(STEADY_S)
        name, victim = next(iter(field.workers(committed).items()))
        small = min(bucket, math.ceil(field.nbytes / PIECES / ALIGNMENT) * ALIGNMENT)
        # This version is never used again.
        field.version += 1
        order = {"version": field.version, "which": "other", "transfer": transfer, "bucket_bytes": small, "victim": victim}
        said = field.ask(field.trainer, START_S, do="kill", **order)
        field.say(f"  the update ended: {said['aborted'] or 'committed'}")
        if not said["aborted"]:
            raise RuntimeError("an update was committed whose bytes a dead worker cannot have")
        killed = said["killed"]
        back, all_ready = self._return(name, victim, committed, killed)
        again = field.publish("staged", bucket)
        answers, failures = field.stopped()
        field.add("worker killed: the update was aborted after", who, said["ended"] - killed, "s")
        field.add("the killed worker is back on the committed weights after", who, back - killed, "s")
        field.add("the killed worker is back after more than its start", who, back - killed - field.started_s, "s")
        # No two starts of an engine take the same.
        again_s = field.engine_s[name]
        field.add("the killed worker: its engine starts again in", who, again_s, "s")
        field.add("the killed worker is back after more than its engine's start", who, back - killed - again_s, "s")
        if transfer == "direct":
            # What has begun to go straight into engines costs all of them.
            field.add("worker killed: all serve again after", who, all_ready - killed, "s")
            more = all_ready - killed - field.started_s
            field.add("worker killed: all serve again after more than their start", who, more, "s")
            more = all_ready - killed - max(field.engine_s.values())
            field.add("worker killed: all serve again after more than their engines' start", who, more, "s")
        if field.count > 1:
            gap = longest_gap_ms(answers, (killed, all_ready))
            field.add("worker killed: longest time without an answer of the others", who, gap, "ms")
        field.add("worker killed: requests without an answer", who, failures, "")
        field.add("worker killed: answers of a wrong version", who, wrong_versions(answers, [again], committed), "")
        field.add("worker killed: the next update takes", who, again.ended - again.began, "s")

    def _return(self, name: str, victim: int, version: int, killed: float) -> tuple[float, float]:
        """When the killed worker is back on this version, and when all are ready."""
        field = self._field
        back = 0.0
        while True:
            ready = field.workers(version)
            now = time.monotonic()
            if ready.get(name, victim) != victim:
                back = back or now
                if len(ready) == field.count:
                    return back, now
            if now - killed > START_S:
                raise RuntimeError(f"the killed worker is not back: {ready} are ready")
            time.sleep(LOOK_S)

    def digests(self) -> None:
        """What every engine holds now is what was sent last."""
        field = self._field
        sent = field.publish("staged", self._bucket).digest
        held = field.ask(field.load, do="digests")["digests"]
        wrong = sum(digest != sent for digest in held) + field.count - len(held)
        field.add("engines with another digest than was sent", OURS_STAGED, wrong, "")

    def bare(self) -> None:
        """SGLang's own updates, into engines without a pool."""
        field = self._field
        engines = field.engines()
        field.scores["bare, as loaded"] = field.ask(engines[0], do="score", shape=field.shape())["scores"]
        name = field.join(engines, engines=True)
        which = "other"
        for who, bucket, flat in [(PER_TENSOR, 0, False), *((FLAT, bucket, True) for bucket in field.scale.buckets)]:
            calls = field.ask(field.trainer, do="calls", bucket_bytes=bucket)["calls"]
            took: list[float] = []
            for _ in range(1 + field.scale.idle):
                for engine in engines:
                    engine.tell({"do": "update", "group": name, "calls": calls, "flat": flat})
                field.ask(field.trainer, do="send", name=name, which=which, bucket_bytes=bucket, flat=flat)
                took.append(max(field.heard(engine.hear(ORDER_S))["seconds"] for engine in engines))
                if which == "other" and "bare, other" not in field.scores:
                    field.scores["bare, other"] = field.ask(engines[0], do="score", shape=field.shape())["scores"]
                which = "first" if which == "other" else "other"
            raw = self._raw.get(bucket or self._bucket)
            for kind, seconds in (("first", took[0]), ("repeated", float(np.median(took[1:])))):
                speed = gigabytes(field.nbytes, seconds)
                field.add(f"{size_of(bucket)}, {kind}: transfer", who, speed, "GB/s", speed / raw if raw else None)
                field.add(f"{size_of(bucket)}, {kind}: transfer takes", who, 1000 * seconds, "ms")
        field.same("other weights, against SGLang's own update", "pool, other", "bare, other")
        field.same("weights published, against those loaded by another engine", "pool, first", "bare, as loaded")
        field.ask(field.trainer, do="leave", name=name)
        for engine in engines:
            with suppress(RuntimeError):  # it ends with the field at the latest
                field.ask(engine, do="end")
            engine.stop()
