"""``gpuhook uninstall``: remove the changes of ``gpuhook install`` to container engines."""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import click

from gpuhook.base import names
from gpuhook.base.errors import EngineError
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.tools.cdi.managed_specs import ManagedSpecs, kept
from gpuhook.tools.cli import _documents as documents
from gpuhook.tools.cli import _engines as shared
from gpuhook.tools.cli import _guests as guests
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import format_option, print_json, say, warn
from gpuhook.tools.engines import containerd_settings, files, in_use, installer
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.installer import Outcome
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.prefix import is_rootless, state_folder
from gpuhook.tools.engines.store import FileRecord, Store
from gpuhook.tools.vendors.nvidia import program_links as nvidia_names

_NOTHING = "gpuhook install changed nothing here: there is nothing to remove"


@dataclass(frozen=True)
class UninstallSelection:
    """Selection of changes to remove: engines, and a configuration file if it isn't None.

    ``state`` is the folder of the records; paths are below ``prefix``.
    """

    engines: frozenset[str]
    config: str | None
    prefix: str
    state: str
    reload: bool
    unless_in_use: bool
    force: bool
    dry_run: bool

    def has(self, record: FileRecord) -> bool:
        """Tell whether a record's changes are selected."""
        if record.engine not in self.engines or self.config is None:
            return record.engine in self.engines
        main = ENGINES[record.engine].main_file
        return main(os.path.abspath(record.config)) == main(self.config)


@command(
    examples={
        "gpuhook uninstall --dry-run": "Show what would be removed",
        "gpuhook uninstall --engine docker --reload": "Also reload the running Docker",
    },
)
@click.option(
    "--engine", "engines", type=click.Choice([*ENGINES, shared.ALL]), multiple=True,
    default=[shared.ALL], show_default=True, help="Container engine (repeatable).",
)  # fmt: skip
@click.option("--config", metavar="FILE", help="Remove only changes to this configuration file.")
@click.option("--container", metavar="NAME", help="Remove only changes to this LXC container.")
@click.option("--prefix", metavar="DIR", default="", help="Folder to use as /.")
@click.option(
    "--state-dir",
    metavar="DIR",
    help="Folder of the records of changes.  [default: /var/lib/gpuhook]",
)
@click.option("--reload", is_flag=True, help="Also remove the runtime from the running Docker.")
@click.option(
    "--unless-in-use", is_flag=True,
    help="As --reload, but change nothing while a container, an engine or a foreign CDI spec "
    "needs gpuhook.",
)  # fmt: skip
@click.option(
    "--force", is_flag=True, help="Continue while running containers of these engines need gpu-py."
)
@click.option("--dry-run", is_flag=True, help="Print the changes as a diff without making them.")
@format_option
def uninstall(
    engines: tuple[str, ...],
    config: str | None,
    container: str | None,
    prefix: str,
    state_dir: str | None,
    reload: bool,
    unless_in_use: bool,
    force: bool,
    dry_run: bool,
    output_format: str,
) -> None:
    """Remove the changes of ``gpuhook install``.

    A file without other changes is restored byte for byte; from other files only our settings
    are removed. The CDI specs of ``--cdi`` are removed with the last engine. Nothing is changed
    while running containers of the engines need gpu-py, unless --force is given. Stopped ones
    that need it are listed.
    """
    if force and unless_in_use:
        raise click.UsageError("--force and --unless-in-use exclude each other.")
    prefix, state = prefix and os.path.abspath(prefix), state_folder(state_dir, prefix)
    if container:
        if config or {*engines} != {guests.LXC}:
            raise click.UsageError("--container needs --engine lxc, without --config.")
        config = prefix.rstrip("/") + guests.support(guests.LXC).file_of(state, container)
    chosen = UninstallSelection(
        frozenset(ENGINES if shared.ALL in engines else engines), shared.absolute(config), prefix,
        state, reload or unless_in_use, unless_in_use, force, dry_run,
    )  # fmt: skip
    as_json = output_format == "json"
    with shared.silent() if as_json else contextlib.nullcontext():
        report = _take_back(chosen)
    if as_json:
        print_json(report)


def _take_back(chosen: UninstallSelection) -> dict[str, Any]:
    """Remove the changes; return the report for JSON."""
    state, dry_run = chosen.state, chosen.dry_run
    store = Store(state, chosen.prefix)
    links = nvidia_names.LinkRecord(state, chosen.prefix)
    site = documents.Site(state, chosen.prefix, dry_run)
    with contextlib.nullcontext() if dry_run else store.locked():
        known = store.records()
        records = [record for record in known if chosen.has(record)]
        is_last = len(records) == len(known)
        before = kept(state, chosen.prefix)
        ends = _engines_that_end(before, chosen, records, known)
        if chosen.unless_in_use:
            program = our_program(names.RUNTIME)
            in_use.check(program, store, records)
            if is_last and (before is None or {*ends} == {*before.engines}):
                documents.check_unused(site, os.path.dirname(program), before)
        elif not (chosen.force or chosen.prefix):
            _check_running(store, records, dry_run=dry_run)
        if not records and not ends and not (is_last and links.links()):
            say(_NOTHING)
            return {"changed": False, "engines": [], "links": []}
        _warn_of_bound(records, chosen.prefix)
        outcomes = installer.preview_removal(store, records)
        _warn_of_unread(outcomes, chosen.prefix)
        _warn_of_copies(records, outcomes)
        if not dry_run:
            if chosen.reload:
                _have_forgotten(records, outcomes)
            named = {record.engine for record in records}
            gone = [(each, guests.support(each)) for each in guests.ENGINES if each in named]
            outcomes = installer.uninstall(store, records)
            for engine, module in gone:
                module.forget(state, [each.config for each in records if each.engine == engine])
        shared.tell(outcomes, dry_run=dry_run)
        removed = shared.take_links_back(links, is_last=is_last, dry_run=dry_run)
        if before and ends:
            documents.uninstall(site, ends, before)
        if is_last and not (dry_run or links.links() or kept(state, chosen.prefix)):
            store.made.forget()
    advice = _advice(records, chosen.reload)
    for engine, lines in advice.items() if not dry_run else ():
        for line in lines:
            say(f"{engine}: {line}")
    told = [
        {"engine": engine, "files": shared.changed(engine, outcomes), "advice": lines}
        for engine, lines in advice.items()
    ]
    return {"changed": True, "engines": told, "links": removed}


def _check_running(store: Store, records: list[FileRecord], *, dry_run: bool) -> None:
    """Raise EngineError while running containers need gpu-py; a dry run only warns."""
    try:
        in_use.check_running(store, records)
    except EngineError as error:
        if not dry_run:
            raise
        warn(str(error))


def _engines_that_end(
    before: ManagedSpecs | None,
    chosen: UninstallSelection,
    records: list[FileRecord],
    known: list[FileRecord],
) -> list[str]:
    """Return the engines with managed CDI specs whose last changed file is being restored."""
    stay = {record.engine for record in known if record not in records}
    all_files = chosen.config is None
    gone = chosen.engines if all_files else {record.engine for record in records}
    return [each for each in (before.engines if before else ()) if each in gone - stay]


def _warn_of_bound(records: list[FileRecord], prefix: str) -> None:
    """Warn of containers that can't be started, or even stopped, without the runtime."""
    for engine, config in dict.fromkeys((record.engine, record.config) for record in records):
        owned = [
            path
            for record in records
            if (record.engine, record.config) == (engine, config)
            for path in record.owned
        ]
        names = shared.runtimes_in(owned)
        ask = EngineRequest(
            runtimes=tuple((name, name) for name in names),
            config=config,
            prefix=prefix,
            rootless=is_rootless(prefix),
        )
        bound = ENGINES[engine].bound(names, ask)
        if bound:
            warn(
                f"these containers of {engine} were created for {' or '.join(names)} and can't be "
                f"started without it; recreate them with another runtime: {', '.join(bound)}"
            )


def _warn_of_unread(outcomes: list[Outcome], prefix: str) -> None:
    """Warn of files of other software that an engine reads only because of our changes."""
    gone = {outcome.change.path for outcome in outcomes}
    for outcome in outcomes:
        change = outcome.change
        left = [path for path in ENGINES[outcome.engine].unread(change, prefix) if path not in gone]
        if change and left:
            warn(
                f"{change.path} no longer imports {', '.join(left)}, which gpuhook install had "
                "added: add to its imports the files that are still needed"
            )


def _warn_of_copies(records: list[FileRecord], outcomes: list[Outcome]) -> None:
    """Warn of our runtimes in a main file that `containerd config migrate` has written."""
    changed = {outcome.change.path: outcome.change.new for outcome in outcomes}
    of_containerd = [each for each in records if each.engine == containerd_settings.ENGINE]
    for path in dict.fromkeys(record.config for record in of_containerd):
        data = changed[path] if path in changed else files.read(path)
        if left := containerd_settings.our_runtimes(path, data):
            warn(
                f"{path} has a copy of {' and '.join(left)}, as containerd config migrate writes "
                "it: remove it there, and default_runtime_name if it names it, or containerd "
                "starts no container with it"
            )


def _have_forgotten(records: list[FileRecord], outcomes: list[Outcome]) -> None:
    """Remove our settings from running engines before they are removed from their files."""
    for record, outcome in zip(records, outcomes, strict=True):
        names = shared.runtimes_in(record.owned)
        for pid in ENGINES[record.engine].forget(outcome.change, names):
            say(f"{record.engine}: process {pid} no longer has {' and '.join(names)}")


def _advice(records: list[FileRecord], reload: bool) -> dict[str, list[str]]:
    """Return the remaining steps by engine."""
    found: dict[str, list[str]] = {}
    for engine, config in dict.fromkeys((record.engine, record.config) for record in records):
        advice = ENGINES[engine].afterwards(config)
        lines = found.setdefault(engine, [])
        if advice and advice not in lines and not (reload and engine == "docker"):
            lines.append(advice)
    return found
