"""Building of gpuhook-cuda-probe, a small program that counts its visible CUDA devices."""

import os

from gpuhook_simulate.vendors.nvidia import compiler


def build_cuda_probe(output: str) -> str:
    """Compile the probe to the path ``output`` and return it.

    The program links only against libc and loads libcuda.so.1 by name when it runs, so it
    works in any image with a C library no older than this host's.
    """
    output = os.path.abspath(output)
    os.makedirs(os.path.dirname(output), exist_ok=True)
    compiler.compile_all([compiler.program(output, "cuda_probe.c")], compiler.SOURCES)
    return output
