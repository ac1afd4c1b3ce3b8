"""By which variables programs choose among the devices that they were given."""

VARIABLES = (
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)
