"""What NVIDIA's accelerators are called, by containers, clusters and the kernel: data alone."""

NAME = "nvidia"  # this folder; also in saved inventories and records
TITLE = "NVIDIA"
NOUN = "GPU"  # one device, and any device with the parts that can be asked for
ANY_NOUN = "GPU or MIG device"
ID_TITLE = "UUID"  # what tells devices apart

# Variables by which a container asks, the first that is set decides -> the name spaces that its
# names are looked for in.
VARIABLES = {"NVIDIA_VISIBLE_DEVICES": ("index", "uuid", "bus_id", "mig")}
# Images from before that variable: those that set the first and not the second ask for all.
LEGACY = ("CUDA_VERSION", "NVIDIA_REQUIRE_CUDA")
# The variable that CDI specs set to void, so that no runtime that reads it gives the devices once
# more; "" where programs in containers read it, too.
VOID = "NVIDIA_VISIBLE_DEVICES"
# Variables that limit the memory of these devices for a container: the limit, and what it asks for,
# both in whole MiB (NVIDIA's toolkit reads them from 1.20.1 on).
MEMORY_VARIABLES = ("NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST")
# Where a cluster's device plugin mounts /dev/null to ask for devices.
MOUNTS = "/var/run/nvidia-container-devices"

KIND = "nvidia.com/gpu"  # of CDI devices, and the cluster's resource
# What a device is called before its number in the names gpu0 and mig0:1, and a part of one.
TYPES = ("gpu", "mig")
# Majors that are the same on every machine at every boot, so that documents may hold them.
FIXED_MAJORS = (195,)
# The kind for "found on the machine when the container starts": its names are selectors.
AUTOMATIC = "runtime.nvidia.com/gpu"
# Which words are for it in a variable of swarm-resource that the configuration gives to no
# vendor: hex for 0x..., plain for all others, "" for none.
SWARM_RESOURCE = "plain"
# Whether the default-kind of config.toml is about its names in mode cdi.
DEFAULT_KIND = True

PCI_VENDOR = "10de"  # as /sys/bus/pci/devices/*/vendor has it, without 0x
DRIVER_WORDS = ("nvidia",)  # in the kernel's names of drivers and their devices

LOST_REMEDY = "Look for Xid 79 in dmesg, reset the GPU or reboot, and use the other GPUs meanwhile"
