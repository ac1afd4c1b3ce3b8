"""Checks of the driver's files: missing parts, and parts that only the environment leads to.

Containers get files from known folders, and from those in config.toml, regardless of the
environment of the process that starts them. Files found only through this process's PATH or
XDG_DATA_DIRS are reported, with the setting for them.
"""

import os
from collections.abc import Iterator

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, UntrustedPathError, listed
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure, ok, warning
from gpuhook.tools.vendors.nvidia.doctor.driver import opened
from gpuhook.tools.vendors.nvidia.doctor.nodes import module_version
from gpuhook.vendors.nvidia import completeness, driver_files, locations, manifests, variables
from gpuhook.vendors.nvidia.locations import Locations

_CHECK = "driver-files"
# Folders of manifests, searched if there is no manifest.
_MANIFESTS = (manifests.VULKAN, manifests.EGL)


def driver_complete(case: Case) -> Iterator[Finding]:
    """Check the parts of the driver that containers request by default, and the manifests."""
    version = module_version(case)
    if version is None:
        return
    try:
        with opened(case) as (root, index):
            known = Locations(root, case.config)
            files = driver_files.find_all(root, index, version, known)
            elsewhere = [*_elsewhere(case, root, known)]
    except DriverError as error:
        yield failure(_CHECK, error.cause, error.remedy)
        return
    wanted = variables.DEFAULT_CAPABILITIES
    for _, cause, remedy in completeness.missing_libraries(wanted, files, version):
        yield failure(_CHECK, cause, remedy)
        return
    for text in known.refused:
        yield warning("driver-folders", text, "Let only root change that folder")
    missing = completeness.missing_parts(wanted, files) + completeness.missing_manifests(files)
    if missing:
        rest = f"Install the rest of the driver's libraries and programs, version {version}"
        yield warning(_CHECK, "; ".join(missing), "; ".join(elsewhere) or rest)
        return
    others = completeness.others(files)
    more = f"; with all capabilities also {listed(others)}" if others else ""
    yield ok(_CHECK, f"{len(files)} of the driver's files were found{more}")


def _elsewhere(case: Case, root: Rootfs, known: Locations) -> Iterator[str]:
    """Yield the settings for parts that only this process's environment leads to."""
    config = case.config
    programs = [name for names in driver_files.BINARIES.values() for name in names]
    absent = [name for name in programs if not driver_files.find_program(root, name, known)]
    found = [
        folder
        for folder in _folders(root, "PATH")
        if any(root.exists(f"{folder}/{name}") for name in absent)
    ]
    yield from _to_set(locations.PROGRAMS, config.binary_search_paths, found)
    found = [
        folder
        for folder in _folders(root, "XDG_DATA_DIRS")
        if folder not in known.data
        and any(root.list_folder(f"{folder}/{place}") for place in _MANIFESTS)
    ]
    yield from _to_set(locations.DATA, config.data_search_paths, found)


def _to_set(key: str, before: tuple[str, ...], found: list[str]) -> Iterator[str]:
    if found:
        value = ":".join(dict.fromkeys((*before, *found)))
        yield f"Run gpuhook config set gpuhook.{key}={value}"


def _folders(root: Rootfs, variable: str) -> Iterator[str]:
    """Yield the root-owned folders that a variable of our environment names."""
    for folder in dict.fromkeys(os.environ.get(variable, "").split(":")):
        if not folder.startswith("/"):
            continue
        try:
            root.own_folder(folder)
        except (OSError, UntrustedPathError):
            continue
        yield folder.rstrip("/")
