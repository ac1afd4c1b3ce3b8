"""gpuhook cdi generate and cdi transform root: generate CDI specs, and change their paths."""

import os
import sys
from typing import Any

import click

from gpuhook.base import names
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import CdiError, DriverError, listed, shown
from gpuhook.base.host import files as host_files
from gpuhook.core import contract
from gpuhook.core.cdi import document as reader
from gpuhook.core.cdi.generate import ALL, DEFAULT_STRATEGIES, STRATEGIES, GeneratedSpec, SpecSource
from gpuhook.core.cdi.generate import generate as generate_document
from gpuhook.core.cdi.parse_result import MOST_BYTES
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.monitor.vendors import survey
from gpuhook.tools.cdi import refresh as refreshing
from gpuhook.tools.cdi import transform as transforming
from gpuhook.tools.cdi import write, yaml_text
from gpuhook.tools.cdi import write as writing
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._help import command, group
from gpuhook.tools.cli._output import config_option, print_json, raise_last, say, warn
from gpuhook.tools.engines.files import Change
from gpuhook.vendors import registry

STDIO = "-"
_CHARLIECLOUD = "charliecloud"
_ENDINGS = tuple(f".{form}" for form in writing.FORMATS)


class SpecDestination:
    """Destination of CDI specs: standard output, a file, or a folder with a file per kind."""

    def __init__(self, output: str, form: str | None) -> None:
        self.output = output
        self.is_file = output.endswith(_ENDINGS) and not os.path.isdir(output)
        self.form = form or _form_of(output) or "yaml"
        name = os.path.basename(output.rstrip("/"))
        if output == STDIO or self.is_file or os.path.isdir(output) or output.endswith("/"):
            return
        if "." in name:
            raise CdiError(
                f"{shown(output)} is a file that no engine reads: they read only .yaml and .json",
                "Give the file one of these extensions, or name a folder",
            )

    def path_of(self, kind: str) -> str:
        """Return the file for a CDI spec of the given kind."""
        name = "" if self.is_file else writing.file_name(kind, self.form)
        return os.path.abspath(os.path.join(self.output, name) if name else self.output)


def _form_of(path: str) -> str | None:
    return next((form for form in writing.FORMATS if path.endswith(f".{form}")), None)


@command(
    examples={
        "gpuhook cdi generate": "Print a CDI spec of this host's devices",
        "gpuhook cdi generate --output /etc/cdi/": "Write one file per vendor",
        "gpuhook cdi generate --output /etc/cdi/ --summary json": "Report the files for programs",
        "gpuhook cdi generate --kind nvidia.com/gpu --output gpus.yaml": "Write one kind to a file",
    },
)
@config_option
@click.option(
    "--output", metavar="FILE", default=STDIO, show_default=True,
    help="File ending in .yaml or .json, or folder for vendor-class.yaml (- for stdout).",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(writing.FORMATS),
    help="Output format.  [default: from the file's extension, else yaml]",
)  # fmt: skip
@click.option(
    "--device-name-strategy", "strategies", type=click.Choice([*STRATEGIES]), multiple=True,
    default=DEFAULT_STRATEGIES, show_default=True,
    help="Form of device names: 0 and 1:0, GPU-..., or gpu0 and mig1:0 (repeatable).",
)  # fmt: skip
@click.option(
    "--device-id", "devices", metavar="ID", multiple=True,
    help="Include only this device, by the name containers use; with --kind (repeatable).",
)  # fmt: skip
@click.option("--no-all-device", is_flag=True, help="Omit the device named all.")
@click.option(
    "--kind", "kinds", metavar="KIND", multiple=True, shell_complete=completing.kinds,
    help="Include only devices of this kind, such as nvidia.com/gpu.  [default: all kinds]",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(["auto", "nvml"]), default="auto", show_default=True,
    help="Discovery mode; for compatibility with nvidia-ctk, all values mean the same.",
)  # fmt: skip
@click.option(
    "--for", "program", type=click.Choice([_CHARLIECLOUD]),
    help="Write no hooks, for programs that don't run them: links become mounts.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the change as a diff without making it.")
@click.option(
    "--summary", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="Form of the report on written files.",
)  # fmt: skip
def generate(
    config_path: str | None,
    output: str,
    form: str | None,
    strategies: tuple[str, ...],
    devices: tuple[str, ...],
    no_all_device: bool,
    kinds: tuple[str, ...],
    mode: str,
    program: str | None,
    dry_run: bool,
    summary: str,
) -> None:
    """Generate a CDI spec for the devices of this host.

    An engine that reads it adds the devices to containers without gpu-py: podman run --device
    nvidia.com/gpu=0, docker run --device nvidia.com/gpu=all. Generate it again when the driver,
    the devices or the MIG devices change. A file that would not change isn't rewritten.

    The CDI version is the lowest that supports the content. Content that the oldest engine on
    this host doesn't support is omitted with a warning.
    """
    del mode
    config = load(config_path)
    form = form or ("json" if program and not _form_of(output) else None)
    place = SpecDestination(output, form)
    sources, failed = _sources(config, kinds, save=not dry_run, without_hook=bool(program))
    if devices and len(sources) > 1:
        raise CdiError(
            "--device needs one kind of device, and this host has several",
            "Select one with --kind",
        )
    how = {
        "strategies": strategies,
        "selectors": devices or (ALL,),
        "all_device": not no_all_device,
    }
    made = _made(sources, how, explicit=bool(kinds))
    if place.is_file and len(made) > 1:
        found = [each.document["kind"] for each in made]
        raise CdiError(
            f"One file can't describe the devices of several kinds ({listed(found)})",
            "Name a folder with --output, or select one kind with --kind",
        )
    for each in made:
        for warning in each.warnings:
            warn(warning)
    if output == STDIO:
        _print([each.document for each in made], place.form)
    elif dry_run:
        for each in made:
            _show_change(each, place)
    else:
        written = [_deliver(each, place, quiet=summary == "json") for each in made]
        if summary == "json":
            print_json(written)
    raise_last(failed)


def _sources(
    config: Config, kinds: tuple[str, ...], *, save: bool, without_hook: bool
) -> tuple[list[SpecSource], list[DriverError]]:
    """Return the sources for CDI specs, and the errors of drivers that failed.

    DriverError if there is no source.
    """
    hook = our_program(names.CDI_HOOK, "Reinstall gpuhook, so that its programs are in one folder")

    reader = None if without_hook else write.oldest_reader()
    how = {"save": save, "without_hook": without_hook}

    def source_of(vendor: contract.Vendor) -> SpecSource:
        return refreshing.source_of(vendor, config, hook, reader, **how)

    known = {each.KIND: each for each in registry.all_vendors(config).values()}
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise CdiError(
            f"gpuhook doesn't support devices of the kind {shown(unknown[0])}",
            f"Name one of {listed([*known])} with --kind",
        )
    if kinds:
        return [source_of(contract.load(known[kind])) for kind in dict.fromkeys(kinds)], []
    return survey.present(config, source_of)


def _made(sources: list[SpecSource], how: dict[str, Any], *, explicit: bool) -> list[GeneratedSpec]:
    """Return the CDI specs; kinds that weren't requested are omitted if they have no devices."""
    made, errors = [], []
    for source in sources:
        try:
            made.append(generate_document(source, **how))
        except CdiError as error:
            errors.append(error)
    if errors and (explicit or not made):
        raise errors[0]
    return made


def _print(documents: list[dict[str, Any]], form: str) -> None:
    """Print CDI specs; several are printed as a YAML stream or a JSON list."""
    if len(documents) > 1:
        warn(
            "Engines read only one CDI spec per file: to write a file for each kind, name a "
            "folder with --output"
        )
    if form == "json" and len(documents) > 1:
        print_json(documents)
        return
    for each in documents:
        click.echo(writing.to_text(each, form), nl=False)


def _show_change(made: GeneratedSpec, place: SpecDestination) -> None:
    path = place.path_of(made.document["kind"])
    text = writing.to_text(made.document, place.form)
    click.echo(Change(path, writing.read_old(path), text.encode()).diff(), nl=False)


def _deliver(made: GeneratedSpec, place: SpecDestination, *, quiet: bool) -> dict[str, Any]:
    """Write a CDI spec; return what was written, as docs/json.md describes it."""
    kind = made.document["kind"]
    path = place.path_of(kind)
    changed = writing.write(path, writing.to_text(made.document, place.form))
    if not quiet:
        say(refreshing.written(made, path) if changed else f"{path}: unchanged")
    others = [*refreshing.others(path, kind)]
    for warning in others:
        warn(warning)
    return {
        "kind": kind,
        "path": path,
        "changed": changed,
        "devices": [each["name"] for each in made.document["devices"]],
        "warnings": [*made.warnings, *others],
    }


@group()
def transform() -> None:
    """Transform CDI specs as nvidia-ctk cdi transform does."""


@transform.command(
    examples={
        "gpuhook cdi transform root --from /driver --to / --input in.yaml": "Move the driver root",
    },
)
@click.option(
    "--from", "old", metavar="DIR", default="/", show_default=True,
    help="Current root of its paths.",
)  # fmt: skip
@click.option(
    "--to", "new", metavar="DIR", default="/", show_default=True, help="New root of its paths.",
)  # fmt: skip
@click.option(
    "--relative-to", type=click.Choice([transforming.HOST, transforming.CONTAINER]),
    default=transforming.HOST, show_default=True,
    help="Paths to change: on the host or in the container.",
)  # fmt: skip
@click.option(
    "--input",
    "source",
    metavar="FILE",
    default=STDIO,
    show_default=True,
    help="CDI spec to read (- for stdin).",
)
@click.option(
    "--output",
    metavar="FILE",
    default=STDIO,
    show_default=True,
    help="File to write (- for stdout).",
)
def root(old: str, new: str, relative_to: str, source: str, output: str) -> None:
    """Replace the root in the paths of a CDI spec.

    Use it if the spec was generated in a container that has the host's driver in another
    folder: replace that folder by the host's in host paths. Nothing else changes.
    """
    document = _read(source)
    moved = transforming.root(document, old or "/", new or "/", relative_to)
    form = _form_of(output) or _form_of(source) or "yaml"
    text = writing.to_text(moved, form)
    if output == STDIO:
        click.echo(text, nl=False)
        return
    mode = host_files.copy_mode(source) or writing.MODE
    if writing.write(os.path.abspath(output), text, mode):
        say(f"wrote {os.path.abspath(output)}")
    else:
        say(f"{os.path.abspath(output)}: unchanged")


def _read(source: str) -> dict[str, Any]:
    """Return the CDI spec in a file, or on standard input."""
    name = "The CDI spec on standard input" if source == STDIO else source
    try:
        if source == STDIO:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)  # the parser reports one that is too large
        else:
            data = host_files.read_roots(source)  # protects: transformed-writers
    except OSError as error:
        raise CdiError(
            f"{name} can't be read: {error.strerror}", "Name a file with --input"
        ) from None
    reading = reader.read(data)
    if reading.document is None:
        first = reading.problems[0]
        line = f", line {first.line}" if first.line else ""
        raise CdiError(
            f"{name}{line}: {first.sentence}",
            "Correct it; `gpuhook cdi validate` shows all that engines would refuse",
        )
    rest = yaml_text.second_document(data)
    if rest is not None:
        raise CdiError(
            f"{name}, line {rest}: a second CDI spec starts here, which engines don't read",
            "Give each CDI spec a file of its own",
        )
    return reading.document
