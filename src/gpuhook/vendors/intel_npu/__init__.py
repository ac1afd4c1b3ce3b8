"""Intel's NPUs, with the driver intel_vpu."""
