"""Checks of the host: kernel, cgroups, security modules."""

import os
import re
from collections.abc import Iterator

from gpuhook.ground import names
from gpuhook.ground.host import files as host_files
from gpuhook.ground.host import proc
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, ok, warning
from gpuhook.tools.doctor.machine import Machine

_SELINUX_BOOLEAN = "/sys/fs/selinux/booleans/container_use_devices"  # current and pending value
_SELINUX_ALLOW = "Run setsebool -P container_use_devices on, or the containers with"
_OPENAT2_SINCE = (5, 6)


def kernel(case: Case) -> Iterator[Finding]:
    """Ask whether the kernel has the calls that keep us inside a container's root."""
    release = (case.machine.text("/proc/sys/kernel/osrelease") or "").strip()
    found = re.match(r"(\d+)\.(\d+)", release)
    if found and (int(found[1]), int(found[2])) < _OPENAT2_SINCE:
        yield warning(
            "kernel",
            f"Linux {release} has no openat2(), and paths in containers are walked step by step",
            "Run Linux 5.6 or newer",
        )
    elif found:
        yield ok("kernel", f"Linux {release}")


def cgroups(case: Case) -> Iterator[Finding]:
    """Ask which cgroup version gives out devices."""
    kinds = {}
    for mount in proc.Mounts(case.machine.data("/proc/self/mountinfo")):
        if mount.kind in (b"cgroup", b"cgroup2"):
            kinds[mount.point] = mount
    drivers = {docker.info["CgroupDriver"] for docker in case.dockers if docker.info}
    how = f", Docker's driver is {' and '.join(sorted(drivers))}" if drivers else ""
    whole = kinds.get(b"/sys/fs/cgroup")
    if whole is not None and whole.kind == b"cgroup2":
        yield ok("cgroups", f"cgroup version 2{how}")
    elif any(b"devices" in each.options.split(b",") for each in kinds.values()):
        hybrid = any(each.kind == b"cgroup2" for each in kinds.values())
        version = "1, with an empty version 2 tree beside it" if hybrid else "1"
        yield ok("cgroups", f"cgroup version {version}{how}")
    elif case.config.no_cgroups:
        yield ok("cgroups", "No cgroup hierarchy limits devices, as no-cgroups = true says")
    else:
        yield warning(
            "cgroups",
            "No cgroup hierarchy that limits devices is mounted",
            "Mount cgroup2 on /sys/fs/cgroup, or set [nvidia-container-cli] no-cgroups = true",
        )


def security_modules(case: Case) -> Iterator[Finding]:
    """Ask whether SELinux or AppArmor keeps containers from the nodes."""
    enforcing = (case.machine.text("/sys/fs/selinux/enforce") or "").strip()
    apparmor = (case.machine.text("/sys/module/apparmor/parameters/enabled") or "").strip()
    boolean = case.machine.text(_SELINUX_BOOLEAN)  # not every policy has it
    if enforcing == "1" and boolean is not None and boolean.startswith("1"):
        yield ok("security-module", "SELinux is enforcing, and containers may use device nodes")
    elif enforcing == "1":
        yield warning(
            "security-module",
            "SELinux is enforcing and keeps confined containers from device nodes",
            f"{_SELINUX_ALLOW if boolean is not None else 'Run the containers with'} "
            "--security-opt label=disable",
        )
    elif enforcing == "0":
        yield ok("security-module", "SELinux is permissive")
    elif apparmor == "Y":
        yield ok("security-module", "AppArmor is on; the engines' own profiles allow GPUs")
    else:
        yield ok("security-module", "Neither SELinux nor AppArmor is on")


def rootless(case: Case) -> Iterator[Finding]:
    """Tell of Docker daemons that run without root."""
    for docker in case.dockers:
        options = (docker.info or {}).get("SecurityOptions") or []
        if docker.process.uid == 0 and "name=rootless" not in options:
            continue
        yield ok(
            "rootless",
            f"The dockerd {docker.process.pid} runs as user {docker.process.uid}: its containers "
            "get the device nodes that this user may open, and cgroups limit nothing",
        )


def is_ours(machine: Machine, path: str) -> bool:
    """Tell whether a program is one of gpuhook's, by what it links to or says of itself."""
    name = os.path.basename(machine.target(path))
    if name.startswith((names.RUNTIME, "gpuhook")):
        return True
    try:
        return b"gpuhook" in host_files.read_start(machine.path(path), 4096)
    except OSError:
        return False
