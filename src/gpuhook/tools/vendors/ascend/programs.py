"""Variables with which programs select among their devices."""

VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES",)
