"""What Intel Gaudis are called, by containers, clusters and the kernel: data alone."""

NAME = "gaudi"
TITLE = "Intel Gaudi"
NOUN = ANY_NOUN = "Gaudi"  # nothing smaller can be asked for
ID_TITLE = "BUS ID"

# Variables by which a container asks, the first that doesn't say all decides -> the name spaces
# that its names are looked for in. A module is a seat on the board.
VARIABLES = {
    "HABANA_VISIBLE_DEVICES": ("index", "bus_id"),
    "HABANA_VISIBLE_MODULES": ("module",),
    "HABANA_VISIBLE_PCI_BUS_IDS": ("bus_id",),
}
LEGACY = ()
VOID = "HABANA_VISIBLE_DEVICES"  # what CDI specs set to void
MOUNTS = "/var/run/gaudi-container-devices"  # below it, our device plugin asks by mounts
AUTOMATIC = ""
SWARM_RESOURCE = ""
DEFAULT_KIND = False

KIND = "habana.ai/gaudi"  # of CDI devices, and the cluster's resource
TYPES = ("accel", "part")  # before a device's number, as in the name of its node
FIXED_MAJORS = ()  # accel's is, RDMA's isn't

PCI_VENDOR = "1da3"  # as /sys/bus/pci/devices/*/vendor has it, without 0x
DRIVER_WORDS = ("habanalabs", "accel", "hbl_")  # in the kernel's names of drivers and devices

LOST_REMEDY = "Wait until its reset is over, look for habanalabs in dmesg, or use the others"
