"""Names of Ascend NPUs in containers, clusters and the kernel: only data."""

NAME = "ascend"  # this folder; also in saved inventories and records
TITLE = "Ascend"
NOUN = "NPU"  # one device; below, any device, including parts that can be requested
ANY_NOUN = "NPU or vNPU"
ID_TITLE = "ID"  # of the unique id

# The variable for requests -> the id kinds of its names.
VARIABLES = {"ASCEND_VISIBLE_DEVICES": ("index", "name", "bus_id")}

KIND = "ascend.com/npu"  # of CDI devices
TYPES = ("npu", "vnpu")  # prefixes of device numbers in CDI names
PCI_VENDOR = "19e5"  # as in /sys/bus/pci/devices/*/vendor, without 0x
DRIVER_WORDS = ("devdrv", "davinci")  # in the kernel's names of drivers and their devices

PROGRAM_VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES",)
LOST_REMEDY = "Request another one; `gpuhook info` lists them with their errors"
