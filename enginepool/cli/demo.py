"""`enginepool demo`: a whole pool at work on this machine, a worker killed on the way, and a table of what happened."""

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginepool.cli.choices import Device, EngineName
from enginepool.cli.cli_errors import RUN_FAILED, CommandFailed, run_interruptible

if TYPE_CHECKING:
    from enginepool.config import GroupConfig


#: How long the clients work before the worker is killed, and after it is back.
WORK_S, QUICK_WORK_S = 6.0, 1.5


def demo(
    engine: Annotated[
        EngineName, typer.Option(help="sglang: the real engine with a tiny model; sim: no model, nothing to install.")
    ] = EngineName.sglang,
    device: Annotated[Device, typer.Option(help="Where the engine runs; auto: a CUDA GPU if there is one.")] = Device.auto,
    quick: Annotated[bool, typer.Option("--quick", help="A shorter run.")] = False,
) -> None:
    """Show a pool at work, and a worker killed.

    Two workers score for four clients at two priorities: two bulk jobs keep the queue full, two online clients wait for each
    answer. One worker is killed on the way and comes back. The last lines compare the latencies of both priorities, and say
    which batches were formed. Takes about a minute with the real engine on two CPU cores, and ten seconds with --engine sim.
    Everything is checked: every request must get one answer, each batch must have been one forward pass, and scores asked
    for again must be the same. Exit code 1 if not.

    \b
    Examples:
      enginepool demo
      enginepool demo --engine sim
    """
    missing = [name for name in ("sglang", "torch") if importlib.util.find_spec(name) is None]
    if engine is EngineName.sglang and missing:
        raise CommandFailed(
            f"the real engine needs {' and '.join(missing)}, not installed here: `make demo` in a clone of the project sets "
            "everything up (no GPU needed); or see the same without a model: enginepool demo --engine sim"
        )
    from enginepool.cli.demo_run import DemoRun

    work_s = QUICK_WORK_S if quick else WORK_S
    with tempfile.TemporaryDirectory(prefix="enginepool-demo-") as directory:
        show = DemoRun(work_s=work_s, say=typer.echo)
        show.say("A pool of two workers scores for four clients, and loses a worker on the way.\n")
        group = _sim() if engine is EngineName.sim else _real(Path(directory) / "model", device, show)
        story = run_interruptible(lambda: show.run(group, Path(directory)), lambda: "interrupted")
    from rich.console import Console

    from enginepool.cli.demo_tables import summary, tables

    console = Console()
    console.print(*tables(story), sep="\n\n")
    wrong = story.wrong()
    if wrong:
        raise CommandFailed("the demo failed: " + "; ".join(wrong), RUN_FAILED)
    typer.echo("\n" + "\n".join(summary(story)))


def _sim() -> "GroupConfig":
    """Workers whose forwards take about as long as a small model's."""
    from enginepool.config import GroupConfig

    costs = {"load_s": 0.5, "forward_s": 0.02, "token_s": 2e-5, "batch_tokens": 2048, "batch_rows": 64}
    return GroupConfig(model="sim", engine="sim", workers=2, options=costs)


def _real(directory: Path, device: Device, show: Any) -> "GroupConfig":
    """Workers with a tiny model made in `directory`, on the CPU or on one GPU or two."""
    from enginepool.cli.doctor_checks import probe
    from enginepool.cli.tiny_model_files import make_tiny_model
    from enginepool.config import GroupConfig

    gpus = [] if device is Device.cpu else probe(["torch"]).devices
    if device is Device.cuda and not gpus:
        raise CommandFailed("--device cuda: torch finds no CUDA GPU here; `enginepool doctor` says more")
    show.say("Making a tiny random model ...")
    make_tiny_model(directory)
    if gpus:
        places = [str(i % len(gpus)) for i in range(2)]
        # Two engines may share a GPU, whose attention kernels take half precision alone.
        options = {"mem_fraction_static": 0.3, "max_total_tokens": 32_768}
        return GroupConfig(model=str(directory), workers=2, device="cuda", dtype="bfloat16", gpus=places, options=options)
    return GroupConfig(model=str(directory), workers=2, device="cpu", dtype="float32")
