"""The tables of `enginepool weights`; they fit 80 columns where names do."""

from datetime import datetime

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from enginepool.protocol.messages.weight_reports import UpdateRecord, WeightsReport, WorkerWeights

#: phases in which the pool serves; in `hold`, of which others are parts, the group stands still
_SERVING = ("open", "join", "transfer", "staged")
_STILL = "hold"
_COLOURS = {"nan": "red", "infinity": "red", "overflow": "red", "zero": "yellow"}


def version_table(report: WeightsReport) -> Group:
    """The committed version, and what each worker holds."""
    table = _table("worker", "version", "digest", "")
    for worker in report.workers:
        holds = not worker.message and worker.version == report.version
        table.add_row(
            escape(worker.name),
            "-" if worker.message else f"[{'green' if holds else 'yellow'}]{worker.version}[/]",
            worker.digest[:12] or "-",
            escape(worker.message),
        )
    return Group(_head(report), "", table)


def history_table(report: WeightsReport) -> RenderableType:
    """One line for each update."""
    if not report.history:
        return Group(_head(report), "no update since the coordinator was started")
    table = _table("at", "version", "outcome", "transfer", right=("workers", "MB", "serving s", "still ms"))
    notes: list[str] = []
    for record in report.history:
        good = record.outcome == "committed"
        table.add_row(
            datetime.fromtimestamp(record.at).strftime("%H:%M:%S"),
            str(record.version),
            f"[{'green' if good else 'red'}]{record.outcome}[/]",
            record.transfer,
            f"{record.committed}/{record.members}",
            f"{record.sent_bytes / 1e6:.1f}",
            f"{_us(record, *_SERVING) / 1e6:.2f}",
            f"{_us(record, _STILL) / 1e3:.1f}" if good else "-",
        )
        if record.message:
            notes.append(f"version {record.version}: {escape(record.message)}")
    return Group(_head(report), "", table, *(["", *notes] if notes else []))


def digest_table(report: WeightsReport) -> Group:
    """The digest of each worker's weights, as its engine has them."""
    table = _table("worker", "version", "digest of what is in the engine")
    for worker in report.workers:
        said = f"[yellow]{escape(worker.message)}[/]" if not_comparable(worker) else worker.digest or _why(worker)
        table.add_row(escape(worker.name), str(worker.version), said)
    return Group(_head(report), "", table)


def not_comparable(worker: WorkerWeights) -> bool:
    """Whether its engine holds the weights in another form than they were sent in; `message` says why."""
    return worker.code == "unsupported"


def findings_table(report: WeightsReport) -> Group:
    """What is wrong in each worker, or that nothing is."""
    table = _table("worker", "version", "finding", "tensor", right=("elements",))
    for worker in report.workers:
        if worker.message or not worker.findings:
            table.add_row(escape(worker.name), str(worker.version), _why(worker) or "[green]nothing[/]", "", "")
        for finding in worker.findings:
            kind = f"[{_COLOURS[finding.kind]}]{finding.kind}[/]"
            table.add_row(escape(worker.name), str(worker.version), kind, escape(finding.name), str(finding.count))
    return Group(_head(report), "", table)


def _head(report: WeightsReport) -> str:
    digest = f", digest {report.digest}" if report.digest else ", as in its checkpoint"
    return f"[bold]{escape(report.group)}[/]: version {report.version}{digest}"


def _why(worker: WorkerWeights) -> str:
    return f"[red]{escape(worker.message)}[/]" if worker.message else ""


def taken(record: UpdateRecord) -> float:
    """Seconds from the offer to the commit."""
    return (_us(record, *_SERVING) + _us(record, _STILL)) / 1e6


def _us(record: UpdateRecord, *phases: str) -> int:
    return sum(record.phases.get(phase, 0) for phase in phases)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=bool(column))
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table
