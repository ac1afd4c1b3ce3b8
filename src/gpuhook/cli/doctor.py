"""gpuhook doctor: what a support engineer would check, each line with its remedy."""

import sys

import click

from gpuhook.cli._help import command
from gpuhook.cli._output import config_option, format_option, print_json
from gpuhook.doctor import Case, Finding, Status, examine, worst
from gpuhook.doctor.report import write_report

_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "red"}


@command(
    examples={
        "gpuhook doctor": "Check this machine",
        "gpuhook doctor --report gpuhook-report.tar.gz": "Pack what a bug report needs",
    },
)
@click.option(
    "--report",
    "report_path",
    metavar="FILE",
    help="Also write a tar.gz for bug reports; it holds no environment values.",
)
@config_option
@format_option
def doctor(report_path: str | None, config_path: str | None, output_format: str) -> None:
    """Check the driver, gpuhook and the engines, and say what to do. Changes nothing.

    The exit status is 0 if all is well, 1 with warnings and 2 with failures.
    """
    case = Case.of_this_machine(config_path, sys.argv[0])
    findings = []
    for finding in examine(case):
        findings.append(finding)
        if output_format == "text":
            _print(finding)
    status = worst(findings)
    if output_format == "json":
        print_json({"status": status, "findings": [finding.to_json() for finding in findings]})
    else:
        click.echo(_summary(findings))
    if report_path:
        write_report(report_path, case, findings)
    sys.exit(status.exit_status)


def _print(finding: Finding) -> None:
    word = click.style(f"{finding.status:8}", fg=_COLOURS[finding.status])
    click.echo(f"{word} {finding.check}: {finding.message}.")
    if finding.remedy:
        click.echo(f"         -> {finding.remedy}.")


def _summary(findings: list[Finding]) -> str:
    counts = [sum(finding.status == status for finding in findings) for status in Status]
    return f"\n{counts[0]} ok, {counts[1]} warnings, {counts[2]} failures"
