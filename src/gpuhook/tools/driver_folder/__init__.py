"""The driver's files in one folder, for containers whose runtime knows nothing of GPUs.

Mounted read-only where CUDA images look for programs and libraries, it gives a container the driver
as nvidia-docker 1's driver volume did. The folder has one path, whatever the driver's version,
because a cluster remembers that path for as long as a pod lives.

What belongs in it a vendor says (``parts.DriverFolder``, today NVIDIA alone); ``keep`` makes it so,
``place`` puts it there in one step.
"""
