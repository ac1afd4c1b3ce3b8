"""gpuhook cdi generate and cdi transform root: make CDI documents, and move the paths in them."""

import os
import sys
from typing import Any

import click

from gpuhook.ground import names
from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import CdiError, DriverError, listed, shown
from gpuhook.ground.host import files as host_files
from gpuhook.start import contract
from gpuhook.start.cdi import document as reader
from gpuhook.start.cdi.generate import ALL, DEFAULT_STRATEGIES, STRATEGIES, Generated, Source
from gpuhook.start.cdi.generate import generate as generate_document
from gpuhook.start.cdi.reading import MOST_BYTES
from gpuhook.tools.cdi import readers, stream
from gpuhook.tools.cdi import refresh as refreshing
from gpuhook.tools.cdi import transform as transforming
from gpuhook.tools.cdi import write as writing
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli._help import command, group
from gpuhook.tools.cli._output import config_option, print_json, raise_last, say, warn
from gpuhook.tools.engines.files import Change
from gpuhook.tools.host.programs import our_program
from gpuhook.tools.vendors import survey
from gpuhook.vendors import registry

STDIO = "-"
_CHARLIECLOUD = "charliecloud"
_ENDINGS = tuple(f".{form}" for form in writing.FORMATS)


class Place:
    """Where documents go: to standard output, into a file, or into a folder under their kinds."""

    def __init__(self, output: str, form: str | None) -> None:
        self.output = output
        self.is_file = output.endswith(_ENDINGS) and not os.path.isdir(output)
        self.form = form or _form_of(output) or "yaml"
        name = os.path.basename(output.rstrip("/"))
        if output == STDIO or self.is_file or os.path.isdir(output) or output.endswith("/"):
            return
        if "." in name:
            raise CdiError(
                f"{shown(output)} is a file that no engine reads: they take .yaml and .json alone",
                "Give the file one of these endings, or name a folder",
            )

    def path_of(self, kind: str) -> str:
        """Return the file of a document of that kind."""
        name = "" if self.is_file else writing.file_name(kind, self.form)
        return os.path.abspath(os.path.join(self.output, name) if name else self.output)


def _form_of(path: str) -> str | None:
    return next((form for form in writing.FORMATS if path.endswith(f".{form}")), None)


@command(
    examples={
        "gpuhook cdi generate": "Print a document of the devices of this machine",
        "gpuhook cdi generate --output /etc/cdi/": "Write one for each vendor there",
        "gpuhook cdi generate --kind nvidia.com/gpu --output gpus.yaml": "Write one kind to a file",
    },
)
@config_option
@click.option(
    "--output", metavar="FILE", default=STDIO, show_default=True,
    help="The file, ending in .yaml or .json, or a folder for vendor-class.yaml; - prints it.",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(writing.FORMATS),
    help="How to write it.  [default: as the file ends, else yaml]",
)  # fmt: skip
@click.option(
    "--device-name-strategy", "strategies", type=click.Choice([*STRATEGIES]), multiple=True,
    default=DEFAULT_STRATEGIES, show_default=True,
    help="What devices are called: 0 and 1:0, GPU-..., or gpu0 and mig1:0; may be repeated.",
)  # fmt: skip
@click.option(
    "--device-id", "devices", metavar="ID", multiple=True,
    help="These devices alone, as containers name them, with --kind; may be repeated.",
)  # fmt: skip
@click.option("--no-all-device", is_flag=True, help="Leave out the device all.")
@click.option(
    "--kind", "kinds", metavar="KIND", multiple=True, shell_complete=completing.kinds,
    help="Devices of this kind alone, such as nvidia.com/gpu.  [default: all there are]",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(["auto", "nvml"]), default="auto", show_default=True,
    help="How devices are found: there is one way, and nvidia-ctk's users name it.",
)  # fmt: skip
@click.option(
    "--for", "program", type=click.Choice([_CHARLIECLOUD]),
    help="For a program that reads documents and runs no hook: links become mounts.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the change as a diff and make none.")
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
) -> None:
    """Write a CDI document of the devices of this machine.

    An engine that reads it gives them to containers without gpu-py: podman run --device
    nvidia.com/gpu=0, docker run --device nvidia.com/gpu=all. Make it again whenever the driver,
    the devices or their MIG devices change. A file that would stay the same isn't touched.

    Its version is the lowest that has words for what is in it. What the oldest engine here
    doesn't know is left out, and said.
    """
    del mode
    config = load(config_path)
    form = form or ("json" if program and not _form_of(output) else None)
    place = Place(output, form)
    sources, failed = _sources(config, kinds, save=not dry_run, without_hook=bool(program))
    if devices and len(sources) > 1:
        raise CdiError(
            "Devices are named, and this machine has several kinds of them",
            "Say with --kind which one is meant",
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
            "Name a folder with --output, or one of them with --kind",
        )
    for each in made:
        for warning in each.warnings:
            warn(warning)
    if output == STDIO:
        _print([each.document for each in made], place.form)
    for each in made if output != STDIO else ():
        _deliver(each, place, dry_run=dry_run)
    raise_last(failed)


def _sources(
    config: Config, kinds: tuple[str, ...], *, save: bool, without_hook: bool
) -> tuple[list[Source], list[DriverError]]:
    """Return what there is to make documents of, and which drivers fail beside it.

    DriverError where there is nothing.
    """
    hook = our_program(names.CDI_HOOK, "Reinstall gpuhook, so that its programs are in one folder")

    reader = None if without_hook else readers.oldest()
    how = {"save": save, "without_hook": without_hook}

    def source_of(vendor: contract.Vendor) -> Source:
        return refreshing.source_of(vendor, config, hook, reader, **how)

    known = {each.KIND: each for each in registry.known(config).values()}
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise CdiError(
            f"gpuhook doesn't know devices of the kind {shown(unknown[0])}",
            f"Name one of {listed([*known])} with --kind",
        )
    if kinds:
        return [source_of(contract.load(known[kind])) for kind in dict.fromkeys(kinds)], []
    return survey.present(config, source_of)


def _made(sources: list[Source], how: dict[str, Any], *, explicit: bool) -> list[Generated]:
    """Return the documents; of kinds that nobody named, those that there are devices of."""
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
    """Print documents: several are a stream of YAML, or a list of JSON."""
    if len(documents) > 1:
        warn(
            "Engines read one document of a file: to write a file for each kind, name a folder "
            "with --output"
        )
    if form == "json" and len(documents) > 1:
        print_json(documents)
        return
    for each in documents:
        click.echo(writing.to_text(each, form), nl=False)


def _deliver(made: Generated, place: Place, *, dry_run: bool) -> None:
    text = writing.to_text(made.document, place.form)
    path = place.path_of(made.document["kind"])
    if dry_run:
        click.echo(Change(path, writing.read_old(path), text.encode()).diff(), nl=False)
        return
    if writing.write(path, text):
        say(refreshing.written(made, path))
    else:
        say(f"{path}: unchanged")
    for warning in refreshing.others(path, made.document["kind"]):
        warn(warning)


@group()
def transform() -> None:
    """Change a CDI document as nvidia-ctk cdi transform does."""


@transform.command(
    examples={
        "gpuhook cdi transform root --from /driver --to / --input in.yaml": "Move the driver root",
    },
)
@click.option("--from", "old", metavar="DIR", required=True, help="The root that is in its paths.")
@click.option("--to", "new", metavar="DIR", required=True, help="The root to be there instead.")
@click.option(
    "--relative-to", type=click.Choice([transforming.HOST, transforming.CONTAINER]),
    default=transforming.HOST, show_default=True, help="Whose paths are changed.",
)  # fmt: skip
@click.option(
    "--input",
    "source",
    metavar="FILE",
    default=STDIO,
    show_default=True,
    help="The document; - reads standard input.",
)
@click.option(
    "--output",
    metavar="FILE",
    default=STDIO,
    show_default=True,
    help="The file to write; - prints it.",
)
def root(old: str, new: str, relative_to: str, source: str, output: str) -> None:
    """Move a root in the paths of a CDI document.

    Where documents are made in a container that sees the host's driver in another folder,
    that folder has to become the host's own, in paths of the host, and nothing else changes.
    """
    document = _read(source)
    moved = transforming.root(document, old, new, relative_to)
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
    """Return the document in a file, or on standard input."""
    name = "The document on standard input" if source == STDIO else source
    try:
        if source == STDIO:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)  # its reader says that it is too large
        else:
            data = host_files.read_roots(source)  # protects: transformed-writers
    except OSError as error:
        raise CdiError(
            f"{name} can't be read: {error.strerror}", "Give a file's name with --input"
        ) from None
    reading = reader.read(data)
    if reading.document is None:
        first = reading.problems[0]
        line = f", line {first.line}" if first.line else ""
        raise CdiError(
            f"{name}{line}: {first.sentence}",
            "Correct it; `gpuhook cdi validate` shows all that engines would refuse",
        )
    rest = stream.rest(data)
    if rest is not None:
        raise CdiError(
            f"{name}, line {rest}: a second document begins here, which engines don't read",
            "Give each document a file of its own",
        )
    return reading.document
