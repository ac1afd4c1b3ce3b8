"""What the doctor looks at of NVIDIA's driver; ``gpuhook.doctor.vendors`` says how it is used."""

from gpuhook.vendors.nvidia.doctor import driver, nodes, toolkit

DRIVER_CHECKS = (
    driver.driver_loaded,
    driver.driver_versions,
    nodes.device_nodes,
    driver.nvml_answers,
    driver.driver_complete,
    driver.loader_cache,
    nodes.dev_char_links,
)
HOST_CHECKS = (toolkit.cdi_versions, toolkit.foreign_toolkit)

REPORT_FILES = (
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/proc/driver/nvidia/gpus/*/information",
)
REPORT_NODES = ("/dev/nvidia*", "/dev/nvidia-caps*/*")
