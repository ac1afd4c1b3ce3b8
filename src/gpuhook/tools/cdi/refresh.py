"""Update of the CDI specs that ``install --cdi`` manages, one per kind of device.

A spec is removed with its driver, and with the last device, because engines refuse a spec without
devices. If a driver only fails to answer, the old spec stays, and the error is recorded.
"""

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuhook.base import names as ours
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import DEFAULT_PATH, Config
from gpuhook.base.errors import CdiError, GpuhookError, NoDeviceError, NoDriverError
from gpuhook.base.host import files as host_files
from gpuhook.core import contract, dev_char
from gpuhook.core.cdi import folders
from gpuhook.core.cdi.generate import CdiReader, GeneratedSpec, SpecSource, generate
from gpuhook.core.inventory import cache
from gpuhook.tools.cdi import write
from gpuhook.tools.cdi import write as writing
from gpuhook.tools.cdi.managed_specs import ManagedSpecs, RefreshFailure, kept, save_errors
from gpuhook.tools.engines.files import Change
from gpuhook.tools.engines.lock import FolderLock
from gpuhook.vendors import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator
    from types import ModuleType

_PATIENCE = 60.0  # seconds; a working driver answers sooner


@dataclass
class Report:
    """The result of a refresh as sentences without a full stop.

    ``done`` are changes, ``said`` are unchanged files, ``absent`` are drivers that the host
    doesn't have, and so no specs.
    """

    done: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failures: list[RefreshFailure] = field(default_factory=list)
    documents: dict[str, str] = field(default_factory=dict)  # path -> version of the existing specs

    def fail(self, kind: str, error: GpuhookError) -> None:
        """Add an error for a kind."""
        self.failures.append(RefreshFailure(time.time(), kind, error.cause, error.remedy))


@dataclass(frozen=True)
class DesiredSpec:
    """The wanted state of a file: a CDI spec, or none because of an error."""

    change: Change
    kind: str
    made: GeneratedSpec | NoDriverError | NoDeviceError


def refresh(state: str, prefix: str = "") -> Report | None:
    """Update the specs recorded in the state folder; None if there is no record.

    ``prefix`` is a folder used as / . Errors are in the report, and recorded until a refresh
    succeeds. CdiError if the state can't be read, or if another process holds the lock too long.
    """
    if kept(state, prefix) is None:
        return None
    with locked(state):
        found = kept(state, prefix)
        return None if found is None else refresh_kept(found.below(prefix), state)


def refresh_kept(found: ManagedSpecs, state: str) -> Report:
    """Do the work of ``refresh`` for a caller that holds the lock."""
    report = Report()
    for wanted in _all_wanted(found, report, save=True):
        try:
            _carry_out(wanted, report)
        except GpuhookError as error:
            report.fail(wanted.kind, error)
    save_errors(state, report.failures)
    return report


def preview(found: ManagedSpecs) -> tuple[list[Change], Report]:
    """Return the changes that ``refresh_kept`` would make, and its report."""
    report = Report()
    return [each.change for each in _all_wanted(found, report, save=False)], report


def locked(state: str) -> contextlib.AbstractContextManager[None]:
    """Lock the specs of this state folder against other processes."""
    folder = os.path.join(state, "cdi")
    return FolderLock(folder, "writing CDI specs", _PATIENCE, CdiError).held()


def source_of(
    vendor: contract.Vendor,
    config: Config,
    hook: str,
    reader: "Callable[[], CdiReader | None] | None" = None,
    *,
    save: bool,
    without_hook: bool = False,
) -> SpecSource:
    """Return the source for the specs of a vendor's devices; DriverError if it has none."""
    inventory = cache.get_inventory(config, vendor, save=save)
    path = config.path and os.path.abspath(config.path)
    named = path if path != DEFAULT_PATH else None
    return SpecSource(vendor, inventory, config, hook, named, reader, without_hook=without_hook)


def others(path: str, kind: str) -> list[str]:
    """Return warnings of other files in a spec's folder with the same devices: engines use none."""
    conflicts = folders.read_folders([os.path.dirname(path)]).conflicts
    files = [each for name, each in conflicts.items() if name.startswith(f"{kind}=")]
    found = dict.fromkeys(file for each in files if path in each for file in each if file != path)
    return [
        f"{other} names the same devices of {kind}, so engines ignore both: remove one of "
        "the two files"
        for other in found
    ]


def written(made: GeneratedSpec, path: str) -> str:
    """Return a sentence on a written spec."""
    document = made.document
    return f"wrote {path} (version {document['cdiVersion']}, {len(document['devices'])} names)"


# Our specs ----------------------------------------------------------------------------------


def removable(found: ManagedSpecs) -> list[Change]:
    """Return the removal of each existing spec of ours, of any kind."""
    return [Change(path, writing.read_old(path), None) for path in _ours_in(found)]


def _ours_in(found: ManagedSpecs, but: "Container[str]" = ()) -> "dict[str, str]":
    """Return our specs in the folder with their kinds, if the file name fits the kind."""
    try:
        names = sorted(os.listdir(found.folder))
    except OSError:
        return {}
    kinds = {}
    for path in (os.path.join(found.folder, name) for name in names):
        document = None if path in but else folders.examine(path)[1]
        if document is None or not is_ours(document):  # protects: anothers-document
            continue
        if os.path.basename(path) == writing.file_name(document["kind"], found.format):
            kinds[path] = document["kind"]
    return kinds


def remove(change: Change) -> None:
    """Remove a spec; CdiError if that fails."""
    try:
        host_files.check_way(change.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(change.path)
    except OSError as error:
        raise CdiError(
            f"{change.path} can't be removed: {error.strerror}",
            host_files.remedy(error, "Run this as root, and check that the disk is writable"),
        ) from None


def is_ours(document: dict[str, Any]) -> bool:
    """Tell whether a spec is ours, which contains our hook.

    A spec with only device nodes has no hook. It has a variable instead that prevents further
    changes to its containers, and that no other generator writes into such a spec.
    """
    edits = document.get("containerEdits") or {}
    hooks = edits.get("hooks") or ()
    if hooks:
        return any(os.path.basename(hook["path"]) == ours.CDI_HOOK for hook in hooks)
    return any(entry.endswith("=void") for entry in edits.get("env") or ())


def naming(hook: str, places: "Iterable[str]") -> list[str]:
    """Return the specs in folders that name a hook's program, from any generator."""
    documents = folders.read_folders(places).documents
    return [path for path, each in documents.items() if any(_is(hook, it) for it in _hooks(each))]


def _hooks(document: dict[str, Any]) -> "Iterator[str]":
    """Yield the programs of all hooks in a spec."""
    for table in (document, *(document.get("devices") or ())):
        for hook in (table.get("containerEdits") or {}).get("hooks") or ():
            yield hook["path"]


def _is(program: str, path: str) -> bool:
    try:
        return path == program or os.path.samefile(path, program)
    except OSError:
        return False


def _change(path: str, text: str | None) -> Change:
    """Return a change of a file of ours; CdiError if it would replace a foreign file."""
    old = writing.read_old(path)
    if not os.path.lexists(path):
        return Change(path, None, None if text is None else text.encode())
    _, document = folders.examine(path)
    if document is None or not is_ours(document):  # protects: anothers-document
        if text is None:
            return Change(path, old, old)
        raise CdiError(
            f"{path} exists and isn't a file of gpuhook",
            "Remove it or move it away, and run gpuhook cdi refresh",
        )
    return Change(path, old, None if text is None else text.encode())


# Wanted specs -------------------------------------------------------------------------------


def _all_wanted(found: ManagedSpecs, report: Report, *, save: bool) -> list[DesiredSpec]:
    """Return the wanted file of every known kind; add the kinds that failed to the report."""
    try:
        config = load(found.config or (DEFAULT_PATH if os.path.exists(DEFAULT_PATH) else None))
        vendors = registry.all_vendors(config).values()
    except GpuhookError as error:
        report.fail("", error)
        return []
    wanted, paths = [], set()
    reader = write.oldest_reader(found.engines)
    for names in vendors:
        path = os.path.join(found.folder, writing.file_name(names.KIND, found.format))
        paths.add(path)
        try:
            wanted.append(_wanted(path, names, found, config, reader, save=save))
        except GpuhookError as error:
            report.fail(names.KIND, error)
    for path, kind in _ours_in(found, but=paths).items():
        unknown = NoDriverError(f"gpuhook no longer supports devices of the kind {kind}", "")
        wanted.append(DesiredSpec(_change(path, None), kind, unknown))
    return wanted


def _wanted(
    path: str,
    names: "ModuleType",
    found: ManagedSpecs,
    config: Config,
    reader: "Callable[[], CdiReader | None]",
    *,
    save: bool,
) -> DesiredSpec:
    try:
        source = source_of(contract.load(names), config, found.hook, reader, save=save)
        if save:  # containers with CDI devices have no gpu-py to save it
            dev_char.make_links(source.inventory.nodes, source.inventory.root)
        made = generate(source)
    except (NoDriverError, NoDeviceError) as error:
        return DesiredSpec(_change(path, None), names.KIND, error)
    text = writing.to_text(made.document, found.format)
    return DesiredSpec(_change(path, text), names.KIND, made)


def _carry_out(wanted: DesiredSpec, report: Report) -> None:
    change = wanted.change
    made = wanted.made
    if isinstance(made, GpuhookError):
        _do_without(change, made, report)
        return
    report.warnings += made.warnings
    if writing.write(change.path, (change.new or b"").decode()):
        report.done.append(written(made, change.path))
    else:
        report.said.append(f"{change.path}: unchanged")
    report.documents[change.path] = made.document["cdiVersion"]
    report.warnings += others(change.path, wanted.kind)


def _do_without(change: Change, error: GpuhookError, report: Report) -> None:
    """Remove a spec without a driver, or report why there is none."""
    if change:
        remove(change)
        report.done.append(f"removed {change.path}: {error.cause}")
    elif isinstance(error, NoDriverError):
        report.absent.append(error.cause)
    else:
        report.said.append(error.cause)
