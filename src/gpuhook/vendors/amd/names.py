"""What AMD's accelerators are called, by containers, clusters and the kernel: data alone.

``vendors.nvidia.names`` says what each is for.
"""

NAME = "amd"
TITLE = "AMD"
NOUN = "AMD GPU"  # a partition is one, too
ANY_NOUN = "AMD GPU"
ID_TITLE = "ID"

VARIABLES = {"AMD_VISIBLE_DEVICES": ("index", "id", "bus_id")}
LEGACY = ()
VOID = "AMD_VISIBLE_DEVICES"  # what CDI specs set to void
MOUNTS = "/var/run/amd-container-devices"  # below it, our device plugin asks by mounts
AUTOMATIC = ""
SWARM_RESOURCE = "hex"  # unique ids
DEFAULT_KIND = False

KIND = "amd.com/gpu"
TYPES = ("gpu", "partition")
FIXED_MAJORS = (226,)  # the kernel's drm; kfd has whatever was free
PCI_VENDOR = "1002"
DRIVER_WORDS = ("amdgpu", "kfd")

LOST_REMEDY = "Look for amdgpu in dmesg, load the driver again or reboot"
