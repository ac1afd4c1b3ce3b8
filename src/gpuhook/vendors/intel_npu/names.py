"""What Intel's NPUs are called, by containers, clusters and the kernel: data alone."""

NAME = "intel_npu"  # this folder; also in saved inventories and records
TITLE = "Intel NPU"
NOUN = "NPU"  # one device, and any device with the parts that can be asked for
ANY_NOUN = "NPU"
ID_TITLE = "NODE"  # what tells devices apart

# The variable by which a container asks -> the name spaces that its names are looked for in.
# Intel has none of its own.
VARIABLES = {"INTEL_VISIBLE_NPUS": ("index", "name", "bus_id")}
LEGACY = ()  # it has no images from before this variable,
VOID = "INTEL_VISIBLE_NPUS"  # what CDI specs set to void
MOUNTS = "/var/run/intel_npu-container-devices"  # below it, our device plugin asks by mounts
AUTOMATIC = ""  # and no kind whose names are selectors
SWARM_RESOURCE = ""
DEFAULT_KIND = False

KIND = "intel.com/npu"  # of CDI devices
TYPES = ("npu", "part")  # what a device is called before its number in CDI's names
FIXED_MAJORS = (261,)  # of nodes, the same on every machine at every boot: accel's
PCI_VENDOR = ""  # events of Intel's devices are mostly of network cards and disks
DRIVER_WORDS = ("intel_vpu",)  # in the kernel's names of drivers and their devices

LOST_REMEDY = "Ask for another one; `gpuhook info` lists them with what is wrong"
