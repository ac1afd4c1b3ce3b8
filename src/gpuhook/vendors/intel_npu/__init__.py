"""Intel NPUs, with the driver intel_vpu."""
