"""The simulated libraries themselves: compiled, loaded, and queried through pynvml.

Device nodes are plain files here, because open() can open them like nodes without root. A node
without hardware returns ENXIO. In a session without a terminal, /dev/tty returns the same
error.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvml_program import LIBRARY_DIR, environment

from gpuhook_simulate.place import MARKER
from gpuhook_simulate.vendors.nvidia import SimulatedProcess, run_process
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine
from gpuhook_simulate.vendors.nvidia.options import Failure

Root = tuple[Path, SimulatedMachine]
MakeRoot = Callable[..., Root]

# Prints everything that NVML reports, or the error.
ASK = Path(__file__).parent / "ask_nvml.py"


def ask(root: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, ASK], env=environment(root), capture_output=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run_program(root: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the root; its libraries are found only by name."""
    argv = [f"{root}/usr/bin/{words[0]}", *words[1:]]
    return subprocess.run(
        argv, env=environment(root, **more), capture_output=True, text=True, check=False
    )


def run_python(root: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python that finds the root's libraries only by name."""
    argv = [sys.executable, "-c", script, *words]
    env = environment(root)
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def indices(answer: dict[str, Any], machine: SimulatedMachine) -> list[int]:
    """Return the indexes of the machine's GPUs that the answer lists."""
    slots = {gpu.uuid: gpu.index for gpu in machine.gpus}
    return [slots[gpu["uuid"]] for gpu in answer["gpus"]]


def test_all_gpu_properties_are_reported_through_nvml(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=4, minors=(3, 1, 0, 2), models=("H200", "T4", "V100", "RTX4090"))
    answer = ask(root)
    assert answer["init"] is None
    assert (answer["driver"], answer["cuda"]) == ("580.65.06", 13000)
    assert (answer["before"], answer["after"]) == ("error 1", "error 1")
    assert (answer["beyond"], answer["nobody"]) == ("error 2", "error 6")
    assert indices(answer, machine) == [0, 1, 2, 3]
    first = answer["gpus"][0]
    assert first["bus"] == ["00000000:1B:00.0", "0000:1B:00.0", 0, 0x1B, "0x233510de"]
    assert (first["memory"], first["memory_v2"]) == (143771 << 20, 143771 << 20)
    assert (first["mig_mode"], first["max_migs"], first["migs"]) == ([0, 0], 7, [])
    assert (first["nvlink"], first["processes"], first["is_mig"]) == ("error 3", [], 0)
    for gpu, expected in zip(answer["gpus"], machine.gpus, strict=True):
        assert gpu["name"] == expected.model.name
        assert gpu["minor"] == expected.minor
        assert gpu["capability"] == list(expected.model.capability)
        assert gpu["brand"] == expected.model.brand
        assert gpu["same"] == [gpu["index"]] * 3 == [expected.index] * 3
    turing, volta, geforce = answer["gpus"][1:]
    assert (turing["mig_mode"], turing["max_migs"]) == ("error 3", 0)
    assert (volta["brand"], volta["fan"], volta["ecc"]) == (2, "error 3", [1, 1])
    assert (geforce["fan"], geforce["ecc"]) == (30, "error 3")


def test_only_reachable_gpus_are_seen_and_counted_from_0(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=4, minors=(3, 1, 0, 2))
    (root / "dev/nvidia1").unlink()
    (root / "dev/nvidia3").unlink()
    answer = ask(root)
    assert indices(answer, machine) == [2, 3]
    assert [gpu["index"] for gpu in answer["gpus"]] == [0, 1]
    assert [gpu["minor"] for gpu in answer["gpus"]] == [0, 2]
    probe = run_program(root, "gpuhook-cuda-probe")
    assert probe.stdout.splitlines() == [
        "CUDA devices: 2",
        f"CUDA device 0: NVIDIA H200 {machine.gpus[2].uuid}",
        f"CUDA device 1: NVIDIA H200 {machine.gpus[3].uuid}",
    ]


def test_a_node_without_hardware_is_reachable(make_root: MakeRoot) -> None:
    root, _ = make_root()
    (root / "dev/nvidia0").unlink()
    (root / "dev/nvidia0").symlink_to("/dev/tty")
    check = "import os\ntry: os.open('/dev/tty', os.O_RDONLY)\nexcept OSError as e: print(e.errno)"
    code = subprocess.run(
        [sys.executable, "-c", check], start_new_session=True, capture_output=True, check=True
    )
    assert code.stdout == b"6\n"  # ENXIO
    done = subprocess.run(
        [f"{root}/usr/bin/nvidia-smi", "-L"],
        env=environment(root),
        start_new_session=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(b"GPU 0: NVIDIA H200 (UUID: GPU-")


def test_a_node_that_may_not_be_opened_is_not_reachable(make_root: MakeRoot) -> None:
    # The kernel refuses open() with EPERM, as it does for a device cgroup.
    root, _ = make_root()
    script = (
        "import ctypes, platform, struct\n"
        "nvml = ctypes.CDLL('libnvidia-ml.so.1')\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "openat = {'x86_64': 257, 'aarch64': 56}[platform.machine()]\n"
        "code = [(0x20, 0, 0, 0), (0x15, 0, 1, openat)]\n"  # load the number, compare it
        "code += [(6, 0, 0, 0x50001), (6, 0, 0, 0x7fff0000)]\n"  # return EPERM, or allow the call
        "program = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *c) for c in code))\n"
        "filter = struct.pack('HxxxxxxQ', len(code), ctypes.addressof(program))\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.prctl(38, 1, 0, 0, 0) == 0\n"  # PR_SET_NO_NEW_PRIVS
        "assert libc.prctl(22, 2, filter, 0, 0) == 0\n"  # PR_SET_SECCOMP, filter
        "print(nvml.nvmlInit_v2(), cuda.cuInit(0))\n"
    )
    done = run_python(root, script)
    assert (done.stdout, done.stderr) == ("999 999\n", "")


def test_missing_gpus_and_missing_driver_give_nvidias_errors(make_root: MakeRoot) -> None:
    root, _ = make_root()
    (root / "dev/nvidia0").unlink()
    assert ask(root)["gpus"] == []
    for words, expected in {
        (): (6, "No devices were found\n"),
        ("-L",): (0, "No devices found.\n"),
        ("--list-gpus",): (0, "No devices found.\n"),
    }.items():
        smi = run_program(root, "nvidia-smi", *words)
        assert (smi.returncode, smi.stdout) == expected
    probe = run_program(root, "gpuhook-cuda-probe")
    assert probe.returncode == 1
    assert probe.stderr == "gpuhook-cuda-probe: cuInit: CUDA_ERROR_NO_DEVICE (100)\n"
    (root / "dev/nvidiactl").unlink()
    assert ask(root)["init"] == "error 9"
    smi = run_program(root, "nvidia-smi")
    assert smi.returncode == 9
    assert "couldn't communicate with the NVIDIA driver" in smi.stdout


def test_cuda_needs_uvm_and_nvml_does_not(make_root: MakeRoot) -> None:
    root, _ = make_root()
    (root / "dev/nvidia-uvm").unlink()
    assert len(ask(root)["gpus"]) == 1
    probe = run_program(root, "gpuhook-cuda-probe")
    assert probe.stderr == "gpuhook-cuda-probe: cuInit: CUDA_ERROR_UNKNOWN (999)\n"


@pytest.mark.parametrize(
    ("failure", "nvml", "cuda", "status"),
    [
        (Failure.NOT_LOADED, "error 9", "CUDA_ERROR_NO_DEVICE (100)", 9),
        (Failure.VERSION_MISMATCH, "error 18", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", 18),
    ],
)
def test_driver_failures_give_nvidias_error_codes(
    make_root: MakeRoot, failure: Failure, nvml: str, cuda: str, status: int
) -> None:
    root, _ = make_root(gpus=2, failure=failure)
    assert ask(root)["init"] == nvml
    assert run_program(root, "gpuhook-cuda-probe").stderr.endswith(f"{cuda}\n")
    smi = run_program(root, "nvidia-smi", "-L")
    assert smi.returncode == status
    if failure is Failure.VERSION_MISMATCH:
        assert smi.stdout == (
            "Failed to initialize NVML: Driver/library version mismatch\n"
            "NVML library version: 580.65.06\n"
        )


def test_a_lost_gpu_gives_an_error_and_other_gpus_stay(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=3, lost=frozenset({1}))
    answer = ask(root)
    assert answer["gpus"][1] == "error 15"
    assert [gpu["index"] for gpu in answer["gpus"] if gpu != "error 15"] == [0, 2]
    smi = run_program(root, "nvidia-smi", "-L")
    assert smi.returncode == 15
    assert smi.stdout.splitlines() == [
        f"GPU 0: NVIDIA H200 (UUID: {machine.gpus[0].uuid})",
        "Unable to determine the device handle for GPU1: GPU is lost",
        f"GPU 2: NVIDIA H200 (UUID: {machine.gpus[2].uuid})",
    ]


def test_init_takes_the_time_asked_for(make_root: MakeRoot) -> None:
    root, _ = make_root(init_seconds=0.25)
    assert 0.25 <= ask(root)["seconds"] < 2


MIG = {0: ("3g.71gb", "1g.18gb+me"), 2: ()}


def test_mig_devices_are_reported_through_nvml(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=3, mig=MIG)
    split, whole, empty = ask(root)["gpus"]
    assert (split["mig_mode"], whole["mig_mode"], empty["mig_mode"]) == ([1, 1], [0, 0], [1, 1])
    assert (split["migs_end"], empty["migs_end"]) == (6, 6)
    assert empty["migs"] == []
    big, small = split["migs"]
    assert big["name"] == "NVIDIA H200 MIG 3g.71gb"
    assert [big["uuid"], small["uuid"]] == [mig.uuid for mig in machine.gpus[0].migs]
    assert (big["gi"], big["ci"], small["gi"]) == (1, 0, 7)
    assert (big["memory"], big["slices"], big["sms"]) == (70912 << 20, 3, 60)
    assert (big["is_mig"], big["parent"], big["by_uuid"], small["by_uuid"]) == (1, 0, 0, 1)
    assert big["profile"] == ["MIG 3g.71gb", 9, 4, 4]
    assert small["profile"] == ["MIG 1g.18gb+me", 20, 0, 1]


def test_only_reachable_mig_devices_are_seen(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=3, mig=MIG)
    first, second = machine.gpus[0].migs
    (root / f"dev/nvidia-caps/nvidia-cap{first.ci_cap}").unlink()
    [left] = ask(root)["gpus"][0]["migs"]
    assert (left["uuid"], left["index"]) == (second.uuid, 0)
    smi = run_program(root, "nvidia-smi", "-L").stdout.splitlines()
    assert smi[1] == f"  MIG 1g.18gb+me  Device  0: (UUID: {second.uuid})"


def test_mig_devices_are_reachable_through_proc_access_files(make_root: MakeRoot) -> None:
    root, machine = make_root(mig={0: ("1g.18gb",)})
    shutil.rmtree(root / "dev/nvidia-caps")
    assert ask(root)["gpus"][0]["migs"] == []
    [mig] = machine.gpus[0].migs
    instance = root / f"proc/driver/nvidia/capabilities/gpu0/mig/gi{mig.gi}"
    (instance / "ci0").mkdir(parents=True)
    (instance / "access").touch()
    (instance / "ci0/access").touch()
    assert [mig["index"] for mig in ask(root)["gpus"][0]["migs"]] == [0]


def test_cuda_sees_one_mig_device_and_no_gpu_beside_it(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=3, mig=MIG)
    first, second = machine.gpus[0].migs
    assert run_program(root, "gpuhook-cuda-probe").stdout.splitlines() == [
        "CUDA devices: 1",
        f"CUDA device 0: NVIDIA H200 MIG 3g.71gb {first.uuid}",
    ]
    (root / f"dev/nvidia-caps/nvidia-cap{first.gi_cap}").unlink()
    assert second.uuid in run_program(root, "gpuhook-cuda-probe").stdout
    shutil.rmtree(root / "dev/nvidia-caps")
    probe = run_program(root, "gpuhook-cuda-probe")
    assert probe.stdout.splitlines() == [
        "CUDA devices: 1",  # GPU 1, because both GPUs in MIG mode have no accessible device
        f"CUDA device 0: NVIDIA H200 {machine.gpus[1].uuid}",
    ]


@pytest.mark.parametrize(
    ("value", "seen"),
    [("1", [1]), ("2,0", [2, 0]), ("0,7,1", [0]), ("", []), ("-1", []), ("GPU-x", []),
     ("{uuid:.12}", [2])],
)  # fmt: skip
def test_cuda_visible_devices_selects_and_orders_gpus(
    make_root: MakeRoot, value: str, seen: list[int]
) -> None:
    root, machine = make_root(gpus=3)
    asked = value.format(uuid=machine.gpus[2].uuid)
    probe = run_program(root, "gpuhook-cuda-probe", CUDA_VISIBLE_DEVICES=asked)
    lines = [line.split()[-1] for line in probe.stdout.splitlines()[1:]]
    assert lines == [machine.gpus[index].uuid for index in seen]
    assert (probe.returncode == 0) == bool(seen)


def test_other_cuda_functions_give_the_expected_values(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=2, models=("A100",))
    script = (
        "import ctypes as c\n"
        "cuda = c.CDLL('libcuda.so.1')\n"
        "value, size, text = c.c_int(), c.c_size_t(), c.create_string_buffer(64)\n"
        "assert cuda.cuDeviceGetCount(c.byref(value)) == 3\n"
        "assert cuda.cuInit(0) == 0 and cuda.cuInit(1) == 1\n"
        "cuda.cuDriverGetVersion(c.byref(value)); print(value.value)\n"
        "cuda.cuDeviceTotalMem_v2(c.byref(size), 1); print(size.value)\n"
        "for number in (75, 76, 33, 16):\n"
        "    cuda.cuDeviceGetAttribute(c.byref(value), number, 1); print(value.value)\n"
        "cuda.cuDeviceGetPCIBusId(text, 64, 1); print(text.value.decode())\n"
        "cuda.cuDeviceGetByPCIBusId(c.byref(value), text); print(value.value)\n"
        "context = c.c_void_p()\n"
        "assert cuda.cuCtxCreate_v2(c.byref(context), 0, 1) == 0\n"
        "cuda.cuCtxGetDevice(c.byref(value)); print(value.value)\n"
        "assert cuda.cuCtxDestroy_v2(context) == 0\n"
        "print(cuda.cuCtxGetDevice(c.byref(value)), cuda.cuDeviceGet(c.byref(value), 2))\n"
        "print(cuda.cuMemAlloc_v2(0, 0))\n"
    )
    done = run_python(root, script)
    assert done.returncode == 0
    memory = str(machine.gpus[1].model.memory << 20)
    assert done.stdout.split("\n")[:-1] == [
        "13000", memory, "8", "0", str(0x43), "108", "0000:43:00.0", "1", "1", "201 101", "1",
    ]  # fmt: skip


def test_a_missing_library_is_reported_by_both_programs(make_root: MakeRoot) -> None:
    root, _ = make_root()
    shutil.rmtree(f"{root}{LIBRARY_DIR}")
    smi = run_program(root, "nvidia-smi", "-L")
    assert smi.returncode == 12
    assert "couldn't find libnvidia-ml.so library" in smi.stdout
    probe = run_program(root, "gpuhook-cuda-probe")
    assert probe.returncode == 1
    assert "libcuda.so.1" in probe.stderr


def test_a_library_outside_a_simulated_root_uses_the_systems_devices(make_root: MakeRoot) -> None:
    # A library in another place, as in a container, must not look into the driver root.
    root, _ = make_root()
    (root / MARKER).unlink()
    if not os.path.exists("/dev/nvidiactl"):
        assert ask(root)["init"] == "error 9"
    moved = root / "lib64"
    shutil.copytree(f"{root}{LIBRARY_DIR}", moved, symlinks=True)
    (root / MARKER).touch()
    shutil.rmtree(f"{root}{LIBRARY_DIR}")
    (root / LIBRARY_DIR.lstrip("/")).symlink_to(moved)
    if not os.path.exists("/dev/nvidiactl"):
        assert ask(root)["init"] == "error 9"


def test_nvidia_smi_prints_a_table_and_versions(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=2, models=("L4",), driver_version="550.54.14")
    table = run_program(root, "nvidia-smi").stdout
    assert "Driver Version: 550.54.14   CUDA Version: 12.4" in table
    assert all(gpu.pci_bus_id in table for gpu in machine.gpus)
    assert "0MiB / 23034MiB" in table
    assert "No running processes found" in table
    run_process(str(root), SimulatedProcess("1", 4_000_000, 300 << 20, kind="mps"))
    lines = run_program(root, "nvidia-smi").stdout.splitlines()
    assert "300MiB / 23034MiB" in lines[-8]
    assert lines[-2].split() == ["|", "1", "4000000", "M+C", "[Not", "Found]", "300MiB", "|"]
    assert {len(line) for line in lines if line} == {68}
    versions = run_program(root, "nvidia-smi", "--version").stdout
    assert "NVML version        : 12.550.54.14\n" in versions
    assert run_program(root, "nvidia-smi", "--frobnicate").returncode == 2


@pytest.mark.parametrize(
    ("version", "lacking"),
    [
        ("580.65.06", ["nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceSetMemoryLimits_v1"]),
        ("615.10.01", []),
    ],
)
def test_every_function_used_by_pynvml_exists(
    make_root: MakeRoot, version: str, lacking: list[str]
) -> None:
    import ctypes  # noqa: PLC0415 - for this test alone
    import inspect  # noqa: PLC0415
    import re  # noqa: PLC0415

    import pynvml  # noqa: PLC0415

    root, machine = make_root(driver_version=version)
    library = ctypes.CDLL(f"{root}{LIBRARY_DIR}/libnvidia-ml.so.{machine.driver_version}")
    source = inspect.getsource(pynvml)  # not read by its path, because pynvml may be in a wheel
    names = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
    assert len(names) > 200
    assert [name for name in sorted(names) if not hasattr(library, name)] == lacking
    assert library.nvmlDeviceValidateInforom(None) == 1  # uninitialized


def test_no_function_crashes_on_null_arguments(make_root: MakeRoot) -> None:
    root, machine = make_root(mig={0: ("1g.18gb",)})
    script = (
        "import ctypes as c, sys\n"
        "nvml, cuda = c.CDLL('libnvidia-ml.so.1'), c.CDLL('libcuda.so.1')\n"
        "gpu, mig, none = c.c_void_p(), c.c_void_p(), [None] * 5\n"
        "assert nvml.nvmlInit_v2() == 0 == cuda.cuInit(0)\n"
        "assert nvml.nvmlDeviceGetHandleByIndex_v2(0, c.byref(gpu)) == 0\n"
        "assert nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0, c.byref(mig)) == 0\n"
        "for name in sys.argv[1:]:\n"
        "    if name.startswith('cu'):\n"
        "        getattr(cuda, name)(None, *none)\n"
        "    elif name != 'nvmlShutdown':\n"
        "        getattr(nvml, name)(None, *none)\n"
        "        if 'Device' in name and 'Count' not in name:\n"
        "            getattr(nvml, name)(gpu, *none)\n"
        "            getattr(nvml, name)(mig, *none)\n"
        "print('alive')\n"
    )
    names = []
    for library in ("libnvidia-ml", "libcuda"):
        path = f"{root}{LIBRARY_DIR}/{library}.so.{machine.driver_version}"
        table = subprocess.run(
            ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
        )
        names += [line.split()[-1] for line in table.stdout.splitlines()]
    assert len(names) > 450
    done = run_python(root, script, *names)
    assert (done.returncode, done.stdout) == (0, "alive\n")
