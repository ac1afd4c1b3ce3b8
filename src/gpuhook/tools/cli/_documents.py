"""Managed CDI specs of install --cdi and uninstall: folder, specs, systemd units."""

import contextlib
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

import click

from gpuhook.base import names
from gpuhook.base.config.loader import load
from gpuhook.base.errors import CdiError, ConfigError, GpuhookError
from gpuhook.base.host import files as host_files
from gpuhook.core.cdi import versions
from gpuhook.monitor.host import systemctl as systemd
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.tools.cdi import refresh as refreshing
from gpuhook.tools.cdi import units
from gpuhook.tools.cdi.managed_specs import ManagedSpecs, below, forget, save
from gpuhook.tools.cli._output import say, warn
from gpuhook.tools.cli.cdi_refresh import tell
from gpuhook.tools.engines import installed
from gpuhook.tools.engines.files import Change
from gpuhook.tools.engines.made import MadeFolders

_FORMAT = "yaml"


@dataclass(frozen=True)
class Site:
    """A system to set up: its state folder, and the prefix used as its /."""

    state: str
    prefix: str = ""
    dry_run: bool = False

    @property
    def made(self) -> MadeFolders:
        """The record of folders created there."""
        return MadeFolders(self.state, self.prefix)

    @property
    def own_state(self) -> str:
        """The path of the state folder as programs of the system see it."""
        return self.state.removeprefix(self.prefix.rstrip("/"))


def versions_of(engines: Iterable[str], prefix: str) -> dict[str, str | None]:
    """Return the engines' versions, None if unknown; below a prefix no program is run."""
    return {engine: installed.version(engine, prefix) for engine in engines}


def check_folders(prefix: str) -> None:
    """Raise UntrustedPathError if a user other than root controls a folder of CDI specs."""
    for folder in versions.FOLDERS:
        host_files.check_way(below(prefix, folder))


@dataclass(frozen=True)
class Result:
    """The outcome: whether anything changed (or would), and whether every spec succeeded."""

    changed: bool = False
    is_whole: bool = True


def install(
    site: Site,
    programs: str,
    config: str | None,
    engines: Iterable[str],
    before: ManagedSpecs | None,
) -> Result:
    """Set up managed CDI specs for engines, and write those that are possible now.

    ``programs`` is the folder of our programs, ``config`` the configuration file used to
    generate specs, ``before`` the previous set-up.
    """
    every = tuple(dict.fromkeys([*(before.engines if before else ()), *engines]))
    found = versions_of(every, site.prefix)
    folder = versions.folder_for(found)
    hook = _hook(site, programs)
    command = os.path.join(os.path.dirname(hook), "gpuhook")
    changes, warnings = units.wanted(command, site.own_state, site.prefix)
    paths = tuple(change.path.removeprefix(site.prefix.rstrip("/")) for change in changes)
    kept = ManagedSpecs(folder, config, _FORMAT, every, hook, paths, before.made if before else ())
    for warning in (*warnings, *_without_cdi(found)):
        warn(warning)
    changes += _outdated(site, before, kept)
    if site.dry_run:
        more, report = refreshing.preview(kept.below(site.prefix))
        _show([*changes, *more])
        tell(report)
        return Result(any([*changes, *more]))
    with refreshing.locked(site.state):
        _put(site, kept, changes)
        report = refreshing.refresh_kept(kept.below(site.prefix), site.state)
    _tell_changes(changes)
    tell(report)
    for warning in _too_new(found, report):
        warn(warning)
    _enable(site, kept.units)
    return Result(any(changes) or bool(report.done), not report.failures)


def _hook(site: Site, programs: str) -> str:
    """Return the hook's path: next to gpu-py, or next to this program if that was a link."""
    path = os.path.join(programs, names.CDI_HOOK)
    if site.prefix or os.access(path, os.X_OK):
        return path
    return our_program(names.CDI_HOOK)


def uninstall(site: Site, engines: Iterable[str], before: ManagedSpecs) -> Result:
    """Stop managing CDI specs for these engines; with the last engine remove all specs."""
    rest = tuple(engine for engine in before.engines if engine not in set(engines))
    if rest:
        if not site.dry_run:
            save(site.state, replace(before, engines=rest))
        say(f"kept for {', '.join(rest)}: the CDI specs in {before.folder}")
        return Result(rest != before.engines)
    files = units.removals(before.units, site.prefix)
    if site.dry_run:
        _show([*refreshing.removable(before.below(site.prefix)), *files])
        return Result(changed=True)
    if files:
        _systemctl(site, "disable", "--now", *units.ENABLED)
    with refreshing.locked(site.state):
        documents = refreshing.removable(before.below(site.prefix))
        for change in documents:
            refreshing.remove(change)
        for change in files:
            change.commit()
        forget(site.state)
        site.made.add(below(site.prefix, path) for path in before.made)
        site.made.tidy()
    if files:
        _systemctl(site, "daemon-reload")
    _tell_changes([*documents, *files])
    return Result(changed=True)


def check_unused(site: Site, programs: str, before: ManagedSpecs | None) -> None:
    """Raise CdiError while specs other than those of ``before`` name our hook."""
    hook = os.path.join(programs, names.CDI_HOOK)
    folders = [*versions.FOLDERS, *_configured_folders(before)]
    going = (
        [change.path for change in refreshing.removable(before.below(site.prefix))]
        if before
        else []
    )
    paths = refreshing.naming(hook, [below(site.prefix, folder) for folder in folders])
    gone = {os.path.realpath(path) for path in going}
    left = [path for path in paths if os.path.realpath(path) not in gone]
    if left:
        raise CdiError(
            f"These CDI specs name {hook}, and engines start no container with their "
            f"devices without it: {', '.join(left)}",
            f"Run this first: {shlex.join(('rm', *left))}",
        )


def _configured_folders(before: ManagedSpecs | None) -> list[str]:
    try:
        return [*load(before.config if before else None).cdi_spec_dirs]
    except ConfigError:
        return []


def _without_cdi(found: dict[str, str | None]) -> Iterable[str]:
    for engine, version in found.items():
        if version is not None and versions.highest(engine, version) is None:
            first = versions.ENGINES[engine][0][0]
            yield (
                f"{engine} {version} doesn't support CDI, which needs {first}: only gpu-py can "
                "add GPUs there; run this again after an upgrade"
            )


def _too_new(found: dict[str, str | None], report: refreshing.Report) -> Iterable[str]:
    for path, needed in report.documents.items():
        for engine, version in found.items():
            top = versions.highest(engine, version) if version else None
            if top is not None and versions.is_below(top, needed):
                yield (
                    f"{engine} {version} supports CDI specs up to version {top} and refuses "
                    f"{path}, which needs {needed}"
                )


def _outdated(site: Site, before: ManagedSpecs | None, kept: ManagedSpecs) -> list[Change]:
    """Return the removal of files that were written before and are no longer wanted."""
    if before is None:
        return []
    gone = tuple(path for path in before.units if path not in kept.units)
    documents = (
        [] if before.folder == kept.folder else refreshing.removable(before.below(site.prefix))
    )
    return [*units.removals(gone, site.prefix), *documents]


def _put(site: Site, kept: ManagedSpecs, changes: list[Change]) -> None:
    """Record the wanted state, then apply it."""
    save(site.state, kept)
    done: list[Change] = []
    try:
        for change in changes:
            if change:
                site.made.expect(os.path.dirname(change.path))
                change.commit()
                done.append(change)
        _make_folder(site, below(site.prefix, kept.folder))
    except GpuhookError:
        for change in reversed(done):
            with contextlib.suppress(GpuhookError):
                Change(change.path, change.new, change.old, change.mode).commit()
        site.made.tidy()
        raise


def _make_folder(site: Site, path: str) -> None:
    try:
        site.made.make(path)
    except OSError as error:
        raise CdiError(
            f"The folder {path} can't be created: {error.strerror}",
            host_files.remedy(error, "Run this as root, and check that the disk is writable"),
        ) from None


def _show(changes: Iterable[Change]) -> None:
    for change in changes:
        click.echo(change.diff(), nl=False)


def _tell_changes(changes: Iterable[Change]) -> None:
    for change in changes:
        if change.new is None:
            say(f"cdi: removed {change.path}")
        elif change:
            say(f"cdi: wrote {change.path}")


# systemd ------------------------------------------------------------------------------------


def _enable(site: Site, paths: tuple[str, ...]) -> None:
    """Enable the units that we wrote, or say how to; the package enables its own."""
    if not paths:
        return
    if site.prefix:
        say(f"cdi: Enable the units: systemctl --root={site.prefix} enable {_joined()}")
    elif not _systemctl(site, "daemon-reload") or not _systemctl(
        site, "enable", "--now", *units.ENABLED
    ):
        say(
            "cdi: To keep the CDI specs up to date: systemctl daemon-reload && systemctl enable "
            f"--now {_joined()}; without systemd, run gpuhook watch"
        )


def _joined() -> str:
    return " ".join(units.ENABLED)


def _systemctl(site: Site, *words: str) -> bool:
    """Run systemctl where systemd is running; return whether it succeeded."""
    return not site.prefix and systemd.call(*words)
