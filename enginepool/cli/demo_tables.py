"""The tables at the end of `enginepool demo`."""

import numpy as np
from rich.box import SIMPLE, SIMPLE_HEAD
from rich.table import Table

from enginepool.cli.demo_run import Story


def tables(story: Story) -> list[Table]:
    """What each client saw, then what the pool did."""
    clients = Table(title="What the clients saw", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    clients.add_column("client")
    for name in ("priority", "requests", "answers", "lost", "p50 ms", "p99 ms"):
        clients.add_column(name, justify="right")
    for client in story.clients:
        times = [1000 * (end - at) for _, at, end in client.answers.values()] or [float("nan")]
        clients.add_row(
            client.name,
            str(client.priority),
            str(client.sent),
            str(len(client.answers)),
            str(client.lost),
            f"{np.percentile(times, 50):.0f}",
            f"{np.percentile(times, 99):.0f}",
        )

    pool = Table(title="What the pool did", title_justify="left", title_style="bold", box=SIMPLE, show_header=False)
    pool.add_column()
    pool.add_column(justify="right")
    group = story.group
    for name, value in (
        ("answers that the coordinator counted", str(group.answered)),
        ("batches", str(group.batches)),
        ("rows in a batch, on average", f"{story.rows / group.batches:.1f}" if group.batches else "-"),
        ("requests in a batch, on average", f"{story.parts / group.batches:.1f}" if group.batches else "-"),
        ("forward passes for each batch", f"{group.forwards / group.batches:.2f}" if group.batches else "-"),
        ("batches cut up by the engine", str(group.split_batches)),
        ("workers killed", "1"),
        ("requests unanswered at that moment", str(story.open_at_kill)),
        ("batches that died with it, and were run again", str(group.lost_batches)),
        ("workers started again", str(sum(worker.restarts for worker in group.workers))),
        ("seconds until the new worker was ready", f"{story.back_s:.1f}"),
        ("answers in that time", str(story.meanwhile)),
        ("requests asked again, with the same scores", f"{story.asked_again - story.differing} of {story.asked_again}"),
    ):
        pool.add_row(name, value)
    return [clients, pool]


def summary(story: Story) -> list[str]:
    """The last lines of a run that kept its promises."""
    online, bulk = ([story.latency_ms(percent, urgent=urgent) for percent in (50, 99)] for urgent in (True, False))
    times = " and ".join(
        f"{' / '.join(f'{ms:.0f}' for ms in each)} ms {who}"
        for who, each in (("online (priority 100)", online), ("bulk (0)", bulk))
    )
    ratios = " / ".join(f"{one / other:.2f}" for one, other in zip(online, bulk, strict=True))
    group = story.group
    mean = f"{story.rows / group.batches:.1f} rows of {story.parts / group.batches:.1f} requests"
    return [
        f"Priority: p50 / p99 {times}, ratio {ratios}.",
        f"Batches: {group.batches} of {mean} on average, {group.split_batches} cut up: each was one forward pass.",
        f"Nothing was lost: {story.sent} requests, {story.answered} answers, one for each.",
    ]
