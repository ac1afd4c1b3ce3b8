"""Checks of the host: kernel, cgroups, security modules."""

import os
import re
from collections.abc import Iterator

from gpuhook.base import names
from gpuhook.base.host import files as host_files
from gpuhook.base.host import proc
from gpuhook.monitor.host.uevents import GROUP
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, ok, warning
from gpuhook.tools.doctor.machine import Machine

_SELINUX = "/sys/fs/selinux"
# Booleans of SELinux policies, each read as current and pending value. The first is that of our
# module (packaging/selinux), the second that of Fedora and Red Hat. The third is in the policies
# that the module supports: Debian's and others based on the reference policy.
_OURS, _FEDORAS, _REFERENCE = (
    f"{_SELINUX}/booleans/{name}"
    for name in ("gpuhook_containers_use_gpus", "container_use_devices", "container_use_dri")
)
# Paths of the module, from the package and from the page on security.
_MODULES = tuple(
    f"{share}/selinux/packages/gpuhook.cil" for share in ("/usr/share", "/usr/local/share")
)
_RUNTIME_TYPE = b"container_engine_exec_t"  # runc's label, too
_OPENAT2_SINCE = (5, 6)


def kernel(case: Case) -> Iterator[Finding]:
    """Check for the system calls that confine path look-ups to a container's root."""
    release = (case.machine.text("/proc/sys/kernel/osrelease") or "").strip()
    found = re.match(r"(\d+)\.(\d+)", release)
    if found and (int(found[1]), int(found[2])) < _OPENAT2_SINCE:
        yield warning(
            "kernel",
            f"Linux {release} has no openat2(), so paths in containers are resolved step by step",
            "Run Linux 5.6 or newer",
        )
    elif found:
        yield ok("kernel", f"Linux {release}")


def kernel_events(_case: Case) -> Iterator[Finding]:
    """Check that the kernel's events about devices can be received, as gpuhook watch has to."""
    from pyroute2 import UeventSocket  # noqa: PLC0415 - 100 ms, and 24 MiB in a service
    from pyroute2.netlink.nlsocket import NetlinkSocket  # noqa: PLC0415 - as above

    try:
        with UeventSocket() as listening:
            NetlinkSocket.bind(listening, groups=GROUP)  # its own takes no group in pyroute2 0.7
    except OSError as error:
        yield warning(
            "kernel-events",
            f"The kernel's events about devices can't be received: {error.strerror}; "
            "gpuhook watch doesn't start without them",
            "Permit netlink sockets here (AF_NETLINK), and run it in the host's network namespace",
        )


def cgroups(case: Case) -> Iterator[Finding]:
    """Check the cgroup version that controls devices."""
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
        version = "1, and an empty version 2 tree" if hybrid else "1"
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
    """Check whether SELinux or AppArmor blocks gpu-py or containers' access to device nodes."""
    enforcing = (case.machine.text(f"{_SELINUX}/enforce") or "").strip()
    apparmor = (case.machine.text("/sys/module/apparmor/parameters/enabled") or "").strip()
    if enforcing == "1":
        yield _enforced(case)
    elif enforcing == "0":
        yield ok("security-module", "SELinux is permissive")
    elif apparmor == "Y":
        yield ok("security-module", "AppArmor is enabled; the engines' own profiles allow GPUs")
    else:
        yield ok("security-module", "Neither SELinux nor AppArmor is enabled")


def _enforced(case: Case) -> Finding:
    """Return the finding for an enforcing SELinux."""
    ours = case.machine.text(_OURS)
    fedoras = case.machine.text(_FEDORAS)
    launcher = f"{case.bin}/{names.RUNTIME}"
    if ours is None and fedoras is None and case.machine.exists(_REFERENCE):
        return warning(
            "security-module",
            "SELinux is enforcing without gpuhook's policy module",
            _load_module(case, launcher),
        )
    if ours is not None and _RUNTIME_TYPE not in case.machine.label(launcher).split(b":"):
        return warning(
            "security-module",
            f"SELinux is enforcing, and the label of {launcher} prevents podman's conmon from "
            "running it",
            f"Give it runc's label: restorecon -F {launcher}, or chcon -t "
            f"{_RUNTIME_TYPE.decode()} {launcher} if the policy has no such path",
        )
    if (ours or fedoras or "").startswith("1"):
        return ok("security-module", "SELinux is enforcing, and containers may use device nodes")
    boolean = os.path.basename(_OURS if ours is not None else _FEDORAS)
    known = ours is not None or fedoras is not None  # not every policy has a boolean
    allow = f"Run setsebool -P {boolean} on, or the" if known else "Run the"
    return warning(
        "security-module",
        "SELinux is enforcing and denies confined containers access to device nodes",
        f"{allow} containers with --security-opt label=disable",
    )


def _load_module(case: Case, launcher: str) -> str:
    """Return the commands that load gpuhook's policy module."""
    for path in _MODULES:
        if case.machine.exists(path):
            return f"Run semodule -i {path} and restorecon -RF {launcher} {case.config.state_dir}"
    module = _MODULES[-1]
    return (
        f"Run mkdir -p {os.path.dirname(module)}; gpuhook files {module} >{module}; "
        f"semodule -i {module}; restorecon -RF {launcher} {case.config.state_dir}"
    )


def rootless(case: Case) -> Iterator[Finding]:
    """Report rootless Docker daemons."""
    for docker in case.dockers:
        options = (docker.info or {}).get("SecurityOptions") or []
        if docker.process.uid == 0 and "name=rootless" not in options:
            continue
        yield ok(
            "rootless",
            f"The dockerd {docker.process.pid} runs as user {docker.process.uid}: its containers "
            "get the device nodes that this user can open, and cgroups restrict nothing",
        )


def is_ours(machine: Machine, path: str) -> bool:
    """Tell whether a program is part of gpuhook, by its link target or its output."""
    name = os.path.basename(machine.target(path))
    if name.startswith((names.RUNTIME, "gpuhook")):
        return True
    try:
        return b"gpuhook" in host_files.read_start(machine.path(path), 4096)
    except OSError:
        return False
