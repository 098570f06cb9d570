"""The arguments of every command that sends a file of requests through a pool."""

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One request on each line, see below; - is stdin.")]
Target = Annotated[
    Path, typer.Argument(metavar="OUT.jsonl", help="One answer on each line, appended as they come; - is stdout.")
]
Group = Annotated[str, typer.Option("--group", help="The group to ask; a pool of one group needs no name.")]
Priority = Annotated[int, typer.Option("--priority", min=-1000, max=1000, help="Larger runs first.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Give a request up after this long.")
]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, max=4096, help="Requests under way at a time.")]
MinVersion = Annotated[
    int,
    typer.Option("--min-version", metavar="VERSION", min=0, help="The oldest weights that may answer; requests wait for them."),
]
MixedVersions = Annotated[
    bool, typer.Option("--mixed-versions", help="Go on although OUT has answers of another weight version.")
]
RetryErrors = Annotated[bool, typer.Option("--retry-errors", help="Ask again what OUT has an error for.")]
