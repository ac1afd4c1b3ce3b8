"""What Ascend's NPUs are called, by containers, clusters and the kernel: data alone."""

NAME = "ascend"  # this folder; also in saved inventories and records
TITLE = "Ascend"
NOUN = "NPU"  # one device, and any device with the parts that can be asked for
ANY_NOUN = "NPU or vNPU"
ID_TITLE = "ID"  # what tells devices apart

# The variable by which a container asks -> the name spaces that its names are looked for in.
VARIABLES = {"ASCEND_VISIBLE_DEVICES": ("index", "name", "bus_id")}
LEGACY = ()  # it has no images from before this variable,
VOID = "ASCEND_VISIBLE_DEVICES"  # what CDI specs set to void
MOUNTS = "/var/run/ascend-container-devices"  # below it, our device plugin asks by mounts
AUTOMATIC = ""  # and no kind whose names are selectors
SWARM_RESOURCE = ""
DEFAULT_KIND = False

KIND = "ascend.com/npu"  # of CDI devices
TYPES = ("npu", "vnpu")  # what a device is called before its number in CDI's names
FIXED_MAJORS = ()  # of nodes, the same on every machine at every boot
PCI_VENDOR = "19e5"  # as /sys/bus/pci/devices/*/vendor has it, without 0x
DRIVER_WORDS = ("devdrv", "davinci")  # in the kernel's names of drivers and their devices

LOST_REMEDY = "Ask for another one; `gpuhook info` lists them with what is wrong"
