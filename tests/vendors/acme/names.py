"""Names of ACME's accelerators, for containers, clusters and the kernel: only data."""

NAME = "acme"  # the folder's name; also in saved inventories and records
TITLE = "ACME"
NOUN = "NPU"  # noun for one device; ANY_NOUN also covers parts that can be requested
ANY_NOUN = "NPU or part of one"
ID_TITLE = "SERIAL"  # title of the id that distinguishes devices

# Variables that request devices (the first one that is set decides) -> the name spaces in which
# their values are looked up.
VARIABLES = {
    "ACME_VISIBLE_DEVICES": ("index", "part", "serial", "bus_id", "board"),
    "ACME_VISIBLE_BOARDS": ("board",),
}

KIND = "acme.example/npu"  # kind of CDI devices, and name of the cluster's resource
# Prefixes of CDI device names, for a device (npu0) and for a part of one (part1.0).
TYPES = ("npu", "part")
PCI_VENDOR = "ac3e"  # as in /sys/bus/pci/devices/*/vendor, without 0x
DRIVER_WORDS = ("acme",)  # words in the kernel's names of this vendor's drivers and devices

LOST_REMEDY = "Wait until its reset is over, or use the other NPUs meanwhile"
