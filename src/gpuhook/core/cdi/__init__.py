"""CDI: device names, CDI specs, and the folders that hold them."""
