"""Paths of amdgpu, KFD and udev below a driver root."""

MODULE = "/sys/module/amdgpu"
GPUS = f"{MODULE}/drivers/pci:amdgpu"  # a link to each PCI device of the driver
PLATFORM = "/sys/devices/platform"
# Further partitions: named amdgpu_xcp_1 by AMD's own driver, amdgpu_xcp.1 by Linux.
PARTITION = "amdgpu_xcp"
TOPOLOGY = "/sys/class/kfd/kfd/topology"
CONTROL = "/dev/kfd"
NODES = "/dev/dri"
