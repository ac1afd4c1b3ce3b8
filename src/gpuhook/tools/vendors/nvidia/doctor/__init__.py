"""Checks of NVIDIA's driver for the doctor."""

from collections.abc import Iterable
from functools import wraps

from gpuhook.tools.doctor.case import Case, Check, CheckStep, VendorChecks
from gpuhook.tools.doctor.finding import Finding
from gpuhook.tools.vendors.nvidia.doctor import driver, nodes, parts, platforms, toolkit

# Checks that must succeed before the later ones run.
_ROOT = ("driver-root",)
_LOADED = (*_ROOT, "driver-loaded")
_MATCHING = (*_LOADED, "driver-versions")


def _where_nvidia_is(check: Check) -> Check:
    """Return a check that reports nothing on hosts without NVIDIA's driver for Linux.

    Those are the hosts of ``is_elsewhere``, and NVIDIA's other platforms.
    """

    @wraps(check)
    def run(case: Case) -> Iterable[Finding]:
        return () if platforms.platform_of(case) or driver.is_elsewhere(case) else check(case)

    return run


def _detail(check: Check, *needs: str) -> CheckStep:
    return CheckStep(_where_nvidia_is(check), needs)


CHECKS = VendorChecks(
    (
        driver.driver_root,
        CheckStep(driver.driver_loaded, _ROOT),
        CheckStep(platforms.wsl_driver, _ROOT),
        CheckStep(platforms.tegra_lists, _ROOT),
        _detail(driver.driver_versions, *_LOADED),
        _detail(nodes.device_nodes, *_LOADED),
        _detail(driver.nvml_answers, *_MATCHING, "device-nodes"),
        _detail(parts.driver_complete, *_MATCHING),
        _detail(driver.loader_cache, *_MATCHING, "driver-files"),
        _detail(nodes.dev_char_links, *_LOADED),
        _detail(driver.mps_answers, *_MATCHING),
    ),
    host=(toolkit.cdi_versions, toolkit.foreign_toolkit),
    report_files=(
        "/proc/driver/nvidia/version",
        "/proc/driver/nvidia/params",
        "/proc/driver/nvidia/gpus/*/information",
        "/sys/devices/soc0/family",
    ),
    report_nodes=("/dev/nvidia*", "/dev/nvidia-caps*/*", "/dev/dxg", "/dev/nv*"),
)
