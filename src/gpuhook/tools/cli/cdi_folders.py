"""gpuhook cdi list and validate: devices in CDI specs, and errors in the specs."""

import sys
from collections.abc import Callable

import click

from gpuhook.base.config.loader import load
from gpuhook.base.errors import GpuhookError, printable
from gpuhook.base.host import files as host_files
from gpuhook.core.cdi import folders
from gpuhook.core.cdi.folders import FileError, FolderContent
from gpuhook.core.cdi.parse_result import MOST_BYTES
from gpuhook.tools.cdi import managed_specs
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json
from gpuhook.tools.engines.prefix import state_folder

_SECOND = "a second CDI spec starts here, and engines read only the first: give it its own file"


def _folders_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--spec-dir",
        "spec_dirs",
        metavar="FOLDER",
        multiple=True,
        help="Folder of CDI specs to use instead of the configured ones (repeatable; last wins).",
    )(command)


@command(
    "list",
    examples={
        "gpuhook cdi list": "Show the names that podman and docker run --device accept",
        "gpuhook cdi list --spec-dir /etc/cdi --format json": "The same for one folder, as JSON",
    },
)
@_folders_option
@config_option
@format_option
def list_(spec_dirs: tuple[str, ...], config_path: str | None, output_format: str) -> None:
    """List the CDI device names that engines accept, each with its file.

    Also reports names that are in two files, and files that engines don't read, with the reason.
    """
    chosen = spec_dirs or load(config_path).cdi_spec_dirs
    found = folders.read_folders(chosen)
    _add_rests(found)
    devices = [found.devices[name] for name in sorted(found.devices)]
    if output_format == "json":
        print_json(
            {
                "devices": [{"name": each.name, "file": each.file} for each in devices],
                "conflicts": [
                    {"name": name, "files": files}
                    for name, files in sorted(found.conflicts.items())
                ],
                "errors": [error.to_json() for error in found.errors],
                "ignored": [each.to_json() for each in found.ignored],
            }
        )
        return
    if devices:
        from gpuhook.tools.cli import _screen  # noqa: PLC0415 - costs a tenth of a second

        rows = [(each.name, each.file) for each in devices]
        _screen.show(_screen.table(("NAME", "FILE"), rows, less=("FILE",)))
    else:
        click.echo(f"There are no CDI devices in {printable(', '.join(chosen))}.")
    _report([*map(str, found.errors), *_conflicts(found)], found)
    _report_refresh()


def _report_refresh() -> None:
    """Report why the last refresh failed, because devices may be missing."""
    try:
        found = managed_specs.last_errors(state_folder(None, ""))
        failures = [f"{each.kind} {each.error}".strip() for each in found]
    except GpuhookError as error:
        failures = [error.cause]
    for each in failures:
        click.echo(f"last refresh: {printable(each)}", err=True)


@command(
    examples={
        "gpuhook cdi validate": "Check the CDI specs in the folders that engines read",
        "gpuhook cdi validate ./nvidia.yaml": "Check one file before you install it",
    },
)
@click.argument("files", metavar="[FILE]...", nargs=-1)
@_folders_option
@config_option
def validate(files: tuple[str, ...], spec_dirs: tuple[str, ...], config_path: str | None) -> None:
    """Check CDI specs; exit with status 1 if engines would refuse or ignore any part.

    Without FILE, all CDI specs in the folders are checked, and that no device name is in two of
    them.
    """
    if files and spec_dirs:
        raise click.UsageError("Name files, or folders with --spec-dir, but not both.")
    if files:
        found = FolderContent()
        for file in files:
            _examine(file, found)
    else:
        found = folders.read_folders(spec_dirs or load(config_path).cdi_spec_dirs)
    _add_rests(found)
    errors = [*map(str, found.errors), *_conflicts(found)]
    if spec_dirs:
        errors += [str(each) for each in found.ignored if each.reason == folders.MISSING]
    _report(errors, found)
    if errors:
        sys.exit(1)
    count = len(found.documents)
    click.echo(f"{count} CDI spec{'' if count == 1 else 's'} checked, no errors")


def _examine(file: str, found: FolderContent) -> None:
    """Check one file, and that engines read files with such a name."""
    errors, document = folders.examine(file)
    if not file.endswith(folders.ENDINGS):
        errors.append(FileError(file, None, folders.OTHER_ENDING))
    found.errors += errors
    if document is not None:
        found.documents[file] = document


def _add_rests(found: FolderContent) -> None:
    """Add an error for each file with more than one CDI spec."""
    if not found.documents:
        return
    from gpuhook.tools.cdi import yaml_text  # noqa: PLC0415 - slow to import

    for path in found.documents:
        try:
            line = yaml_text.second_document(host_files.read_start(path, MOST_BYTES + 1))
        except OSError:  # removed since it was read
            continue
        if line is not None:
            found.errors.append(FileError(path, line, _SECOND))


def _conflicts(found: FolderContent) -> list[str]:
    return [
        f"{name} is in {' and '.join(files)}, so none of these files counts for it"
        for name, files in sorted(found.conflicts.items())
    ]


def _report(errors: list[str], found: FolderContent) -> None:
    """Print errors and ignored parts to standard error."""
    for error in errors:
        click.echo(f"error: {printable(error)}", err=True)
    for each in found.ignored:
        if str(each) not in errors:
            click.echo(f"ignored: {printable(str(each))}", err=True)
