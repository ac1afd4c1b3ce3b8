"""A simulated NVIDIA driver: a driver root with simulated GPUs, for tests.

``build(Options(root="/srv/sim", gpus=8))`` builds the tree, ``remove`` deletes it.
docs/engineering/simulated-driver.md describes its contents and the behavior of its libraries.
"""

from gpuhook_simulate.place import remove
from gpuhook_simulate.vendors.nvidia.activity import SimulatedProcess, end_process, run_process
from gpuhook_simulate.vendors.nvidia.build import Built, build
from gpuhook_simulate.vendors.nvidia.change import change, report_xid
from gpuhook_simulate.vendors.nvidia.machine import SimulatedGpu, SimulatedMig
from gpuhook_simulate.vendors.nvidia.options import Failure, Options
from gpuhook_simulate.vendors.nvidia.probe import build_cuda_probe

__all__ = [
    "Built",
    "Failure",
    "Options",
    "SimulatedGpu",
    "SimulatedMig",
    "SimulatedProcess",
    "build",
    "build_cuda_probe",
    "change",
    "end_process",
    "remove",
    "report_xid",
    "run_process",
]
