"""Names of AWS Neuron devices in containers, clusters and the kernel: only data."""

NAME = "neuron"
TITLE = "AWS Neuron"
NOUN = "Neuron device"  # no parts to request: applications select cores
ID_TITLE = "SERIAL"

# Variables for requests -> the id kinds of their names.
VARIABLES = {"AWS_NEURON_VISIBLE_DEVICES": ("index", "serial")}

KIND = "aws.amazon.com/neuron"  # of CDI devices, and the cluster's resource
TYPES = ("neuron", "core")  # before a device's number, as in the name of its node

PCI_VENDOR = "1d0f"  # Amazon's, also of its network cards and disks
DRIVER_WORDS = ("neuron",)  # in the kernel's names of drivers and their devices

PROGRAM_VARIABLES = (
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
)  # with which programs select their devices
LOST_REMEDY = (
    "Look for neuron in dmesg, and load the driver again (modprobe -r neuron; modprobe neuron)"
)
