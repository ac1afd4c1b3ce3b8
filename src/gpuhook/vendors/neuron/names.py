"""What AWS Neuron's accelerators are called, by containers, clusters and the kernel: data alone."""

NAME = "neuron"
TITLE = "AWS Neuron"
NOUN = ANY_NOUN = "Neuron device"  # nothing smaller can be asked for: cores are the application's
ID_TITLE = "SERIAL"

# Variables by which a container asks -> the name spaces that its names are looked for in.
VARIABLES = {"AWS_NEURON_VISIBLE_DEVICES": ("index", "serial")}
LEGACY = ()
VOID = "AWS_NEURON_VISIBLE_DEVICES"  # what CDI specs set to void
MOUNTS = "/var/run/neuron-container-devices"  # below it, our device plugin asks by mounts
AUTOMATIC = ""
SWARM_RESOURCE = ""
DEFAULT_KIND = False

KIND = "aws.amazon.com/neuron"  # of CDI devices, and the cluster's resource
TYPES = ("neuron", "core")  # before a device's number, as in the name of its node
FIXED_MAJORS = ()  # the driver has whatever number is free

PCI_VENDOR = "1d0f"  # Amazon's, which its network cards and disks have, too
DRIVER_WORDS = ("neuron",)  # in the kernel's names of drivers and their devices

LOST_REMEDY = (
    "Look for neuron in dmesg, and load the driver again (modprobe -r neuron; modprobe neuron)"
)
