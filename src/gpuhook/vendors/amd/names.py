"""Names of AMD's accelerators in containers, clusters and the kernel: only data.

``vendors.nvidia.names`` explains each of them.
"""

NAME = "amd"
TITLE = "AMD"
NOUN = "AMD GPU"  # also for a partition
ID_TITLE = "ID"

VARIABLES = {"AMD_VISIBLE_DEVICES": ("index", "id", "bus_id")}
SWARM_RESOURCE = "hex"  # unique ids

KIND = "amd.com/gpu"
TYPES = ("gpu", "partition")
FIXED_MAJORS = (226,)  # the kernel's drm; kfd's is dynamic
PCI_VENDOR = "1002"
DRIVER_WORDS = ("amdgpu", "kfd")

PROGRAM_VARIABLES = (
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)  # with which programs select their devices
LOST_REMEDY = "Look for amdgpu in dmesg, load the driver again or reboot"
