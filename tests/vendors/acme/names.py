"""Names of ACME's accelerators, for containers, clusters and the kernel: only data."""

NAME = "acme"  # this folder; also in saved inventories and records
TITLE = "ACME"
NOUN = "NPU"  # one device, and any device with the parts that can be asked for
ANY_NOUN = "NPU or part of one"
ID_TITLE = "SERIAL"  # what tells devices apart

# Variables by which a container asks, the first that is set decides -> the name spaces that its
# names are looked for in.
VARIABLES = {
    "ACME_VISIBLE_DEVICES": ("index", "part", "serial", "bus_id", "board"),
    "ACME_VISIBLE_BOARDS": ("board",),
}

KIND = "acme.example/npu"  # of CDI devices, and the cluster's resource
# What a device is called before its number in CDI's names npu0 and part1.0, and a part of one.
TYPES = ("npu", "part")
PCI_VENDOR = "ac3e"  # as /sys/bus/pci/devices/*/vendor has it, without 0x
DRIVER_WORDS = ("acme",)  # in the kernel's names of drivers and their devices

LOST_REMEDY = "Wait until its reset is over, or use the other NPUs meanwhile"
