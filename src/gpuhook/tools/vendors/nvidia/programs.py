"""Variables with which programs select among their devices."""

VARIABLES = ("CUDA_VISIBLE_DEVICES",)
