"""The driver's files in one folder, for containers whose runtime knows nothing of GPUs.

Mounted read-only at ``content.INSIDE`` it gives a container the driver as nvidia-docker 1's
driver volume did: CUDA images look for programs and libraries there. The folder has one path,
whatever the driver's version, because a cluster remembers that path for as long as a pod lives.

``content`` says what belongs in it, ``keep`` makes it so, ``place`` puts it there in one step.
"""
