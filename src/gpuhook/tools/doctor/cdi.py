"""Checks of CDI specs: readable, everything they name exists, and names match the devices.

Specs of other generators are checked like ours, because engines fail with either.
"""

import os
import stat
from collections.abc import Iterator
from typing import Any

from gpuhook.base import names as ours
from gpuhook.base.errors import DriverError, GpuhookError, NoDriverError, listed, shown
from gpuhook.core import contract
from gpuhook.core.cdi import folders
from gpuhook.core.cdi.generate import STRATEGIES
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.tools.cdi import managed_specs as kept
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning
from gpuhook.tools.doctor.host import is_ours
from gpuhook.tools.engines.files import DEFAULT_STATE
from gpuhook.vendors import registry

ALL = "all"
REMAKE = (
    "Generate it again: gpuhook cdi generate --output FOLDER, or the tool that wrote it; "
    "or delete the file"
)
_MEANT = (".yaml", ".yml", ".json")  # file extensions of CDI specs, in any case
_HOOK = "the hook"
_SHOWN = 4  # most items to name in a sentence

Edits = dict[str, Any]


def remake(case: Case, document: str) -> str:
    """Return the step that regenerates a spec, given by its path on the host."""
    try:
        found = kept.kept(state_folder(case))
    except GpuhookError:
        found = None
    is_kept = found is not None and os.path.dirname(document) == found.folder
    return "Run gpuhook cdi refresh" if is_kept else REMAKE


def is_used(case: Case) -> bool:
    """Tell whether engines on this host get devices from our specs."""
    try:
        if kept.kept(state_folder(case)) is not None:
            return True
    except GpuhookError:
        pass
    named = (each for paths in host_paths(case).values() for each in paths)
    return any(os.path.basename(path) == ours.CDI_HOOK for path in named)


def state_folder(case: Case) -> str:
    """Return the state folder of install --cdi and cdi refresh."""
    return case.machine.path(DEFAULT_STATE)


def files(case: Case) -> Iterator[Finding]:
    """Find files that engines ignore or can't read."""
    broken: dict[str, folders.FileError] = {}
    for error in case.cdi.errors:
        broken.setdefault(error.file, error)
    for path, error in broken.items():
        place = case.path_on(path)
        if case.machine.is_closed(place):
            text = f"You can't read {place}, and neither can rootless engines"
            yield _if(_has_rootless(case), "cdi-mode", text, f"Run chmod 644 {place} as root")
            continue
        line = f", line {error.line}" if error.line else ""
        yield warning(
            "cdi-broken",
            f"No engine uses {place}{line}: {error.message}",
            f"Correct the file or delete it; gpuhook cdi validate {place} shows all errors",
        )
    for each in case.cdi.ignored:
        if each.file.lower().endswith(_MEANT):
            place = case.path_on(each.file)
            better = os.path.splitext(place)[0] + ".yaml"
            yield warning(
                "cdi-ignored", f"No engine reads {place}: {each.reason}", f"Run mv {place} {better}"
            )
    for path in case.cdi.documents:
        status = case.machine.stat(case.path_on(path))
        if status is not None and not status.st_mode & stat.S_IROTH:
            place = case.path_on(path)
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            text = f"{place} has the mode {mode}: rootless engines can't read it"
            yield _if(_has_rootless(case), "cdi-mode", text, f"Run chmod 644 {place}")


def resource_limits(case: Case) -> Iterator[Finding]:
    """Name the limits of [gpuhook.containers] that a CDI spec has no field for."""
    config = case.config
    found = [name for name in ("memlock", "stack") if getattr(config, name)]
    if found and is_used(case):
        options = " and ".join(f"--ulimit {name}=N" for name in found)
        yield note(
            "cdi-limits",
            f"CDI specs can't raise {' and '.join(found)}, which [gpuhook.containers] sets: "
            "containers that get devices from a spec without gpu-py keep their engine's",
            f"Start them with gpu-py, or pass {options} to the engine",
        )


def _has_rootless(case: Case) -> bool:
    """Tell whether the host has an engine that users can run rootless."""
    if case.machine.which("podman", ours.SEARCH_PATH):
        return True
    return any(docker.process.uid != 0 for docker in case.dockers)


def _if(matters: bool, check: str, text: str, remedy: str) -> Finding:
    """Return a warning if it matters, else a note."""
    return warning(check, text, remedy) if matters else note(check, text, f"If needed: {remedy}")


# Host paths in CDI specs ------------------------------------------------------------------


def every_edits(document: dict[str, Any]) -> list[Edits]:
    """Return the edits of a spec: the common ones, and those of each device."""
    devices = (device["containerEdits"] for device in document["devices"])
    return [document.get("containerEdits") or {}, *devices]


def _named(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (host path, kind of file) for each path that a spec names, once each."""
    found: dict[str, str] = {}
    for edits in every_edits(document):
        for mount in edits.get("mounts") or ():
            if mount["hostPath"].startswith("/"):
                found.setdefault(mount["hostPath"], "the file")
        for node in edits.get("deviceNodes") or ():
            found.setdefault(node.get("hostPath") or node["path"], "the device node")
        for hook in edits.get("hooks") or ():
            found.setdefault(hook["path"], _HOOK)
    yield from found.items()


def host_paths(case: Case) -> dict[str, list[str]]:
    """Return the host paths in each spec, by the spec's path on the host."""
    documents = case.cdi.documents.items()
    return {case.path_on(path): [name for name, _ in _named(whole)] for path, whole in documents}


def paths(case: Case) -> Iterator[Finding]:
    """Check the files that specs name: driver files, device nodes and hook programs."""
    complete = []
    for path, document in case.cdi.documents.items():
        yield from _foreign_hooks(case, path, document)
        missing = [each for each in _named(document) if not _is_there(case, *each)]
        if missing:
            hooks_first = sorted(missing, key=lambda each: each[1] != _HOOK)
            yield _missing(case, case.path_on(path), hooks_first)
        else:
            complete.append(case.path_on(path))
    if complete:
        number = len(case.cdi.devices)
        text = f"All files exist that are named in {listed(complete, _SHOWN)}"
        yield ok("cdi-paths", f"{text} ({number} CDI device{'' if number == 1 else 's'})")


def _foreign_hooks(case: Case, path: str, document: dict[str, Any]) -> Iterator[Finding]:
    """Find other toolkits' hooks that are linked to gpuhook, which refuses their arguments."""
    for name, what in _named(document):
        if (
            what == _HOOK
            and os.path.basename(name) != ours.CDI_HOOK
            and is_ours(case.machine, name)
        ):
            yield warning(
                "cdi-foreign-hook",
                f"{case.path_on(path)} was generated by another toolkit, and its hook {name} is "
                "gpuhook's, which doesn't support it",
                REMAKE,
            )


def _missing(case: Case, document: str, missing: list[tuple[str, str]]) -> Finding:
    """Return the finding for a spec that names missing files."""
    path, what = missing[0]
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    text = f"{document} is stale: {what} {path} doesn't exist{more}, so its devices can't be used"
    remedy = remake(case, document)
    if os.path.basename(path) == ours.CDI_HOOK:
        remedy = f"If gpuhook was moved or removed: {remedy}"
    return warning("cdi-paths", text, remedy)


def _is_there(case: Case, path: str, what: str) -> bool:
    if what == _HOOK:
        return case.machine.is_program(path)
    return case.machine.exists(path)


def numbers(case: Case) -> Iterator[Finding]:
    """Compare device numbers in specs with the host's: engines use those of the spec."""
    for path, document in case.cdi.documents.items():
        wrong: dict[str, str] = {}
        for edits in every_edits(document):
            for node in edits.get("deviceNodes") or ():
                place = node.get("hostPath") or node["path"]
                found = _numbers(case, place)
                given = node.get("major") or 0, node.get("minor") or 0
                if given[0] and found and given != found:
                    pairs = "{}:{}, and is {}:{}".format(*given, *found)
                    wrong[place] = f"{place} is {pairs} on this host"
        if wrong:
            yield warning(
                "cdi-numbers",
                f"{case.path_on(path)} is stale: in it {listed([*wrong.values()], _SHOWN)}",
                remake(case, case.path_on(path)),
            )


def _numbers(case: Case, path: str) -> tuple[int, int] | None:
    """Return a node's device numbers, None if it isn't a device node."""
    status = case.machine.stat(path)
    if status is None or not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        return None
    return os.major(status.st_rdev), os.minor(status.st_rdev)


# Device names ------------------------------------------------------------------------------


def names(case: Case) -> Iterator[Finding]:
    """Compare the names of supported kinds with the devices of this host."""
    kinds = {document["kind"] for document in case.cdi.documents.values()}
    for vendor_names in registry.all_vendors(case.config).values():
        if vendor_names.KIND not in kinds:
            continue
        vendor = contract.load(vendor_names)
        try:
            inventory = cache.get_inventory(case.config, vendor, save=False)
        except NoDriverError as error:
            text = f"CDI specs name devices of {vendor_names.KIND}, and {error.cause}"
            yield warning("cdi-names", text, f"{error.remedy}; or delete {_files(case, vendor)}")
        except DriverError:
            continue  # reported by the vendor's own checks
        else:
            yield from _Comparison(case, vendor, inventory).findings()


def _files(case: Case, vendor: contract.Vendor) -> str:
    documents = case.cdi.documents.items()
    found = [path for path, whole in documents if whole["kind"] == vendor.names.KIND]
    return listed([case.path_on(path) for path in found], _SHOWN)


class _Comparison:
    """Comparison of the names of a kind in effect with the devices of a vendor."""

    def __init__(self, case: Case, vendor: contract.Vendor, inventory: Inventory) -> None:
        self.case = case
        self.vendor = vendor
        config = case.config
        grant_of = contract.Grant.of_document
        granted = grant_of(vendor, inventory, config, inventory.devices)
        self.kept = {
            device.id: why
            for device in inventory.devices
            if (
                why := vendor.only_by_runtime(grant_of(vendor, inventory, config, [device]), config)
            )
        }
        self.offered = [each for each in vendor.offered(granted)[0] if each.id not in self.kept]
        self.devices = inventory.devices
        kind = f"{vendor.names.KIND}="
        self.named = {
            name.removeprefix(kind): device
            for name, device in case.cdi.devices.items()
            if name.startswith(kind)
        }
        self.meant = {
            strategy(device, vendor): device
            for strategy in STRATEGIES.values()
            for device in self.devices
        }

    def findings(self) -> Iterator[Finding]:
        """Yield the differences, or that there are none."""
        others = {name: self._other(name) for name in self.named}
        shifted = [f"{shown(name)} is {other}" for name, other in others.items() if other]
        gone = [name for name in self.named if name not in self.meant and name != ALL]
        missing = self._missing()
        meant = {name: self.meant[name].id for name in self.named if name in self.meant}
        kept = [name for name, device in meant.items() if device in self.kept]
        noun = self.vendor.names.NOUN
        if kept:
            text = f"{self._where(kept)} is stale: {self.kept[meant[kept[0]]]}"
            yield warning("cdi-kept-devices", text, self._remake(kept))
        if shifted:
            text = f"CDI names mean other devices than on this host: {listed(shifted, _SHOWN)}"
            where = [name for name, other in others.items() if other]
            remedy = f"{self._remake(where)}; request devices by UUID"
            yield failure("cdi-names", f"{self._where(where)}: {text}", remedy)
        if gone:
            quoted = [shown(name) for name in gone]
            text = f"this host doesn't have {noun} {listed(quoted, _SHOWN)} (any more)"
            text = f"{self._where(gone)} is stale: {text}"
            yield warning("cdi-gone-devices", text, self._remake(gone))
        if missing:
            labels = [device.label for device in missing]
            text = f"{noun} {listed(labels, _SHOWN)} of this host isn't in it"
            text = f"{self._where([*self.named])} is stale: {text}"
            yield warning("cdi-new-devices", text, self._remake([*self.named]))
        if not (shifted or gone or missing or kept) and self.named:
            text = f"The names of the kind {self.vendor.names.KIND} match this host's devices"
            yield ok("cdi-names", text)

    def _files(self, found: list[str]) -> list[str]:
        return [*dict.fromkeys(self.case.path_on(self.named[name].file) for name in found)]

    def _where(self, found: list[str]) -> str:
        """Return the files of names, as text."""
        return listed(self._files(found), _SHOWN)

    def _remake(self, found: list[str]) -> str:
        """Return the step that regenerates the files of names."""
        return remake(self.case, self._files(found)[0])

    def _missing(self) -> list[Device]:
        """Return the devices without a name, unless specs name no single device."""
        if not {*self.named} - {ALL}:
            return []
        known = {self.meant[name].id for name in self.named if name in self.meant}
        return [device for device in self.offered if device.id not in known]

    def _other(self, name: str) -> str:
        """Return the device that a name selects if it means another one on this host, else ""."""
        device = self.meant.get(name)
        if device is None:
            return ""
        edits = self.named[name].edits
        given = {node["path"] for node in edits.get("deviceNodes") or ()}
        if given.issuperset(device.nodes):
            return ""
        family = {device.id, device.parent}
        for other in self.devices:
            alien = other.id not in family and other.parent != device.id
            if alien and other.nodes and given.issuperset(other.nodes):
                return f"{self.vendor.names.NOUN} {other.label} ({other.id})"
        return ""


# Several CDI specs ---------------------------------------------------------------------------


def conflicts(case: Case) -> Iterator[Finding]:
    """Find names in several files: engines use none in one folder, the later of two folders."""
    by_files: dict[tuple[str, ...], list[str]] = {}
    for name, paths_ in case.cdi.conflicts.items():
        by_files.setdefault(tuple(map(case.path_on, paths_)), []).append(name)
    for found, conflicting in by_files.items():
        yield warning(
            "cdi-conflict",
            f"{listed(conflicting, _SHOWN)} can't be used: {' and '.join(found)} both have it",
            "Keep the file that is updated with the driver, and delete the other",
        )
    for (lower, upper), hidden in _hidden(case).items():
        yield warning(
            "cdi-hidden",
            f"{listed(hidden, _SHOWN)} of {lower} isn't used: {upper} has it with other content",
            f"Delete {lower} if {upper} is kept up to date, or vice versa",
        )


def _hidden(case: Case) -> dict[tuple[str, str], list[str]]:
    """Return (file, later file) with the names that both have with different content."""
    found: dict[tuple[str, str], list[str]] = {}
    for folder in case.cdi.folders:
        for name, device in folders.read_folders([folder]).devices.items():
            other = case.cdi.devices.get(name)
            if other is None or other.file == device.file:
                continue
            common = [each.document.get("containerEdits") for each in (device, other)]
            if device.edits != other.edits or common[0] != common[1]:
                files = (case.path_on(device.file), case.path_on(other.file))
                found.setdefault(files, []).append(name)
    return found


# Refreshing ----------------------------------------------------------------------------------


def refresh_errors(case: Case) -> Iterator[Finding]:
    """Report why the last refresh of the specs failed, which isn't visible at container starts."""
    try:
        failures = kept.last_errors(state_folder(case))
    except GpuhookError as error:
        yield warning("cdi-refresh", error.cause, error.remedy)
        return
    for each in failures:
        kind = f" of {each.kind}" if each.kind else ""
        yield warning(
            "cdi-refresh",
            f"The last refresh of the CDI spec{kind} failed: {each.error}",
            f"{each.remedy}; then run gpuhook cdi refresh",
        )
