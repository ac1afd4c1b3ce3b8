"""Names of Intel Gaudi devices in containers, clusters and the kernel: only data."""

NAME = "gaudi"
TITLE = "Intel Gaudi"
NOUN = "Gaudi"  # there are no parts to request
ID_TITLE = "BUS ID"

# Variables for requests -> the id kinds of their names. The first one that doesn't say all
# decides. A module is a seat on the board.
VARIABLES = {
    "HABANA_VISIBLE_DEVICES": ("index", "bus_id"),
    "HABANA_VISIBLE_MODULES": ("module",),
    "HABANA_VISIBLE_PCI_BUS_IDS": ("bus_id",),
}

KIND = "habana.ai/gaudi"  # of CDI devices, and the cluster's resource
TYPES = ("accel", "part")  # before a device's number, as in the name of its node

PCI_VENDOR = "1da3"  # as in /sys/bus/pci/devices/*/vendor, without 0x
DRIVER_WORDS = ("habanalabs", "accel", "hbl_")  # in the kernel's names of drivers and devices

LOST_REMEDY = "Wait until its reset is over, look for habanalabs in dmesg, or use the others"
