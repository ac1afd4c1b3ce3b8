"""Names of Intel GPUs in containers, clusters and the kernel: only data."""

NAME = "intel_gpu"  # this folder; also in saved inventories and records
TITLE = "Intel"
NOUN = "GPU"  # one device; below, any device, including parts that can be requested
ANY_NOUN = "GPU or virtual function"
ID_TITLE = "CARD"  # of the unique id

# The variable for requests -> the id kinds of its names.
# Intel has none of its own.
VARIABLES = {"INTEL_VISIBLE_DEVICES": ("index", "card", "uid", "vf", "bus_id")}

KIND = "intel.com/gpu"  # of CDI devices
TYPES = ("gpu", "vf")  # prefixes of device numbers in CDI names
FIXED_MAJORS = (226,)  # of nodes, the same on every host at every boot: DRM's
DRIVER_WORDS = ("i915", "xe")  # in the kernel's names of drivers and their devices

PROGRAM_VARIABLES = (
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)  # with which programs select their devices
LOST_REMEDY = "Request another one; `gpuhook info` lists them with their errors"
