"""What Intel's GPUs are called, by containers, clusters and the kernel: data alone."""

NAME = "intel_gpu"  # this folder; also in saved inventories and records
TITLE = "Intel"
NOUN = "GPU"  # one device, and any device with the parts that can be asked for
ANY_NOUN = "GPU or virtual function"
ID_TITLE = "CARD"  # what tells devices apart

# The variable by which a container asks -> the name spaces that its names are looked for in.
# Intel has none of its own.
VARIABLES = {"INTEL_VISIBLE_DEVICES": ("index", "card", "uid", "vf", "bus_id")}
LEGACY = ()  # it has no images from before this variable,
VOID = "INTEL_VISIBLE_DEVICES"  # what CDI specs set to void
MOUNTS = "/var/run/intel_gpu-container-devices"  # below it, our device plugin asks by mounts
AUTOMATIC = ""  # and no kind whose names are selectors
SWARM_RESOURCE = ""
DEFAULT_KIND = False

KIND = "intel.com/gpu"  # of CDI devices
TYPES = ("gpu", "vf")  # what a device is called before its number in CDI's names
FIXED_MAJORS = (226,)  # of nodes, the same on every machine at every boot: DRM's
PCI_VENDOR = ""  # events of Intel's devices are mostly of network cards and disks
DRIVER_WORDS = ("i915", "xe")  # in the kernel's names of drivers and their devices

LOST_REMEDY = "Ask for another one; `gpuhook info` lists them with what is wrong"
