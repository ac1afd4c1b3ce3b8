"""Node labels that describe the devices."""
