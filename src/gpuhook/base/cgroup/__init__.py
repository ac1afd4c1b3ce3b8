"""Device access, in the OCI spec and in cgroups v1 and v2."""
