"""By which variables programs choose among the devices that they were given."""

VARIABLES = (
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
)
