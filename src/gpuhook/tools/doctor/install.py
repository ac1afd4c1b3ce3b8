"""Checks of gpuhook itself: its programs, its configuration, its saved inventory."""

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import gpuhook
from gpuhook import __version__
from gpuhook.base import log, names
from gpuhook.base.config.model import WITHOUT_EFFECT
from gpuhook.base.errors import RuntimeMissingError, listed, shown
from gpuhook.base.host import files as host_files
from gpuhook.base.host import proc
from gpuhook.base.loader import elf
from gpuhook.core import contract
from gpuhook.core.inventory import cache
from gpuhook.core.records import engine_names, records
from gpuhook.monitor import memory_limit_support
from gpuhook.monitor.vendors import survey
from gpuhook.prefork import launcher_cache
from gpuhook.runtime_shim import find_runtime
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning
from gpuhook.vendors import registry

_LAUNCHERS = (names.RUNTIME, names.HOOK)
_ELF_HEADER = 20  # bytes of the header, up to the architecture
_PATIENCE = 20.0  # seconds
_SHORT_ID = 12  # characters of a container's id, as Docker prints it
# Architectures as in uname -m, by the number in a program's header (elf.h).
_MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "arm", 62: "x86_64", 183: "aarch64",
             243: "riscv64", 258: "loongarch64"}  # fmt: skip
_REINSTALL = "Reinstall gpuhook, so that gpu-py and gpuhook-prestart are in one folder"


def launchers(case: Case) -> Iterator[Finding]:
    """Check the programs that engines call, and that only root can change them."""
    missing = [name for name in _LAUNCHERS if not case.machine.is_program(f"{case.bin}/{name}")]
    if missing:
        text = f"{' and '.join(missing)} can't be executed in {case.bin}"
        yield failure("launchers", text, _REINSTALL)
        return
    ours = _program_machine(host_files.read_start("/proc/self/exe", _ELF_HEADER))
    for name in _LAUNCHERS:
        of = _program_machine(case.machine.data(f"{case.bin}/{name}"))
        if of and of != ours:
            yield failure(
                "launchers",
                f"{case.bin}/{name} is a program for {of}, and this host is {ours}",
                f"Install gpuhook's wheel or package for {ours}",
            )
            return
    yield ok("launchers", f"gpu-py and gpuhook-prestart {__version__} are in {case.bin}")
    open_to_all = [path for path in _trusted_paths(case) if _writable_by_others(case, path)]
    if open_to_all:
        yield failure(
            "launcher-owner",
            f"Other users than root can change {', '.join(open_to_all)}, which root runs",
            "Remove the write permission (chmod go-w, chown root), or install elsewhere",
        )


def _program_machine(header: bytes) -> str:
    """Return the architecture that a program is compiled for, "" if it isn't compiled."""
    if header[:4] != elf.MAGIC or len(header) < _ELF_HEADER:
        return ""
    order: Literal["little", "big"] = "little" if header[5] == elf.LITTLE_ENDIAN else "big"
    number = int.from_bytes(header[18:_ELF_HEADER], order)
    return _MACHINES.get(number, f"machine {number} of elf.h")


def _trusted_paths(case: Case) -> list[str]:
    """Return the launchers, the package and every folder above them."""
    package = os.path.dirname(os.path.abspath(gpuhook.__file__))
    paths = [f"{case.bin}/{name}" for name in _LAUNCHERS]
    paths += [package] if not case.machine.root else []
    for path in list(paths):
        folder = os.path.dirname(path)
        while folder not in ("/", ""):
            paths.append(folder)
            folder = os.path.dirname(folder)
    return sorted(set(paths))


def _writable_by_others(case: Case, path: str) -> bool:
    status = case.machine.stat(path)
    if status is None or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return False
    group = status.st_mode & stat.S_IWGRP and status.st_gid != 0
    return bool(status.st_uid not in (0, os.geteuid()) or group or status.st_mode & stat.S_IWOTH)


def low_level_runtime(case: Case) -> Iterator[Finding]:
    """Check that the low-level runtime of gpu-py exists."""
    launcher = f"{case.bin}/{names.RUNTIME}"
    try:
        folders = os.fsencode(os.environ.get("PATH", ""))
        low_level = find_runtime(case.config.runtimes, folders, launcher)
    except RuntimeMissingError as error:
        yield failure("low-level-runtime", error.cause, error.remedy)
    else:
        yield ok("low-level-runtime", f"gpu-py calls {low_level}")


def runtime_starts(case: Case) -> Iterator[Finding]:
    """Run gpu-py, which starts its low-level runtime, and measure the time."""
    launcher = f"{case.bin}/{names.RUNTIME}"
    before = time.monotonic()
    try:
        done = subprocess.run(
            [case.machine.path(launcher), "--version"],
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield failure("runtime-starts", f"gpu-py --version fails: {error}", _REINSTALL)
        return
    milliseconds = (time.monotonic() - before) * 1000
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().split("\n")
        text = f"gpu-py --version exits with status {done.returncode}: {said[-1] or 'no message'}"
        yield failure("runtime-starts", text, _REINSTALL)
    else:
        yield ok("runtime-starts", f"gpu-py --version takes {milliseconds:.0f} ms")


def python(case: Case) -> Iterator[Finding]:
    """Report the interpreter and its version."""
    del case
    version = ".".join(map(str, sys.version_info[:3]))
    yield ok("python", f"Python {version} from {sys.executable}")


def configuration(case: Case) -> Iterator[Finding]:
    """Check that the configuration is valid, has no unused keys, and only root can change it."""
    if case.config_error:
        cause, _, remedy = case.config_error.rstrip(".").rpartition(". ")
        yield failure("configuration", cause or remedy, remedy)
        return
    path = case.config.path
    yield ok("configuration", f"{path} is valid" if path else "No configuration file: all defaults")
    if path and _writable_by_others(case, path):
        yield failure(
            "configuration-owner",
            f"Other users than root can change {path}",
            f"Run chown root:root {path} and chmod go-w {path}",
        )
    yield from _keys_without_effect(case)


def _keys_without_effect(case: Case) -> Iterator[Finding]:
    """Warn of unknown keys; report NVIDIA's keys that have no effect here."""
    known = [key for key, _ in case.config.ignored if key in WITHOUT_EFFECT]
    if known:
        text = f"NVIDIA's keys without effect here: {', '.join(known)}"
        yield ok("configuration-unused-keys", text)
    for key, reason in case.config.ignored:
        if key not in WITHOUT_EFFECT:
            text = f"{key} has no effect: {reason}"
            remedy = f"Correct or delete it in {case.config.path}"
            yield warning("configuration-keys", text, remedy)


def driver_roots(case: Case) -> Iterator[Finding]:
    """Report the driver roots, if they aren't the host's root."""
    vendors = registry.all_vendors(case.config)
    for entry in case.config.driver_roots:
        vendor = entry.partition("=")[0]
        if vendor not in vendors:
            yield warning(
                "driver-roots",
                f"driver-roots names the vendor {shown(vendor)}, which gpuhook doesn't know",
                f"Use one of {', '.join(vendors)}",
            )
    roots = {names.TITLE: case.config.driver_root_of(name) for name, names in vendors.items()}
    first, *others = dict.fromkeys(roots.values())
    if others:
        places = ", ".join(f"{title} below {root}" for title, root in roots.items())
        yield ok("driver-roots", f"Drivers are searched for: {places}")
    elif first != "/":
        yield ok("driver-roots", f"Drivers are searched for below {first}")


def saved_inventory(case: Case) -> Iterator[Finding]:
    """Check that a fresh inventory is saved, and that only root can change it."""
    folder = case.config.state_dir
    if case.machine.exists(folder) and _writable_by_others(case, folder):
        yield failure(
            "saved-inventory",
            f"Other users than root can change {folder}, so nothing saved there is used",
            f"Run chown root:root {folder} and chmod 755 {folder}",
        )
        return
    vendors = registry.all_vendors(case.config).values()
    saved = [cache.saved(case.config, contract.load(names)) for names in vendors]
    found = [inventory.sentence() for inventory in saved if inventory is not None]
    if found:
        text = f"The inventory saved in {folder} is fresh: {'; '.join(found)}"
        yield ok("saved-inventory", text)
    elif survey.loaded(
        case.config, case.machine.exists
    ):  # without a driver there is nothing to save
        yield note(
            "saved-inventory",
            f"No fresh inventory is saved in {folder}: the next GPU container waits for the driver",
            "Run gpuhook refresh as root to save one now",
        )


# Sizes of /dev/shm in mountinfo: of most engines, and podman's.
_SMALL = {b"size=65536k", b"size=64000k"}


def memory_limits(case: Case) -> Iterator[Finding]:
    """Check that the configured memory limits can be set on this host."""
    config = case.config
    if not config.limits_memory:
        return
    yield from _borders(case)
    for each in registry.all_vendors(config).values():
        vendor = contract.load(each)
        inventory = cache.saved(config, vendor)
        if inventory is None:
            continue
        lacking = memory_limit_support.what_it_takes(vendor, inventory, config)
        title = vendor.names.TITLE
        if lacking is None:
            yield ok("memory-limits", f"The memory of {title} devices can be limited")
        else:
            yield failure(
                "memory-limits",
                f"[gpuhook.limits] limits the memory of {title} devices, and no container with "
                f"one starts: {lacking.cause}",
                lacking.remedy,
            )


def _borders(case: Case) -> Iterator[Finding]:
    """Check that no process can leave its cgroup for one that another container can write.

    Source: Documentation/admin-guide/cgroup-v2.rst, nsdelegate.
    """
    for mount in proc.Mounts(case.machine.data("/proc/self/mountinfo")):
        if mount.kind == b"cgroup2" and b"nsdelegate" not in mount.options.split(b","):
            place = proc.unescaped(mount.point)
            yield warning(
                "memory-limits",
                f"Cgroups are mounted at {shown(place)} without nsdelegate, so a container that "
                "can write to its own cgroup can help another one to escape a limit",
                f"mount -o remount,nsdelegate {place}, as systemd does when the host boots",
            )
            return


def shared_memory(case: Case) -> Iterator[Finding]:
    """Name containers with devices whose /dev/shm has an engine's default size."""
    small = []
    for record in records.read_all(case.config.state_dir):
        for mount in proc.Mounts(case.machine.data(f"/proc/{record['pid']}/mountinfo")):
            words = mount.options.split(b",")
            if (mount.point, mount.kind) == (b"/dev/shm", b"tmpfs") and _SMALL.intersection(words):
                small.append(record)
                break
    if small:
        many = f"{len(small)} containers" if len(small) > 1 else "One container"
        verb = "have" if len(small) > 1 else "has"
        yield note(
            "shared-memory",
            f"{many} with devices {verb} only 64 MiB of /dev/shm, the engine's default, which "
            f"training across processes exceeds: {listed(_titles(small))}",
            'Set shm-size = "50%" below [gpuhook.containers] for new ones, or pass --shm-size',
        )


def _titles(found: list[dict[str, Any]]) -> list[str]:
    """Return names for containers by their records: the cluster's, the engine's, or the id."""
    return [
        shown(each["container"] or engine_names.name_of(each) or each["id"][:_SHORT_ID])
        for each in found
    ]


def recent_errors(case: Case) -> Iterator[Finding]:
    """Report recent errors of container starts: not every engine shows gpuhook's messages."""
    lately = _lately(case, log.ERRORS)
    if lately:
        count = f"{len(lately)} containers failed" if len(lately) > 1 else "A container failed"
        remedy = (
            "Do what the message says; crun, and podman at precreate, hide the messages of hooks"
        )
        yield note("recent-errors", f"{count} within a day, the last: {lately[-1]}", remedy)


def recent_warnings(case: Case) -> Iterator[Finding]:
    """Report recent containers that started without a part of the driver they requested."""
    lately = _lately(case, log.WARNINGS)
    if lately:
        many = len(lately) > 1
        count = f"{len(lately)} containers request" if many else "A container requests"
        yield note(
            "recent-warnings",
            f"{count} something unavailable, within a day, the last: {lately[-1]}",
            "Correct the variable in the image, or in the container's definition",
        )


def _lately(case: Case, name: str) -> list[str]:
    """Return the last day's messages in a file of the state folder, each with its time."""
    text = case.machine.text(f"{case.config.state_dir}/{name}") or ""
    yesterday = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 86400))
    lately = []
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a truncated line
        if isinstance(record, dict) and str(record.get("time", "")) > yesterday:
            lately.append(f"{record['time']} {record.get('msg', '')}".rstrip("."))
    return lately


def launcher_settings(case: Case) -> Iterator[Finding]:
    """Check that the launcher's cache is fresh; otherwise Python has to read config.toml."""
    path = case.config.path
    if path is None or case.config_error:
        return
    folder = f"{launcher_cache.FOLDER}{path}"
    saved = case.machine.stat(f"{folder}/{launcher_cache.CACHE}")
    newest = [case.machine.stat(place) for place in (path, os.path.dirname(path))]
    times = [status.st_mtime for status in newest if status is not None]
    if saved is not None and saved.st_uid == 0 and all(saved.st_mtime > time for time in times):
        yield ok("launcher-settings", f"gpu-py's cache of {path} is fresh")
    elif times and times[0] < launcher_cache.LONG_AGO:
        yield note(
            "launcher-settings",
            f"{path} has the fixed time of a reproducible build, by which gpu-py can't notice a "
            "change, so it may read the file at each call",
            f"Run touch {path} to avoid that",
        )
    else:
        yield ok(
            "launcher-settings",
            f"gpu-py hasn't read {path} since it was changed; the next container start does",
        )
