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
