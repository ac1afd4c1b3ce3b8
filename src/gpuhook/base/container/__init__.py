"""Access to a container that is being created: the kernel, a confined root, mounts."""
