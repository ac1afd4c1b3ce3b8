"""gpuhook doctor: checks of the installation, each problem with its remedy."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import click

from gpuhook import __version__
from gpuhook.base.errors import printable
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json
from gpuhook.tools.doctor import BeforeUpdate, Case, Examination, Finding, Status, examine, worst
from gpuhook.tools.doctor.report import write_report
from gpuhook.tools.engines.known import ENGINES

_WIDTH = 9  # width of the status column


@command(
    examples={
        "gpuhook doctor": "Check this host",
        "gpuhook doctor --report gpuhook-report.tar.gz": "Also write a bug report",
        "gpuhook doctor --before-update": "Show who uses the driver before you update it",
    },
)
@click.option(
    "--engine",
    type=click.Choice([*ENGINES]),
    help="Check only this engine, and what all engines need.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print only problems.")
@click.option(
    "--report",
    "report_path",
    metavar="FILE",
    help="Also write a tar.gz for bug reports, without values of environment variables.",
)
@click.option(
    "--before-update",
    is_flag=True,
    help="Report only what uses the driver, what restarts that, and what an update makes stale.",
)
@click.option(
    "--npd", is_flag=True, help="Print one line, with node-problem-detector's exit status."
)
@config_option
@format_option
def doctor(
    engine: str | None,
    quiet: bool,
    before_update: bool,
    npd: bool,
    report_path: str | None,
    config_path: str | None,
    output_format: str,
) -> None:
    """Check the driver, gpuhook and the engines, and suggest fixes. Changes nothing.

    Checks that would only report the cause of a problem again are skipped. Problems are printed
    last, failures after warnings. A note describes something optional. The exit status is 0 if
    there are no problems, 1 with warnings and 2 with failures.

    With --before-update, 0 means that nothing uses the driver, 1 that something will be stale
    after an update, and 2 that a process has the driver open. With --npd, 0 means no failures, 1
    failures, and 2 that the state is unknown.
    """
    if before_update and (npd or engine):
        raise click.UsageError("--before-update can't be combined with --npd or --engine.")
    case = Case.of_this_machine(config_path, sys.argv[0])
    case.engine = engine or ""
    update = BeforeUpdate() if before_update else None
    examination = examine(case, update.steps()) if update else examine(case)
    if npd:
        sys.exit(_report_to_npd(examination, as_json=output_format == "json"))
    for finding in examination:
        if output_format == "text" and not finding.status.exit_status and not quiet:
            _print(finding)
    if output_format == "text":
        _print_wrong(examination.findings)
    status = worst(examination.findings)
    if output_format == "json":
        more = {"holders": [each.to_json() for each in update.holders]} if update else {}
        print_json({**_to_json(status, examination, quiet), **more})
    elif not quiet:
        _print_summary(examination)
    if report_path:
        write_report(report_path, case, examination.findings)
        if output_format == "text" and not quiet:
            click.echo(f"Wrote the report to {printable(report_path)}; read it before you send it.")
    sys.exit(status.exit_status)


def _report_to_npd(examination: Examination, *, as_json: bool) -> int:
    """Print one line for node-problem-detector; return its status: 0 OK, 1 NonOK, 2 Unknown."""
    counts = Counter(finding.status for finding in examination)
    failed = [each for each in examination.findings if each.status is Status.FAILURE]
    if examination.broken or os.geteuid():
        why = (
            f"the check {examination.broken[0]} failed" if examination.broken else "run it as root"
        )
        status, line = 2, f"gpuhook: state unknown: {why}"
    elif failed:
        more = f" ({len(failed) - 1} more)" if failed[1:] else ""
        status, line = 1, f"{failed[0].check}: {failed[0].message}{more}"
    else:
        status, line = 0, f"gpuhook: no failure, {_number(counts[Status.WARNING], 'warning')}"
    line = printable(line)
    if as_json:
        found = _to_json(worst(examination.findings), examination, quiet=True)
        print_json({**found, "npd": {"status": status, "message": line}})
    else:
        click.echo(line)
    return status


def _is_wanted(finding: Finding, quiet: bool) -> bool:
    return not quiet or bool(finding.status.exit_status)


def _to_json(status: Status, examination: Examination, quiet: bool) -> dict[str, object]:
    wanted = [each.to_json() for each in examination.findings if _is_wanted(each, quiet)]
    return {
        "status": status,
        "host": os.uname().nodename,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "findings": wanted,
        "skipped": examination.skipped,
    }


def _print_wrong(findings: Sequence[Finding]) -> None:
    """Print the problems, the worst last, each cause before its effects."""
    for status in (Status.WARNING, Status.FAILURE):
        for finding in findings:
            if finding.status is status:
                _print(finding)


def _print(finding: Finding) -> None:
    from gpuhook.tools.cli._screen import BAD, GOOD, POOR, beside, show, text  # noqa: PLC0415

    styles = {Status.OK: GOOD, Status.NOTE: "", Status.WARNING: POOR, Status.FAILURE: BAD}
    head = text(finding.status, styles[finding.status])
    show(beside(head, text(f"{finding.check}: {finding.message}."), _WIDTH))
    if finding.remedy:
        arrow = "->".rjust(_WIDTH + 2)
        show(beside(text(arrow), text(f"{finding.remedy}."), _WIDTH + 3))


def _print_summary(examination: Examination) -> None:
    from gpuhook.tools.cli._screen import show, text  # noqa: PLC0415

    found = examination.findings
    counts = Counter(each.status for each in found)
    click.echo()
    if examination.skipped:
        checks = _number(len(examination.skipped), "check")
        again = "run gpuhook doctor again when it is fixed"
        show(text(f"{checks} skipped because of the same problem: {again}."))
    ranks = (Status.NOTE, Status.WARNING, Status.FAILURE)
    rest = ", ".join(_number(counts[status], status.value) for status in ranks)
    show(text(f"{counts[Status.OK]} ok, {rest}"))


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
