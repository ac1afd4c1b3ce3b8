"""Access to devices, by the OCI spec and by cgroups of both versions."""
