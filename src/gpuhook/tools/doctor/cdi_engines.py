"""Checks of the engines' CDI support: the folders that they read, and the versions they accept."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpuhook.base.errors import GpuhookError, listed
from gpuhook.core.cdi import versions
from gpuhook.tools.cdi import managed_specs
from gpuhook.tools.doctor import engine_files, engines
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.cdi import every_edits, state_folder
from gpuhook.tools.doctor.finding import Finding, note, warning
from gpuhook.tools.engines.docker_api import DEFAULT_CONFIG

# Engine -> its package in Debian, which is built with Debian's copy of the library.
_PACKAGES = {
    "podman": "podman",
    "docker": "docker.io",
    "containerd": "containerd",
    "crio": "cri-o",
}
_SHOWN = 4


@dataclass(frozen=True)
class CdiEngine:
    """An engine with CDI support: its version, whether CDI is enabled, and its folders.

    ``needed`` says whether CDI devices are likely to be requested from it: ``install --cdi`` was
    called for it, or its CDI support is always enabled.
    """

    engine: str
    version: str
    is_on: bool
    folders: tuple[str, ...]
    needed: bool

    @property
    def title(self) -> str:
        """The engine's name and version."""
        return f"{self.engine} {self.version}"


def readers(case: Case) -> Iterator[Finding]:
    """Check of each engine whether it reads the existing specs."""
    if not case.cdi.documents:
        return
    asked_for = _asked_for(case)
    for found in _readers(case):
        if case.engine not in ("", found.engine):
            continue
        reader = replace(found, needed=found.engine in asked_for) if asked_for else found
        if not reader.is_on:
            yield _switched_off(case, reader)
            continue
        yield from _unseen(case, reader)
        yield from _unreadable(case, reader)


def _say(reader: CdiEngine, check: str, text: str, remedy: str) -> Finding:
    """Return a warning if CDI devices are requested from the engine, else a note."""
    if reader.needed:
        return warning(check, text, remedy)
    return note(check, text, f"To use CDI devices in its containers: {remedy}")


def _switched_off(case: Case, reader: CdiEngine) -> Finding:
    text = f"{reader.title} reads no CDI specs: CDI is disabled in its configuration"
    remedy = f"Run gpuhook install --cdi --engine {reader.engine}, and restart {reader.engine}"
    if reader.engine in _asked_for(case):
        return warning("cdi-engine", text, remedy)
    return note("cdi-engine", text, f"To use CDI: {remedy}")


def _asked_for(case: Case) -> tuple[str, ...]:
    """Return the engines that ``install --cdi`` was called for."""
    try:
        found = managed_specs.kept(state_folder(case))
    except GpuhookError:
        return ()
    return found.engines if found is not None else ()


def _unseen(case: Case, reader: CdiEngine) -> Iterator[Finding]:
    """Find specs in engines' folders that this engine doesn't read."""
    looked = [_plain(folder) for folder in reader.folders]
    there: set[str] = set()
    elsewhere: dict[str, set[str]] = {}
    for path, document in case.cdi.documents.items():
        place = case.path_on(path)
        folder = _plain(os.path.dirname(place))
        named = {f"{document['kind']}={device['name']}" for device in document["devices"]}
        if folder in looked:
            there |= named
        elif folder in map(_plain, versions.FOLDERS):
            elsewhere[place] = named
    unseen = [place for place, named in elsewhere.items() if named - there]
    if unseen:
        where = " and ".join(reader.folders) or "no folder"
        target = reader.folders[0] if reader.folders else versions.FOLDERS[0]
        yield _say(
            reader,
            "cdi-folder",
            f"{reader.title} reads only {where}, and so not {listed(unseen, _SHOWN)}",
            f"Run gpuhook cdi generate --output {target}",
        )


def _unreadable(case: Case, reader: CdiEngine) -> Iterator[Finding]:
    """Find specs with a version that the engine's library refuses."""
    highest = _highest(case, reader)
    if highest is None:
        return
    for path, document in case.cdi.documents.items():
        version = document["cdiVersion"]
        if versions.accepts(highest, version):
            continue
        lowest = versions.needed(document)
        place = case.path_on(path)
        remedy = f"Update {reader.engine}"
        if versions.accepts(highest, lowest):
            remedy = f"Set cdiVersion to {lowest}, which is enough for its content"
        elif any(each.get("additionalGids") for each in every_edits(document)):
            remedy += (
                "; or set no-additional-gids-for-device-nodes in [features] of config.toml, and "
                "generate the CDI spec again with gpuhook cdi generate"
            )
        text = f"{reader.title} supports CDI specs up to version {highest}, and {place} has"
        yield _say(reader, "cdi-version", f"{text} {version}", remedy)


def _plain(folder: str) -> str:
    """Return a folder's path for comparison: /var/run is a link to /run."""
    path = os.path.normpath(folder)
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


# Installed engines ---------------------------------------------------------------------------


def _readers(case: Case) -> Iterator[CdiEngine]:
    """Yield the engines on this host that support CDI."""
    yield from _podman(case)
    yield from _dockers(case)
    yield from _containerd(case)
    yield from _crio(case)


def _known(engine: str, version: str) -> bool:
    return bool(version) and versions.highest(engine, version) is not None


def _highest(case: Case, reader: CdiEngine) -> str | None:
    """Return the highest spec version that an engine's build accepts."""
    package = f"/var/lib/dpkg/info/{_PACKAGES[reader.engine]}.list"
    if case.machine.exists(package) and "ID=debian" in (case.machine.text("/etc/os-release") or ""):
        lines = (case.machine.text("/etc/os-release") or "").split("\n")
        found = [line.partition("=")[2] for line in lines if line.startswith("VERSION_CODENAME=")]
        testing = (case.machine.text("/etc/debian_version") or "").strip().rpartition("/")[2]
        for release in (testing, *found):
            if release in versions.DEBIAN:
                return versions.DEBIAN[release]
    return versions.highest(reader.engine, reader.version)


def _podman(case: Case) -> Iterator[CdiEngine]:
    version = engine_files.version_of(case.machine, "podman")
    if not _known("podman", version):
        return
    named: list[str] = []
    for path in engines.podman_files(case):
        table = engine_files.table(engine_files.toml(case.machine, path)[0], "engine")
        named = engine_files.strings(table.get("cdi_spec_dirs")) or named
    found = tuple(named) or versions.FOLDERS
    if not named and versions.folder_for({"podman": version}) != versions.FOLDERS[1]:
        found = versions.FOLDERS[:1]
    yield CdiEngine("podman", version, True, found, True)


def _dockers(case: Case) -> Iterator[CdiEngine]:
    """Yield the running dockerds, or the installed one according to its file."""
    asked = [docker.info for docker in case.dockers if docker.info]
    for info in asked:
        version = str(info.get("ServerVersion", ""))
        looked = engine_files.strings(info.get("CDISpecDirs"))
        if _known("docker", version):
            yield CdiEngine("docker", version, bool(looked), tuple(looked), True)
    if asked:
        return
    version = engine_files.version_of(case.machine, "dockerd")
    if not _known("docker", version) or case.machine.is_closed(DEFAULT_CONFIG):
        return
    settings = _json(case, DEFAULT_CONFIG)
    features = settings.get("features")
    switch = features.get("cdi") if isinstance(features, dict) else None
    is_on = switch is True if versions.is_switched("docker", version) else switch is not False
    given = settings.get("cdi-spec-dirs")
    found = versions.FOLDERS if given is None else tuple(engine_files.strings(given))
    yield CdiEngine("docker", version, is_on and bool(found), found, True)


def _json(case: Case, path: str) -> dict[str, Any]:
    try:
        found = json.loads(case.machine.text(path) or "{}")
    except ValueError:  # reported by the check of Docker
        found = {}
    return found if isinstance(found, dict) else {}


def _containerd(case: Case) -> Iterator[CdiEngine]:
    """Yield containerd's CRI plugin; Docker's containerd gets no CDI names."""
    version = engine_files.version_of(case.machine, "containerd")
    if not _known("containerd", version):
        return
    main = engines.CONTAINERD_FILE
    switches: list[object] = []
    named: list[str] = []
    for path in [main, *engine_files.imports(case.machine, main)]:
        tables = engine_files.toml(case.machine, path)[0]
        switches += _values(tables, "enable_cdi")
        named = _all_strings(_values(tables, "cdi_spec_dirs")) or named
    switch = switches[-1] if switches else None
    is_on = switch is True if versions.is_switched("containerd", version) else switch is not False
    needed = engines.has_kubelet(case)
    yield CdiEngine("containerd", version, is_on, tuple(named) or versions.FOLDERS, needed)


def _crio(case: Case) -> Iterator[CdiEngine]:
    version = engine_files.version_of(case.machine, "crio")
    if not _known("crio", version):
        return
    named: list[str] = []
    for path in ["/etc/crio/crio.conf", *case.machine.glob("/etc/crio/crio.conf.d/*")]:
        tables = engine_files.toml(case.machine, path)[0]
        named = _all_strings(_values(tables, "cdi_spec_dirs")) or named
    yield CdiEngine("crio", version, True, tuple(named) or versions.FOLDERS, True)


def _all_strings(lists: list[object]) -> list[str]:
    return [each for given in lists for each in engine_files.strings(given)]


def _values(value: object, key: str) -> list[object]:
    """Return all values of a key, at any depth of the tables."""
    if not isinstance(value, dict):
        return []
    found = [value[key]] if key in value else []
    return found + [each for inner in value.values() for each in _values(inner, key)]
