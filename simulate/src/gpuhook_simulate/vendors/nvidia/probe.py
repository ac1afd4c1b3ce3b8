"""Build gpuhook-cuda-probe, the small program that counts the CUDA devices it can see."""

import os

from gpuhook_simulate.vendors.nvidia import compiler


def build_cuda_probe(output: str) -> str:
    """Compile the probe to the path ``output`` and return it.

    The program links against libc alone and loads libcuda.so.1 by name when it runs, so it
    can be put into any image with a C library no older than this machine's.
    """
    output = os.path.abspath(output)
    os.makedirs(os.path.dirname(output), exist_ok=True)
    compiler.compile_all([compiler.program(output, "cuda_probe.c")], compiler.SOURCES)
    return output
