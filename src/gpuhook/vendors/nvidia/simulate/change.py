"""Change a simulated machine while programs use it: lost GPUs, MIG devices, XIDs."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpuhook.errors import SimulateError, shown
from gpuhook.simulate.tree import Tree
from gpuhook.vendors.nvidia.simulate import devices, driver, kernel_files, state
from gpuhook.vendors.nvidia.simulate.machine import (
    Machine,
    SimulatedGpu,
    SimulatedMig,
    make_machine,
)
from gpuhook.vendors.nvidia.simulate.tables import generated_header, generated_source

_MOST = 0xFFFFFFFF  # XIDs are counted in 32 bits

Instances = dict[str, tuple[SimulatedGpu, SimulatedMig]]


def change(
    root: str,
    mig: Mapping[int, tuple[str, ...] | None] | None = None,
    lost: frozenset[int] = frozenset(),
    found: frozenset[int] = frozenset(),
) -> list[str]:
    """Change the machine in ``root`` and return lines that say how it is then.

    ``mig`` gives GPUs other MIG devices (None: no MIG mode any more); ``lost`` are the numbers of
    GPUs that don't answer any more, ``found`` of those that do again. Processes see it at their
    next call, containers when they are started. SimulateError if it makes no sense.
    """
    with _locked(root):
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
    return [line for gpu in machine.gpus for line in _lines(gpu)]


def report_xid(root: str, xid: int, device: str) -> None:
    """Let an XID happen to a device: a GPU by number or UUID, or a MIG device by UUID.

    Every NVML event set that the GPU is registered in gets it. SimulateError if there is no such
    device.
    """
    if not 0 <= xid <= _MOST:
        raise SimulateError(f"{xid} is not the number of an XID", f"Give 0 to {_MOST}")
    with _locked(root):
        built = state.load(root)
        machine = make_machine(built.options, built.driver_version)
        append(root, state.EVENTS, f"{_event(machine, xid, device)}\n")


def append(root: str, name: str, line: str) -> None:
    """Add a line to a file of the state folder, in one write."""
    path = os.path.join(root, state.FOLDER, name)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def _event(machine: Machine, xid: int, device: str) -> str:
    for gpu in machine.gpus:
        if device in {str(gpu.index), gpu.uuid}:
            return f"{gpu.index} {xid}"
        for mig in gpu.migs:
            if device == mig.uuid:
                return f"{gpu.index} {xid} {mig.gi} {mig.ci}"
    raise SimulateError(
        f"The simulated machine has no device {shown(device)}",
        "Give a GPU's number or UUID, or a MIG device's UUID, as gpuhook simulate printed it",
    )


def _check_found(gpus: int, found: frozenset[int]) -> None:
    for index in sorted(found):
        if not 0 <= index < gpus:
            raise SimulateError(f"There is no GPU {index} among {gpus}", "Count the GPUs from 0")


@contextlib.contextmanager
def _locked(root: str) -> Iterator[None]:
    """Keep other changes of this machine away."""
    try:
        fd = os.open(os.path.join(root, state.FOLDER), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        state.load(root)  # says it
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _lines(gpu: SimulatedGpu) -> list[str]:
    words = " (lost)" if gpu.lost else ""
    mode = " (MIG)" if gpu.mig_enabled else ""
    line = f"GPU {gpu.index}: {gpu.model.name} {gpu.uuid}{mode}{words}"
    return [line, *(f"  MIG {mig.profile.name} {mig.uuid}" for mig in gpu.migs)]


def _instances(machine: Machine) -> Instances:
    return {mig.uuid: (gpu, mig) for gpu in machine.gpus for mig in gpu.migs}


def _replace_instances(root: str, old: Machine, new: Machine) -> None:
    """Take away nodes and files in /proc of MIG devices that are no more, and make new ones'."""
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


def _replace_libraries(root: str, built: state.State, machine: Machine) -> None:
    """Compile the new state into the libraries, for containers, where they come alone."""
    with tempfile.TemporaryDirectory(dir=os.path.join(root, state.FOLDER), prefix=".new.") as made:
        header = generated_header(machine, built.options.failure, built.library_dir)
        Tree(made).text("generated.h", header)
        Tree(made).text("generated.c", generated_source(machine))
        driver.compile_libraries(made)
        libraries = driver.main_libraries(machine.driver_version, built.library_dir)
        for name, path in libraries.items():
            os.chmod(f"{made}/{name}", 0o644)
            os.replace(f"{made}/{name}", Tree(root).path(path))
