"""What the doctor looks at of NVIDIA's driver; ``gpuhook.doctor.vendors`` says how it is used."""

from gpuhook.vendors.nvidia.doctor import driver, nodes, platforms, toolkit

_IN_DETAIL = (
    driver.driver_versions,
    nodes.device_nodes,
    driver.nvml_answers,
    driver.driver_complete,
    driver.loader_cache,
    nodes.dev_char_links,
)
DRIVER_CHECKS = (
    driver.driver_loaded,
    platforms.wsl_driver,
    platforms.tegra_lists,
    *map(driver.where_nvidia_is, _IN_DETAIL),
)
HOST_CHECKS = (toolkit.cdi_versions, toolkit.foreign_toolkit)

REPORT_FILES = (
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/proc/driver/nvidia/gpus/*/information",
    "/sys/devices/soc0/family",
)
REPORT_NODES = ("/dev/nvidia*", "/dev/nvidia-caps*/*", "/dev/dxg", "/dev/nv*")
