"""The driver's files in one folder, for containers whose runtime has no GPU support.

Mounted read-only where CUDA images look for programs and libraries, it provides the driver, like
the driver volume of nvidia-docker 1. The folder's path doesn't depend on the driver's version,
because a cluster stores that path for the lifetime of a pod.

A vendor defines the content (``parts.DriverFolder``, currently only NVIDIA). ``keep`` creates the
folder, and ``place`` installs it atomically.
"""
