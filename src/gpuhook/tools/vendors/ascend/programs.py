"""By which variables programs choose among the devices that they were given."""

VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES",)
