"""Checks of NVIDIA's other platforms, where there is no kernel module of its driver for Linux."""

from collections.abc import Iterator

from gpuhook.container.rootfs import Rootfs
from gpuhook.doctor.case import Case
from gpuhook.doctor.finding import Finding, failure, ok, warning
from gpuhook.errors import DriverError, listed
from gpuhook.vendors.nvidia import wsl
from gpuhook.vendors.nvidia.platforms import WSL

_UPDATE = "Install NVIDIA's newest driver for Windows again, and run wsl --shutdown there"


def platform_of(case: Case) -> str:
    """Return the platform's name, "" where it is none of these."""
    try:
        with Rootfs(case.driver.path("/")) as root:
            return WSL if wsl.is_here(root) else ""
    except OSError:
        return ""


def wsl_driver(case: Case) -> Iterator[Finding]:
    """Look at the folders of Windows' driver that WSL2 shows, and ask NVML."""
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
