"""The archive for bug reports: findings, versions and lists of files, no environment values."""

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterable, Iterator

from gpuhook import __version__
from gpuhook.base.errors import GpuhookError, ReportError
from gpuhook.base.host import files as host_files
from gpuhook.core.inventory.cache import get_inventory
from gpuhook.monitor.vendors import survey
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding
from gpuhook.tools.doctor.vendors import doctors

_FOLDER = "gpuhook-report"
_LOG_LINES = 200

# Kernel files without settings of users' programs. The vendors add more.
_TEXTS = ("/etc/os-release", "/proc/version", "/proc/devices")

# Useful fields of docker info that can't contain a proxy's password.
_DOCKER_KEYS = (
    "ServerVersion", "Runtimes", "DefaultRuntime", "CgroupDriver", "CgroupVersion",
    "SecurityOptions", "KernelVersion", "OperatingSystem", "Driver", "CDISpecDirs",
)  # fmt: skip


def write_report(path: str, case: Case, findings: list[Finding]) -> None:
    """Write the archive to ``path``, readable only by its owner; ReportError if that fails."""
    try:
        fd = host_files.create_private(path)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in _contents(case, findings):
                _add(archive, name, text)
    except OSError as error:
        raise ReportError(
            f"The report {path} can't be written: {error.strerror}",
            "Name a file in a writable folder",
        ) from None


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode("utf-8", "replace")
    member = tarfile.TarInfo(f"{_FOLDER}/{name}")
    member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
    archive.addfile(member, io.BytesIO(data))


def _contents(case: Case, findings: list[Finding]) -> Iterator[tuple[str, str]]:
    yield "findings.json", _json([finding.to_json() for finding in findings])
    yield "versions.txt", f"gpuhook {__version__}\n{' '.join(os.uname())}\n"
    vendors = list(doctors(case.config))
    yield from _texts(case, _TEXTS)
    for vendor in vendors:
        yield from _texts(case.of_vendor(vendor.name), vendor.report_files)
    nodes = [
        line
        for vendor in vendors
        for line in _nodes(case.of_vendor(vendor.name), vendor.report_nodes)
    ]
    yield "nodes.txt", "".join(f"{line}\n" for line in dict.fromkeys(nodes))
    yield "inventory.json", _inventory(case)
    yield "config.toml", _config(case)
    yield (
        "docker.json",
        _json(
            [{key: (docker.info or {}).get(key) for key in _DOCKER_KEYS} for docker in case.dockers]
        ),
    )
    yield "log.txt", _log(case)


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _texts(case: Case, patterns: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in [path for pattern in patterns for path in case.driver_glob(pattern)]:
        text = case.driver_text(path)
        if text is not None:
            yield path.lstrip("/"), text


def _nodes(case: Case, patterns: Iterable[str]) -> Iterator[str]:
    for path in [path for pattern in patterns for path in case.driver.glob(pattern)]:
        status = case.driver.stat(path)
        if status is not None:
            numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            yield f"{path} {status.st_mode:o} {status.st_uid}:{status.st_gid} {numbers}"


def _inventory(case: Case) -> str:
    try:
        found, failed = survey.present(
            case.config, lambda vendor: get_inventory(case.config, vendor, save=False)
        )
        errors = [{"error": str(error)} for error in failed]
        return _json([*(inventory.to_json() for inventory in found), *errors])
    except Exception as error:  # noqa: BLE001 - the rest of the report is useful in any case
        known = isinstance(error, GpuhookError)
        return _json({"error": str(error) if known else f"{type(error).__name__}: {error}"})


def _config(case: Case) -> str:
    """Return config.toml without the values of [nvidia-container-cli] environment."""
    text = case.machine.text(case.config.path) if case.config.path else None
    if text is None:
        return "# no configuration file\n"
    return re.sub(r"(?ms)^(\s*environment\s*=\s*)\[.*?\]", r"\1[] # values left out", text)


def _log(case: Case) -> str:
    text = case.machine.text(case.config.cli_debug) if case.config.cli_debug else None
    return "\n".join((text or "").split("\n")[-_LOG_LINES - 1 :])
