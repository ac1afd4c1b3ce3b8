"""Checks of the device nodes against the kernel module's GPUs in /proc."""

import os
import re
import stat
from collections.abc import Iterator

from gpuhook.base import names
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure, ok, warning
from gpuhook.vendors.nvidia import names as vendor_names
from gpuhook.vendors.nvidia.completeness import MAKE_UVM
from gpuhook.vendors.nvidia.model import CONTROL, UVM

_VERSION = re.compile(r"\b\d{2,4}(?:\.\d{1,4}){1,2}\b")
_NVIDIA_MAJOR = 195  # Documentation/admin-guide/devices.txt
_EVERYONE = stat.S_IROTH | stat.S_IWOTH


def module_version(case: Case) -> str | None:
    """Return the loaded kernel module's version, None if none is loaded."""
    text = case.driver_text("/proc/driver/nvidia/version") or ""
    found = _VERSION.search(text.partition("\n")[0])
    return found[0] if found else None


def device_nodes(case: Case) -> Iterator[Finding]:
    """Check the device nodes, their numbers and their permissions."""
    if module_version(case) is None:
        return
    wrong = {path: _node_problem(case, path, pair) for path, pair in _expected(case).items()}
    problems = [f"{path} {problem}" for path, problem in wrong.items() if problem]
    if not problems:
        yield ok("device-nodes", f"All {len(wrong)} device nodes exist with the right numbers")
        yield from _node_modes(case, list(wrong))
    elif problems == [f"{UVM.path} {wrong[UVM.path]}"]:
        remedy = f"Run {MAKE_UVM} as root, and let a boot service do so"
        yield failure("device-uvm", f"{problems[0]}, so CUDA doesn't work", remedy)
    else:
        remedy = f"Run nvidia-smi and {MAKE_UVM} as root, and let a boot service do so"
        yield failure("device-nodes", "; ".join(problems), remedy)


def _expected(case: Case) -> dict[str, tuple[int, int] | None]:
    """Return the expected nodes; None for one whose module isn't loaded."""
    uvm = _major(case, UVM.module)
    expected: dict[str, tuple[int, int] | None] = {
        CONTROL.path: (_NVIDIA_MAJOR, CONTROL.minor),
        UVM.path: None if uvm is None else (uvm, UVM.minor),
    }
    for minor in gpu_minors(case):
        expected[f"/dev/nvidia{minor}"] = (_NVIDIA_MAJOR, minor)
    return expected


def gpu_minors(case: Case) -> list[int]:
    """Return the minors of the GPUs that the kernel module serves."""
    minors = []
    for name in case.driver_names("/proc/driver/nvidia/gpus"):
        text = case.driver_text(f"/proc/driver/nvidia/gpus/{name}/information") or ""
        found = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        if found:
            minors.append(int(found[1]))
    return sorted(minors)


def _major(case: Case, name: str) -> int | None:
    for line in (case.driver_text("/proc/devices") or "").split("\n"):
        number, _, driver = line.strip().partition(" ")
        if driver == name and number.isdecimal():
            return int(number)
    return None


def _node_problem(case: Case, path: str, expected: tuple[int, int] | None) -> str:
    if expected is None:
        return "can't exist because the kernel module nvidia-uvm isn't loaded"
    status = case.driver.stat(path)
    if status is None:
        return "is missing"
    if not stat.S_ISCHR(status.st_mode):
        return "isn't a character device"
    found = (os.major(status.st_rdev), os.minor(status.st_rdev))
    if found != expected:
        return f"is {found[0]}:{found[1]} and should be {expected[0]}:{expected[1]}"
    return ""


def _node_modes(case: Case, paths: list[str]) -> Iterator[Finding]:
    """Report nodes that not all users may open: containers that don't run as root need that."""
    closed = []
    for path in paths:
        status = case.driver.stat(path)
        if status is not None and status.st_mode & _EVERYONE != _EVERYONE:
            closed.append(path)
    if closed:
        yield warning(
            "device-modes",
            f"Not all users may open {', '.join(closed)}",
            "Give containers that don't run as root the nodes' group, or set NVreg_DeviceFileMode",
        )


def dev_char_links(case: Case) -> Iterator[Finding]:
    """Check the nodes' links in /dev/char, with which older runcs name devices to systemd."""
    if module_version(case) is None or not _systemd_makes_cgroups(case):
        return
    missing = []
    for path, pair in _expected(case).items():
        if pair is not None and case.driver.exists(path):
            link = f"/dev/char/{pair[0]}:{pair[1]}"
            if not os.path.exists(case.machine.path(link)):
                missing.append(link)
    if missing and any(each["kind"] == vendor_names.KIND for each in case.cdi.documents.values()):
        yield warning(
            "dev-char",
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: with runc "
            "1.1.3 to 1.1.6, containers that have GPUs through CDI specs lose them at systemctl "
            "daemon-reload",
            "Run gpuhook refresh as root, at every boot, or let gpuhook-watch.service do so",
        )
    elif missing:
        yield ok("dev-char", "gpu-py links the nodes in /dev/char when it starts a container")
    else:
        yield ok("dev-char", "/dev/char links to every device node")


def _systemd_makes_cgroups(case: Case) -> bool:
    """Tell whether an engine may let systemd create its containers' cgroups.

    Docker reports its setting. podman, CRI-O and a kubelet's engine do so by default.
    """
    if not case.machine.exists("/run/systemd/system"):
        return False
    others = any(case.machine.which(name, names.SEARCH_PATH) for name in ("podman", "crio"))
    said = {(found.info or {}).get("CgroupDriver") for found in case.dockers}
    return said != {"cgroupfs"} or others or case.machine.exists("/var/lib/kubelet")
