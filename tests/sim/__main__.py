"""Replay a schedule, or look for one that fails: `python -m tests.sim --seed 123 --workers 8 [--trace]`."""

import argparse
import sys
import time

from tests.sim.simulation import Failed, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0, help="default: drawn from the seed, 1 to 8")
    parser.add_argument("--packed", action="store_true", help="workers of most groups pack")
    parser.add_argument("--updates", action="store_true", help="weights are published meanwhile")
    parser.add_argument("--paced", action="store_true", help="workers have a pace, and each differs from it")
    parser.add_argument("--unloadable", action="store_true", help="engines of some places never load")
    parser.add_argument("--restarts", action="store_true", help="engines take weights only at their start")
    parser.add_argument("--wide", action="store_true", help="headers and answers are large, and bounds are tight")
    parser.add_argument("--external", action="store_true", help="other programs start most workers, and their links fail")
    parser.add_argument("--stops", action="store_true", help="the coordinator is stopped on purpose and started again")
    parser.add_argument(
        "--faulty", action="store_true", help="internal errors in the coordinator; an operator restarts workers"
    )
    parser.add_argument("--crowded", action="store_true", help="clients ask for more than the queue holds")
    parser.add_argument("--starved", action="store_true", help="engines run out of memory")
    parser.add_argument(
        "--embedding", action="store_true", help="workers embed and give log-probabilities as well, and some calls ask for that"
    )
    parser.add_argument("--commanding", action="store_true", help="callers flush groups")
    parser.add_argument("--generating", action="store_true", help="workers generate as well, and most calls ask for that")
    parser.add_argument("--talking", action="store_true", help="callers go on after what was generated")
    parser.add_argument(
        "--sleeping", action="store_true", help="callers pause groups, put engines to sleep, and let them go on"
    )
    parser.add_argument("--adapting", action="store_true", help="adapters are loaded, replaced and unloaded")
    parser.add_argument("--lengthy", action="store_true", help="many texts count as long")
    parser.add_argument("--count", type=int, default=1, help="so many seeds, from --seed on")
    parser.add_argument("--trace", action="store_true", help="print every event")
    args = parser.parse_args()
    say = print if args.trace else None
    out = sys.stdout.write
    began, events = time.perf_counter(), 0
    for seed in range(args.seed, args.seed + args.count):
        workers = args.workers or 1 + seed % 8
        try:
            outcome = simulate(
                seed,
                workers,
                say,
                packed=args.packed,
                updates=args.updates,
                paced=args.paced,
                unloadable=args.unloadable,
                wide=args.wide,
                external=args.external,
                stops=args.stops,
                faulty=args.faulty,
                crowded=args.crowded,
                starved=args.starved,
                embedding=args.embedding,
                restarts=args.restarts,
                commanding=args.commanding,
                generating=args.generating,
                talking=args.talking,
                sleeping=args.sleeping,
                adapting=args.adapting,
                lengthy=args.lengthy,
            )
        except Failed as failure:
            out(f"{failure}\n")
            return 1
        events += outcome.events
        if args.count == 1:
            out(f"seed {seed}, {workers} workers: digest {outcome.digest:08x}, {outcome.seconds:.1f} s simulated\n")
            out(f"{outcome.events} events, answers {outcome.answers}, updates {outcome.updates}\n")
            if outcome.changes:
                out(f"changes of adapters {dict(sorted(outcome.changes.items()))}\n")
            if outcome.streams:
                out(f"generations {dict(sorted(outcome.streams.items()))}\n")
    if args.count > 1:
        spent = time.perf_counter() - began
        out(f"{args.count} schedules, {events} events, {1000 * spent / args.count:.1f} ms each\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
