"""A simulated NVIDIA driver: a driver root with GPUs that don't exist, for tests.

``build(Options(root="/srv/sim", gpus=8))`` makes the tree, ``remove`` deletes it; see
docs/simulate.md for what the tree holds and how its libraries behave.
"""

from gpuhook.tools.simulate.place import remove
from gpuhook.tools.vendors.nvidia.simulate.activity import Process, end_process, run_process
from gpuhook.tools.vendors.nvidia.simulate.build import Built, build
from gpuhook.tools.vendors.nvidia.simulate.change import change, report_xid
from gpuhook.tools.vendors.nvidia.simulate.machine import SimulatedGpu, SimulatedMig
from gpuhook.tools.vendors.nvidia.simulate.options import Failure, Options
from gpuhook.tools.vendors.nvidia.simulate.probe import build_cuda_probe

__all__ = [
    "Built",
    "Failure",
    "Options",
    "Process",
    "SimulatedGpu",
    "SimulatedMig",
    "build",
    "build_cuda_probe",
    "change",
    "end_process",
    "remove",
    "report_xid",
    "run_process",
]
