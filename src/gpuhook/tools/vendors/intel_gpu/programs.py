"""Variables with which programs select among their devices."""

VARIABLES = (
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)
