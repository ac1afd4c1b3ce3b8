"""Names of NVIDIA's accelerators in containers, clusters and the kernel: only data."""

NAME = "nvidia"  # this folder; also in saved inventories and records
TITLE = "NVIDIA"
NOUN = "GPU"  # one device; below, any device, including parts that can be requested
ANY_NOUN = "GPU or MIG device"
ID_TITLE = "UUID"  # of the unique id

# Variables for requests -> the id kinds of their names. The first one that is set decides.
VARIABLES = {"NVIDIA_VISIBLE_DEVICES": ("index", "uuid", "bus_id", "mig")}
# Images that predate that variable: those that set the first and not the second request all.
LEGACY = ("CUDA_VERSION", "NVIDIA_REQUIRE_CUDA")
# The variable that CDI specs set to void, so that no runtime grants the devices a second time; ""
# if programs in containers read it, too.
VOID = "NVIDIA_VISIBLE_DEVICES"
# Variables that limit a container's memory of these devices: the limit and the request, both in
# whole MiB (read by NVIDIA's toolkit 1.20.1 and newer).
MEMORY_VARIABLES = ("NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST")
# A pod's annotations for the same, as quantities: beginning, container's name, one of two endings
# (written by the KAI scheduler).
MEMORY_ANNOTATIONS = ("nvidia.com/container.", ".gpu-memory.limit", ".gpu-memory.request")
# Where a cluster's device plugin mounts /dev/null to request devices.
MOUNTS = "/var/run/nvidia-container-devices"

KIND = "nvidia.com/gpu"  # of CDI devices, and the cluster's resource
# Prefixes of device numbers in the names gpu0 and mig0:1, for a device and for a part.
TYPES = ("gpu", "mig")
# Majors that are the same on every host at every boot, so that CDI specs may contain them.
FIXED_MAJORS = (195,)
# Kinds for devices of the host at the container's start: their names are selectors. The second one
# is that of NVIDIA's device plugin, which the KAI scheduler writes, too.
AUTOMATIC = ("runtime.nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu")
# Words for this vendor in a swarm-resource variable that isn't assigned to a vendor: hex for
# 0x..., plain for all others, "" for none.
SWARM_RESOURCE = "plain"
# Whether the default-kind of config.toml applies to its names in mode cdi.
DEFAULT_KIND = True

PCI_VENDOR = "10de"  # as in /sys/bus/pci/devices/*/vendor, without 0x
DRIVER_WORDS = ("nvidia",)  # in the kernel's names of drivers and their devices

PROGRAM_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
LOST_REMEDY = "Look for Xid 79 in dmesg, reset the GPU or reboot, and use the other GPUs meanwhile"
