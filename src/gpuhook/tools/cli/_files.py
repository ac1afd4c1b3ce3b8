"""What ``install --files`` does, and ``uninstall --files`` takes back: the files that come along.

What was placed is remembered below the state folder, each file with its digest: a file that isn't
as it was placed is somebody else's by now, and stays. The record is written before the files, so
that a crash between the two loses nothing.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import click

from gpuhook.ground.errors import EngineError
from gpuhook.ground.host import files as host_files
from gpuhook.tools.cdi.kept import below
from gpuhook.tools.cli import _engines as shared
from gpuhook.tools.cli import _shipped as shipped
from gpuhook.tools.cli import _systemd as systemd
from gpuhook.tools.engines.files import Change, read, remove_folders
from gpuhook.tools.engines.lock import Lock
from gpuhook.tools.host.programs import our_program

_PATIENCE = 20.0  # seconds; placing takes less than one
# The options of install and uninstall that make sense here.
_OPTIONS = {"files", "prefix", "state_dir", "dry_run"}


@dataclass
class Record:
    """What was placed: the digests that each file may have, and the folders made for them."""

    files: dict[str, list[str]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    def has(self, path: str, data: bytes | None) -> bool:
        """Tell whether a file is as it was placed."""
        return data is not None and _digest(data) in self.files.get(path, ())


@dataclass(frozen=True)
class Site:
    """Where files are placed: the folder that stands for /, and where that is remembered."""

    prefix: str
    state: str
    dry_run: bool

    @property
    def folder(self) -> str:
        """The folder of the record."""
        return f"{self.state}/files"

    @property
    def path(self) -> str:
        """The record."""
        return f"{self.folder}/record.json"

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep others from placing files meanwhile."""
        if self.dry_run:
            return contextlib.nullcontext()
        return Lock(self.folder, "placing files", _PATIENCE, EngineError).held()

    def load(self) -> Record:
        """Return what was placed."""
        data = read(self.path)
        try:
            return Record(**json.loads(data)) if data else Record()
        except (RecursionError, ValueError, TypeError) as error:
            raise EngineError(
                f"{self.path} is damaged: {error}",
                "Remove gpuhook's manual pages, completion and units by hand, and this file",
            ) from None

    def save(self, record: Record) -> None:
        """Remember what was placed, or forget it where that is nothing."""
        if record.files:
            host_files.replace(self.path, json.dumps(vars(record), indent=2).encode())
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def site(prefix: str, state_dir: str | None, *, dry_run: bool) -> Site:
    """Return the site that the options name; UsageError for options that are about engines."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name))
        if given is click.core.ParameterSource.COMMANDLINE and parameter.name not in _OPTIONS:
            raise click.UsageError(f"{parameter.opts[0]} doesn't go with --files: run this twice.")
    prefix = prefix and os.path.abspath(prefix).rstrip("/")
    return Site(prefix, shared.state_folder(state_dir, prefix), dry_run)


def install(site: Site) -> None:
    """Place the files that aren't there yet, or are there from an older version."""
    missing = _missing(site.folder)
    with site.locked():
        record = site.load()
        wanted = dict(_wanted(site, record))
        gone = [change for change in _changes_back(record) if change.path not in wanted]
        changes = [*(change for change in wanted.values() if change), *gone]
        if changes and not site.dry_run:
            record.folders += missing
            _remember(site, record, wanted.values())
            _carry_out(site, record, changes)
            record.files = {
                path: [_digest(change.new)] for path, change in wanted.items() if change.new
            }
            site.save(record)
    _tell(changes, site)
    if not changes:
        click.echo("unchanged: manual pages, completion and units are up to date")
    elif not site.dry_run:
        _advise(site, wanted)


def uninstall(site: Site) -> None:
    """Remove the files that were placed and are as they were, and the folders made for them."""
    with site.locked():
        record = site.load()
        changes = list(_changes_back(record))
        _warn_of_changed(record, changes)
        if not site.dry_run:
            units = [os.path.basename(change.path) for change in changes if _is_unit(change.path)]
            if units and not site.prefix:
                systemd.call("disable", "--now", *units)
            _carry_out(site, record, changes)
            site.save(Record())
    if not site.dry_run:
        remove_folders(record.folders)
    _tell(changes, site)
    if not changes:
        click.echo("gpuhook install --files placed nothing here: there is nothing to undo")


def _wanted(site: Site, record: Record) -> Iterator[tuple[str, Change]]:
    """Yield path and change of each file that is to be there."""
    folders, packaged = _folders(site), []
    for file in shipped.files(our_program("gpuhook")):
        place = file.path(folders)
        if place is None:
            continue
        path = below(site.prefix, place)
        change = Change(path, _present(path), file.text.encode(), file.mode)
        if _is_packaged(site, file):
            packaged.append(file.name)
        elif os.path.lexists(path) and not record.has(path, change.old):
            shared.warn(f"{path} exists and isn't as gpuhook placed it: it is left alone")
        else:
            yield path, change
    if packaged:
        shared.warn(f"a package has these already, so they are not placed: {', '.join(packaged)}")


def _missing(folder: str) -> list[str]:
    """Return the folders that are to be made for one, outermost first."""
    missing: list[str] = []
    while not os.path.isdir(folder):
        missing.insert(0, folder)
        folder = os.path.dirname(folder)
    return missing


def _folders(site: Site) -> Mapping[str, str]:
    is_users = shared.is_rootless(site.prefix)
    return shipped.of_user() if is_users else shipped.OF_ADMINISTRATOR


def _is_packaged(site: Site, file: shipped.File) -> bool:
    path = below(site.prefix, f"{shipped.OF_PACKAGE[file.kind]}/{file.name}")
    return os.path.exists(path) or os.path.exists(f"{path}.gz")


def _present(path: str) -> bytes | None:
    """Return what a file holds; None where there is none, or a link that somebody made."""
    return None if os.path.islink(path) else read(path)


def _changes_back(record: Record) -> Iterator[Change]:
    """Yield the removal of each file that is as it was placed."""
    for path in record.files:
        data = _present(path)
        if record.has(path, data):
            yield Change(path, data, None)


def _warn_of_changed(record: Record, changes: list[Change]) -> None:
    going = {change.path for change in changes}
    for path in record.files:
        if path not in going and os.path.lexists(path):
            shared.warn(f"{path} was changed since: it is left alone")


def _remember(site: Site, record: Record, changes: Iterable[Change]) -> None:
    """Write down what is going to be placed, beside what is there."""
    for change in changes:
        record.files.setdefault(change.path, []).append(_digest(change.new))
    site.save(record)


def _carry_out(site: Site, record: Record, changes: list[Change]) -> None:
    for change in changes:
        record.folders += change.commit()
    if any(_is_unit(change.path) for change in changes) and not site.prefix:
        systemd.call("daemon-reload")


def _tell(changes: list[Change], site: Site) -> None:
    """Print what was done, or would be."""
    would = "would " if site.dry_run else ""
    for change in changes:
        if change.new is None:
            word = "remove" if would else "removed"
        elif change.old is None:
            word = "write" if would else "wrote"
        else:
            word = "change" if would else "changed"
        click.echo(f"{would}{word} {change.path}")


def _advise(site: Site, wanted: Mapping[str, Change]) -> None:
    """Say what is still to be done for the files to have an effect."""
    units = [os.path.basename(path) for path in wanted if _is_unit(path)]
    if units:
        option = f"--root={site.prefix}" if site.prefix else "--now"
        click.echo(f"No service is started; systemctl enable {option} does: {', '.join(units)}")
    if shared.is_rootless(site.prefix):
        click.echo(f"For zsh, in ~/.zshrc before compinit: fpath+=({shipped.of_user()['zsh']})")


def _is_unit(path: str) -> bool:
    return path.endswith((".service", ".path"))


def _digest(data: bytes | None) -> str:
    return hashlib.sha256(data or b"").hexdigest()
