"""By which variables programs choose among the devices that they were given."""

VARIABLES = (
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)
