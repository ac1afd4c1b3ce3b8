"""Checks of NVIDIA's platforms without the kernel module of its driver for Linux."""

from collections.abc import Iterator

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import DriverError, LdCacheError, listed
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.finding import Finding, failure, ok, warning
from gpuhook.vendors.nvidia import driver_files, tegra, wsl
from gpuhook.vendors.nvidia.model import TEGRA, WSL

_UPDATE = "Install NVIDIA's newest driver for Windows again, and run wsl --shutdown there"


def platform_of(case: Case) -> str:
    """Return the platform's name, "" if it is none of these."""
    try:
        with Rootfs(case.driver.path("/")) as root:
            if wsl.is_here(root):
                return WSL
            return TEGRA if tegra.is_here(root) and not _has_nvml(root, case) else ""
    except (OSError, LdCacheError):
        return ""


def _has_nvml(root: Rootfs, case: Case) -> bool:
    """Tell whether there is an NVML, which reports more than the files."""
    folders = case.config.library_search_paths
    try:
        index = driver_files.LibraryIndex(root, case.config.ldcache, folders)
        return bool(driver_files.find_nvml(root, index, case.config.file))
    except DriverError:
        return False


def wsl_driver(case: Case) -> Iterator[Finding]:
    """Check the folders of the Windows driver in WSL2, and query NVML."""
    if platform_of(case) != WSL:
        return
    with Rootfs(case.driver.path("/")) as root:
        try:
            found = wsl.discover(root, case.config)
        except DriverError as error:
            yield failure("wsl-driver", error.cause, error.remedy)
            return
        stores = wsl.stores(root)
        missing = [name for name in wsl.PARTS if not root.exists(f"{stores[0]}/{name}")]
    if missing:
        yield warning("wsl-driver", f"{stores[0]} lacks {listed(missing)}", _UPDATE)
    else:
        yield ok("wsl-driver", f"Windows' driver is in {stores[0]}: {found.sentence()}")
    if len(stores) > 1:
        yield warning(
            "wsl-stores",
            f"{len(stores)} folders in {wsl.STORES} have NVIDIA's driver, and {stores[0]} with the "
            "newest CUDA library is used",
            "If CUDA doesn't work in containers, remove old drivers in Windows (pnputil)",
        )
    if not found.cuda_version:
        yield warning(
            "wsl-nvml",
            "There is no NVML, so GPUs have no UUIDs, and images' requirements aren't checked",
            _UPDATE,
        )


def tegra_lists(case: Case) -> Iterator[Finding]:
    """Check the lines of Tegra's lists, with and without an NVML, and the files that they name."""
    folder = case.config.csv_mount_spec_path
    try:
        with Rootfs(case.driver.path("/")) as root:
            if not tegra.is_here(root):
                return
            lists = tegra.lists(root, folder)
            untrusted = [path for path in lists if not tegra.is_trusted(root, path)]
            found = list(tegra.entries(root, folder))
            good = [entry.path for entry in found if not entry.problem]
            absent = [path for path in good if not root.exists(path)]
            if platform_of(case) == TEGRA:
                tegra.discover(root, case.config)
    except DriverError as error:
        yield failure("tegra-lists", error.cause, error.remedy)
        return
    yield from _list_findings(untrusted, found, absent)


def _list_findings(
    untrusted: list[str], found: list[tegra.ListEntry], absent: list[str]
) -> Iterator[Finding]:
    if untrusted:
        yield warning(
            "tegra-owners",
            f"Others than root can write {listed(untrusted)}, so they don't count",
            "Run chown root and chmod 644 on them",
        )
    bad = [f"{each.list} line {each.number} {each.problem}" for each in found if each.problem]
    if bad:
        yield warning("tegra-lines", "; ".join(bad), "Correct these lines, which don't count")
    good = len(found) - len(bad)
    if absent:
        yield ok(
            "tegra-lists",
            f"Tegra's lists name {good} files and nodes, {len(absent)} of which aren't there: "
            f"{listed(absent)}",
        )
    else:
        yield ok("tegra-lists", f"Tegra's lists name {good} files and nodes, which are all there")
