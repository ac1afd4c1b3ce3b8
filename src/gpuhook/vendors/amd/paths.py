"""Where amdgpu, KFD and udev show what there is, below a driver root."""

MODULE = "/sys/module/amdgpu"
GPUS = f"{MODULE}/drivers/pci:amdgpu"  # a link to each PCI device of the driver
PLATFORM = "/sys/devices/platform"
# Further partitions: amdgpu_xcp_1 is what AMD's own driver calls them, amdgpu_xcp.1 Linux.
PARTITION = "amdgpu_xcp"
TOPOLOGY = "/sys/class/kfd/kfd/topology"
CONTROL = "/dev/kfd"
NODES = "/dev/dri"
