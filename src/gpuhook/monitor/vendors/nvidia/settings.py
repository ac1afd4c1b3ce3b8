"""Compute mode and time slice of GPUs: NVML sets the first, only nvidia-smi the second.

The options and the table of ``nvidia-smi compute-policy`` are those of driver 535.
"""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, printable
from gpuhook.monitor.host import driver_program
from gpuhook.monitor.vendor_parts import UnchangedSetting
from gpuhook.vendors.nvidia import nvml
from gpuhook.vendors.nvidia.discover import library
from gpuhook.vendors.nvidia.model import NvidiaInventory

MODE = "compute-mode"
READABLE = (MODE,)
SLICE = "time-slice"
SLICES = ("Default", "Short", "Medium", "Long")
# nvmlComputeMode_t in nvml.h, as nvidia-smi prints it.
_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
_PROHIBITED = 2
_TITLES = {MODE: "compute mode", SLICE: "time slice"}
_SMI = "nvidia-smi"
_COMMAND = "compute-policy"
_NAME = "timeslice"  # the policy's name in the table
_PATIENCE = 10.0  # seconds for the program
_SHOWN = 200  # characters of its output in a message
_ROOT = "0"  # the user that queries NVML
_REMEDY = "Check first that nvidia-smi can set it on the host"

Values = Mapping[str, int]


def title(name: str) -> str:
    """Return a setting's name in sentences."""
    return _TITLES.get(name, name)


def shown(name: str, value: int) -> str:
    """Return a value as nvidia-smi prints it."""
    words = {MODE: _MODES, SLICE: SLICES}.get(name, ())
    return words[value] if 0 <= value < len(words) else str(value)


def refusal(name: str, value: int) -> str:
    """Return why a claim may not change a setting that has this value; "" if it may."""
    if (name, value) == (MODE, _PROHIBITED):  # protects: mode-prohibited
        return "the administrator has prohibited computing on it"
    return ""


def read(
    config: Config, inventory: NvidiaInventory, wanted: Mapping[str, Values]
) -> dict[str, dict[str, int]]:
    """Return the current values that can be read; DriverError if NVML can't be queried."""
    found: dict[str, dict[str, int]] = {device: {} for device in wanted}
    with_mode = [device for device, values in wanted.items() if MODE in values]
    if with_mode:
        for device, mode in _modes(config, inventory, with_mode).items():
            found[device][MODE] = mode
    program = find_program(inventory)
    for device, values in wanted.items():
        if program is not None and SLICE in values:
            done = _run(inventory, program, "-i", device, "--list")
            number = parse(done.stdout.decode(errors="replace"))
            if not done.returncode and number is not None:
                found[device][SLICE] = number
    return found


def write(
    config: Config, inventory: NvidiaInventory, wanted: Mapping[str, Values]
) -> Sequence[UnchangedSetting]:
    """Change all settings that can be changed; return the others.

    DriverError if the driver can't be queried.
    """
    modes = {device: values[MODE] for device, values in wanted.items() if MODE in values}
    slices = {device: values[SLICE] for device, values in wanted.items() if SLICE in values}
    failures = _set_modes(config, inventory, modes) if modes else []
    program = find_program(inventory) if slices else None
    for device, number in slices.items():
        refused = _set_slice(inventory, program, device, number)
        if refused:  # protects: dra-slice-refused
            remedy = "GPUs before Volta have no such setting"
            failures.append(UnchangedSetting(device, SLICE, refused, remedy, final=True))
    return failures


# The compute mode ---------------------------------------------------------------------------------


def _modes(config: Config, inventory: NvidiaInventory, devices: Sequence[str]) -> dict[str, int]:
    """Return the compute modes of the GPUs that answer, by UUID."""

    def question(pynvml: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for device in devices:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(device.encode())
                found[device] = pynvml.nvmlDeviceGetComputeMode(handle)
            except pynvml.NVMLError:
                continue
        return found

    return nvml.query(inventory.root, library(config), _ROOT, config.nvml_timeout, question)


def _set_modes(
    config: Config, inventory: NvidiaInventory, modes: Mapping[str, int]
) -> list[UnchangedSetting]:
    """Set compute modes by UUID.

    A GPU in the right mode is left unchanged: some refuse every mode, even their current one.
    """

    def question(pynvml: Any) -> dict[str, Any]:
        failures: dict[str, Any] = {}
        for device, mode in modes.items():
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(device.encode())
                # protects: mps-mode-there
                if pynvml.nvmlDeviceGetComputeMode(handle) != mode:
                    pynvml.nvmlDeviceSetComputeMode(handle, mode)
            except pynvml.NVMLError as error:  # protects: mps-each-mode
                lost = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NOT_FOUND)
                failures[device] = [str(error), error.value in lost]
        return failures

    found = nvml.query(inventory.root, library(config), _ROOT, config.nvml_timeout, question)
    return [
        UnchangedSetting(
            device, MODE, f"NVML can't set the compute mode of {device}: {why}", _REMEDY, lost
        )
        for device, (why, lost) in found.items()
    ]


# The time slice -----------------------------------------------------------------------------------


def find_program(inventory: NvidiaInventory) -> str | None:
    """Return the path of the program that sets time slices; None if the driver has none."""
    return driver_program.find(inventory, _SMI)


def check_program(inventory: NvidiaInventory) -> None:
    """Raise DriverError if the program that sets time slices is missing or can't be run."""
    program = find_program(inventory)
    if program is None:
        raise _no_program(inventory)
    driver_program.root_of(inventory.root, program)


def _no_program(inventory: NvidiaInventory) -> DriverError:
    return DriverError(
        f"The driver below {inventory.root} has no {_SMI}, which sets time slices",
        "Install the driver's package that has it",
    )


def parse(table: str) -> int | None:
    """Return the time slice in a table of compute policies for one GPU; None for none."""
    for line in table.split("\n"):
        words = [word for word in line.strip("| ").split(" ") if word]  # GPU, name, value
        if len(words) == 3 and words[1].lower() == _NAME and words[2].title() in SLICES:
            return SLICES.index(words[2].title())
    return None


def _set_slice(inventory: NvidiaInventory, program: str | None, device: str, number: int) -> str:
    """Set the length of a GPU's time slice; return why that failed, "" if it is set."""
    if program is None:
        return _no_program(inventory).cause
    done = _run(inventory, program, "-i", device, f"--set-timeslice={number}")
    said = printable((done.stdout + done.stderr).decode(errors="replace").strip())[:_SHOWN]
    return f"{_SMI} can't set the time slice of {device}: {said}" if done.returncode else ""


def _run(
    inventory: NvidiaInventory, program: str, *words: str
) -> "subprocess.CompletedProcess[bytes]":
    """Run nvidia-smi; DriverError if it doesn't end in time."""
    root = inventory.root.rstrip("/")
    cuda = next((each.path for each in inventory.files if "/libcuda.so." in each.path), "")
    libraries = root + cuda.rpartition("/")[0] if root and cuda else ""
    try:
        return driver_program.run(inventory.root, program, [_COMMAND, *words], libraries, _PATIENCE)
    except subprocess.TimeoutExpired:
        raise DriverError(
            f"{_SMI} didn't answer within {_PATIENCE:g} seconds", "Look at the kernel's log"
        ) from None
