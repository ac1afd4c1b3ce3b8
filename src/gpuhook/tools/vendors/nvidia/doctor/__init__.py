"""Checks of NVIDIA's driver for the doctor; ``tools/doctor/vendors`` says how they are used."""

from gpuhook.tools.doctor.case import Check, Step
from gpuhook.tools.vendors.nvidia.doctor import driver, nodes, parts, platforms, toolkit

# Checks that must succeed before the later ones run.
_ROOT = ("driver-root",)
_LOADED = (*_ROOT, "driver-loaded")
_MATCHING = (*_LOADED, "driver-versions")


def _detail(check: Check, *needs: str) -> Step:
    return Step(driver.where_nvidia_is(check), needs)


DRIVER_CHECKS = (
    driver.driver_root,
    Step(driver.driver_loaded, _ROOT),
    Step(platforms.wsl_driver, _ROOT),
    Step(platforms.tegra_lists, _ROOT),
    _detail(driver.driver_versions, *_LOADED),
    _detail(nodes.device_nodes, *_LOADED),
    _detail(driver.nvml_answers, *_MATCHING, "device-nodes"),
    _detail(parts.driver_complete, *_MATCHING),
    _detail(driver.loader_cache, *_MATCHING, "driver-files"),
    _detail(nodes.dev_char_links, *_LOADED),
    _detail(driver.mps_answers, *_MATCHING),
)
HOST_CHECKS = (toolkit.cdi_versions, toolkit.foreign_toolkit)

REPORT_FILES = (
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/proc/driver/nvidia/gpus/*/information",
    "/sys/devices/soc0/family",
)
REPORT_NODES = ("/dev/nvidia*", "/dev/nvidia-caps*/*", "/dev/dxg", "/dev/nv*")
