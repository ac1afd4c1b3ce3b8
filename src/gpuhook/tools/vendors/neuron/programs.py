"""Variables with which programs select among their devices."""

VARIABLES = (
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
)
