"""Names of Intel NPUs in containers, clusters and the kernel: only data."""

NAME = "intel_npu"  # this folder; also in saved inventories and records
TITLE = "Intel NPU"
NOUN = "NPU"  # one device; below, any device, including parts that can be requested
ID_TITLE = "NODE"  # of the unique id

# The variable for requests -> the id kinds of its names.
# Intel has none of its own.
VARIABLES = {"INTEL_VISIBLE_NPUS": ("index", "name", "bus_id")}

KIND = "intel.com/npu"  # of CDI devices
TYPES = ("npu", "part")  # prefixes of device numbers in CDI names
FIXED_MAJORS = (261,)  # of nodes, the same on every host at every boot: accel's
DRIVER_WORDS = ("intel_vpu",)  # in the kernel's names of drivers and their devices

LOST_REMEDY = "Request another one; `gpuhook info` lists them with their errors"
