"""By which variables programs choose among the devices that they were given."""

VARIABLES = ("CUDA_VISIBLE_DEVICES",)
