"""Checks of the driver: whether it is loaded, consistent, complete, responsive and cached."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, GpuhookError, LdCacheError
from gpuhook.base.loader import ldcache
from gpuhook.core import contract
from gpuhook.core.inventory.selection import fallen_off
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure, note, ok, warning
from gpuhook.tools.vendors.nvidia.doctor.nodes import gpu_minors, module_version
from gpuhook.tools.vendors.nvidia.doctor.platforms import platform_of
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia import driver_files, names, nvml
from gpuhook.vendors.nvidia.model import TITLES
from gpuhook.vendors.nvidia.requirements import parse_version

_SLOW_SECONDS = 1.0


@contextmanager
def opened(case: Case) -> Iterator[tuple[Rootfs, driver_files.LibraryIndex]]:
    """Open the driver root, and read its loader's cache, for a block."""
    with Rootfs(case.driver.path("/")) as root:
        folders = case.config.library_search_paths
        yield root, driver_files.LibraryIndex(root, case.config.ldcache, folders)


def driver_root(case: Case) -> Iterator[Finding]:
    """Check that the driver root can be opened; reports nothing if it can."""
    try:
        with Rootfs(case.driver.path("/")):
            return
    except OSError as error:
        yield failure(
            "driver-root",
            f"The driver root {case.driver_root} can't be opened: {error.strerror}",
            "Start the driver container, or correct [nvidia-container-cli] root in "
            f"{case.config.file}",
        )


def driver_loaded(case: Case) -> Iterator[Finding]:
    """Check that the kernel module is loaded."""
    version, platform = module_version(case), platform_of(case)
    if platform:
        text = f"This is {TITLES[platform]}, without a kernel module of NVIDIA's driver for Linux"
        yield ok("driver-loaded", text)
    elif is_elsewhere(case) and _others_have_devices(case):
        yield ok("driver-loaded", "This host has no NVIDIA GPU, and devices of another vendor")
    elif version:
        yield ok("driver-loaded", f"The NVIDIA kernel module {version} is loaded")
    elif case.machine.exists("/sys/module/nouveau"):
        yield failure(
            "driver-loaded",
            "The NVIDIA kernel module isn't loaded, and nouveau is using the GPU",
            "Blacklist nouveau, rebuild the initramfs and reboot",
        )
    elif is_elsewhere(case):
        yield note(
            "driver-loaded",
            "The NVIDIA kernel module isn't loaded, and the PCI bus shows no NVIDIA GPU",
            "If this host should have one: check that it is passed through to it (lspci -d "
            f"{names.PCI_VENDOR}:), and install its driver",
        )
    elif not _has_gpu(case):
        yield failure(
            "driver-loaded",
            "The NVIDIA kernel module isn't loaded, and the PCI bus shows no NVIDIA GPU",
            f"Check that this host has a GPU (lspci -d {names.PCI_VENDOR}:) that is passed "
            "through to it",
        )
    elif not _has_libraries(case):
        yield failure(
            "driver-loaded",
            "There is an NVIDIA GPU and no driver for it: the kernel module isn't loaded, and "
            "there is no libnvidia-ml.so.1",
            "Install NVIDIA's driver, or set the folders of its libraries with [gpuhook] "
            f"library-search-paths in {case.config.file}",
        )
    else:
        yield failure(
            "driver-loaded",
            "The NVIDIA kernel module isn't loaded",
            "Run modprobe nvidia; if that fails, (re)install the driver for this kernel",
        )


def is_elsewhere(case: Case) -> bool:
    """Tell whether a host has nothing of NVIDIA.

    A host with the driver's libraries, or with a driver root in its configuration, should have
    a GPU, unless another vendor's driver has devices there.
    """
    nvidias = ("/sys/module/nvidia", "/sys/module/nouveau", "/proc/driver/nvidia")
    if case.driver_root != "/" or any(map(case.machine.exists, nvidias)) or _has_gpu(case):
        return False
    return not _has_libraries(case) or _others_have_devices(case)


def _others_have_devices(case: Case) -> bool:
    others = (
        each for each in registry.all_vendors(case.config).values() if each.NAME != names.NAME
    )
    return any(_has_devices(contract.load(each), case) for each in others)


def _has_devices(vendor: contract.Vendor, case: Case) -> bool:
    try:
        return bool(vendor.discover(case.config).devices)
    except DriverError:
        return False


def _has_gpu(case: Case) -> bool:
    paths = case.machine.glob("/sys/bus/pci/devices/*/vendor")
    vendors = {(case.machine.text(path) or "").strip() for path in paths}
    return f"0x{names.PCI_VENDOR}" in vendors


def _has_libraries(case: Case) -> bool:
    try:
        with opened(case) as (root, index):
            return bool(driver_files.find_nvml(root, index, case.config.file))
    except (OSError, DriverError, LdCacheError):
        return False


def driver_versions(case: Case) -> Iterator[Finding]:
    """Compare the version of the libraries with the kernel module's."""
    try:
        with opened(case) as (root, index):
            library = driver_files.find_nvml(root, index, case.config.file)
    except (DriverError, LdCacheError) as error:
        yield failure("driver-versions", error.cause, error.remedy)
        return
    installed, loaded = library.rpartition(".so.")[2], module_version(case)
    if installed.isdecimal() and loaded is not None:  # some distributions use the SONAME
        yield ok("driver-versions", f"{library} has no version in its name; the module is {loaded}")
    elif installed == loaded:
        yield ok("driver-versions", f"Libraries and kernel module are both {loaded}")
    elif loaded is not None:
        yield failure(
            "driver-versions",
            f"The driver's libraries are {installed} and the loaded kernel module is {loaded}",
            _match(installed, loaded),
        )


def _match(installed: str, loaded: str) -> str:
    """Return the remedy for different versions: usually the module is the older one."""
    numbers = parse_version(installed), parse_version(loaded)
    if numbers[0] and numbers[1] and numbers[0] < numbers[1]:
        return (
            f"Install the driver's libraries {loaded}; if {installed} is the whole installed "
            "driver, reboot"
        )
    return (
        "Reboot, or stop all users of the GPUs and reload the module: the driver was upgraded "
        "while the old module was loaded. Installing more libraries doesn't help"
    )


def nvml_answers(case: Case) -> Iterator[Finding]:
    """Query NVML for the GPUs, and measure the time."""
    try:
        with opened(case) as (root, index):
            library = driver_files.find_nvml(root, index, case.config.file)
            before = time.monotonic()
            answer = nvml.ask(root.path, library, case.config.user, case.config.nvml_timeout)
            seconds = time.monotonic() - before
    except DriverError as error:
        yield failure("nvml", error.cause, error.remedy)
        return
    yield from _nvml_findings(answer, seconds, len(gpu_minors(case)))


def _nvml_findings(answer: nvml.NvmlResponse, seconds: float, expected: int) -> Iterator[Finding]:
    found = len(answer.gpus)
    what = f"NVML answers after {seconds:.2f} s: {found} GPU{'s' if found != 1 else ''}"
    what += f", driver {answer.driver_version}, CUDA {answer.cuda_version}"
    if answer.lost:
        yield failure("nvml-lost", fallen_off(answer.lost, names), names.LOST_REMEDY)
    if seconds > _SLOW_SECONDS:
        yield warning(
            "nvml",
            what,
            "Enable persistence mode (nvidia-persistenced, or nvidia-smi -pm 1): without it, the "
            "driver initializes the GPUs again for each first user",
        )
    elif found + len(answer.lost) != expected:
        yield warning(
            "nvml",
            f"{what}, but the kernel module serves {expected}",
            "Check NVIDIA_VISIBLE_DEVICES and the GPU's state with nvidia-smi",
        )
    else:
        yield ok("nvml", what)


def loader_cache(case: Case) -> Iterator[Finding]:
    """Look for the driver's libraries in the loader's cache."""
    path = case.config.ldcache or "/etc/ld.so.cache"
    remedy = "Run ldconfig where the driver is installed"
    try:
        with Rootfs(case.driver.path("/")) as root:
            data = root.read_file(path, ldcache.MAX_SIZE)
        known = set() if data is None else {entry.key for entry in ldcache.parse(data).entries}
    except LdCacheError as error:
        yield failure("ld-cache", error.cause, remedy)
        return
    missing = [name for name in ("libnvidia-ml.so.1", "libcuda.so.1") if name not in known]
    if data is None:
        yield warning("ld-cache", f"{path} doesn't exist below {case.driver_root}", remedy)
    elif missing:
        yield warning("ld-cache", f"{path} doesn't know {' and '.join(missing)}", remedy)
    else:
        yield ok("ld-cache", f"{path} knows the driver's libraries")


def mps_answers(case: Case) -> Iterator[Finding]:
    """Check that the control daemon of [gpuhook.mps] answers."""
    if not case.config.mps_devices:
        return
    from gpuhook.tools.running import mps_status  # noqa: PLC0415 - few share devices by MPS

    try:
        mps_status.check(case.config)
    except GpuhookError as error:
        yield failure("mps", f"GPUs are shared by MPS, and {error.cause}", error.remedy)
    else:
        yield ok("mps", "MPS' control daemon answers")
