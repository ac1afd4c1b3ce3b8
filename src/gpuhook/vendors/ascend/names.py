"""Names of Ascend NPUs in containers, clusters and the kernel: only data."""

NAME = "ascend"  # this folder; also in saved inventories and records
TITLE = "Ascend"
NOUN = "NPU"  # one device; below, any device, including parts that can be requested
ANY_NOUN = "NPU or vNPU"
ID_TITLE = "ID"  # of the unique id

# The variable for requests -> the id kinds of its names.
VARIABLES = {"ASCEND_VISIBLE_DEVICES": ("index", "name", "bus_id")}
LEGACY = ()  # no images predate this variable
VOID = "ASCEND_VISIBLE_DEVICES"  # which CDI specs set to void
MOUNTS = "/var/run/ascend-container-devices"  # our device plugin's mounts below it are requests
AUTOMATIC = ""  # no kind whose names are selectors
SWARM_RESOURCE = ""
DEFAULT_KIND = False

KIND = "ascend.com/npu"  # of CDI devices
TYPES = ("npu", "vnpu")  # prefixes of device numbers in CDI names
FIXED_MAJORS = ()  # of nodes, the same on every host at every boot
PCI_VENDOR = "19e5"  # as in /sys/bus/pci/devices/*/vendor, without 0x
DRIVER_WORDS = ("devdrv", "davinci")  # in the kernel's names of drivers and their devices

LOST_REMEDY = "Request another one; `gpuhook info` lists them with their errors"
