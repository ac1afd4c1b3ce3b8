"""Intel GPUs and their virtual functions, with the driver i915 or xe."""
