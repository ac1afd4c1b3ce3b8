"""Changes of a simulated machine while programs use it: lost GPUs, MIG devices, XIDs."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.tree import Tree
from gpuhook_simulate.vendors.nvidia import devices, driver, kernel_files, state
from gpuhook_simulate.vendors.nvidia.machine import (
    SimulatedGpu,
    SimulatedMachine,
    SimulatedMig,
    make_machine,
)
from gpuhook_simulate.vendors.nvidia.tables import generated_header, generated_source

_MOST = 0xFFFFFFFF  # XIDs are counted in 32 bits

Instances = dict[str, tuple[SimulatedGpu, SimulatedMig]]


def change(
    root: str,
    mig: Mapping[int, tuple[str, ...] | None] | None = None,
    lost: frozenset[int] = frozenset(),
    found: frozenset[int] = frozenset(),
) -> SimulatedMachine:
    """Change the machine in ``root``; return the changed machine.

    ``mig`` sets the MIG devices of GPUs (None: disable MIG mode); ``lost`` are the numbers of GPUs
    that no longer answer, ``found`` of those that answer again. Processes see the change at their
    next call, containers when they start. SimulateError if it is invalid.
    """
    with state.locked(root):
        old = state.load(root)
        both = {**old.options.mig, **(mig or {})}
        options = replace(
            old.options,
            root=root,
            mig={index: names for index, names in both.items() if names is not None},
            lost=(old.options.lost | lost) - found,
        )
        _check_found(options.gpus, found)
        options.check()
        new = replace(old, options=options)
        machine = make_machine(options, old.driver_version)
        if machine.loaded:
            _replace_instances(root, make_machine(old.options, old.driver_version), machine)
        state.save(root, new, machine)
        _replace_libraries(root, new, machine)
    return machine


def report_xid(root: str, xid: int, device: str) -> None:
    """Report an XID of a device: a GPU by number or UUID, or a MIG device by UUID.

    Every NVML event set with the GPU receives it. SimulateError if there is no such device.
    """
    if not 0 <= xid <= _MOST:
        raise SimulateError(f"{xid} is not the number of an XID", f"Give 0 to {_MOST}")
    with state.locked(root):
        gpu, mig = state.load_machine(root).device(device)
        words = f"{gpu.index} {xid} {mig.gi} {mig.ci}" if mig else f"{gpu.index} {xid}"
        state.append(root, state.EVENTS, f"{words}\n")


def _check_found(gpus: int, found: frozenset[int]) -> None:
    for index in sorted(found):
        if not 0 <= index < gpus:
            raise SimulateError(f"There is no GPU {index} among {gpus}", "Count the GPUs from 0")


def _instances(machine: SimulatedMachine) -> Instances:
    return {mig.uuid: (gpu, mig) for gpu in machine.gpus for mig in gpu.migs}


def _replace_instances(root: str, old: SimulatedMachine, new: SimulatedMachine) -> None:
    """Remove the nodes and /proc files of former MIG devices, and create those of new ones."""
    before, after = _instances(old), _instances(new)
    tree = Tree(root)
    for gone in before.keys() - after.keys():
        gpu, mig = before[gone]
        shutil.rmtree(tree.path(kernel_files.instance_folder(gpu, mig)), ignore_errors=True)
        for path in devices.instance_nodes(mig):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(tree.path(path))
    added = [after[uuid] for uuid in after if uuid not in before]
    for gpu, mig in added:
        devices.make_instance(tree, mig)
        kernel_files.make_instance(tree, gpu, mig)


def _replace_libraries(root: str, built: state.BuildState, machine: SimulatedMachine) -> None:
    """Compile the new state into the libraries, for containers, which get only the libraries."""
    with tempfile.TemporaryDirectory(dir=os.path.join(root, state.FOLDER), prefix=".new.") as made:
        header = generated_header(machine, built.options.failure, built.library_dir)
        Tree(made).text("generated.h", header)
        Tree(made).text("generated.c", generated_source(machine))
        driver.compile_libraries(made)
        libraries = driver.main_libraries(machine.driver_version, built.library_dir)
        for name, path in libraries.items():
            os.chmod(f"{made}/{name}", 0o644)
            os.replace(f"{made}/{name}", Tree(root).path(path))
