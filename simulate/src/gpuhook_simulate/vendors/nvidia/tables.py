"""The C tables that are compiled into the simulated libraries."""

from gpuhook_simulate.place import MARKER
from gpuhook_simulate.vendors.nvidia import state
from gpuhook_simulate.vendors.nvidia.machine import SimulatedGpu, SimulatedMachine
from gpuhook_simulate.vendors.nvidia.models import MigProfile, Model
from gpuhook_simulate.vendors.nvidia.options import NVLINKS, Failure

# The first branches with memory limits by cgroup, GPU performance monitoring and recovery actions.
_MEMORY_LIMITS_BRANCH = 615
_GPM_BRANCH = 520
_RECOVERY_BRANCH = 570

_STATES = {
    Failure.NOT_LOADED: "SIM_FAIL_NOT_LOADED",
    Failure.VERSION_MISMATCH: "SIM_FAIL_VERSION_MISMATCH",
}


def generated_header(
    machine: SimulatedMachine, failure: Failure | None, library_dir: str, only_node: str = ""
) -> str:
    """Return the text of generated.h; ``library_dir`` is the folder below the driver root.

    ``only_node`` is the node of a platform with only one node, and no minors.
    """
    version = machine.driver_version
    branch = int(version.partition(".")[0])
    failed = "SIM_FAIL_NONE" if failure is None else _STATES[failure]
    return (
        f"#define SIM_DRIVER_VERSION {_text(version)}\n"
        f"#define SIM_NVML_VERSION {_text(f'{machine.cuda // 1000}.{version}')}\n"
        f"#define SIM_DRIVER_BRANCH {_text('r' + version.rpartition('.')[0].replace('.', '_'))}\n"
        f"#define SIM_LIMITS {int(branch >= _MEMORY_LIMITS_BRANCH)}\n"
        f"#define SIM_GPM {int(branch >= _GPM_BRANCH)}\n"
        f"#define SIM_RECOVERY {int(branch >= _RECOVERY_BRANCH)}\n"
        f"#define SIM_CUDA_VERSION {machine.cuda}\n"
        f"#define SIM_LIBRARY_DIR {_text(library_dir)}\n"
        f"#define SIM_MARKER {_text(MARKER)}\n"
        f"#define SIM_INIT_NANOSECONDS {round(machine.init_seconds * 1e9)}LL\n"
        f"#define SIM_FAILURE {failed}\n"
        f"#define SIM_GPU_COUNT {len(machine.gpus)}\n"
        f"#define SIM_CONTROL_NODE {_text(only_node or '/dev/nvidiactl')}\n"
        f"#define SIM_UVM_NODE {_text(only_node or '/dev/nvidia-uvm')}\n"
        f"#define SIM_ONE_NODE {int(bool(only_node))}\n"
        f"#define SIM_NVLINK {NVLINKS.index(machine.nvlink)}\n"
        f"#define SIM_LOST {_text(state.lost_text(machine.gpus))}\n"
        f"#define SIM_MIG {_text(state.mig_text(machine.gpus))}\n"
    )


def generated_source(machine: SimulatedMachine) -> str:
    """Return the text of generated.c: the models' MIG profiles and the table of GPUs."""
    models = list({gpu.model.name: gpu.model for gpu in machine.gpus}.values())
    profiles = "".join(_profiles(at, model) for at, model in enumerate(models))
    gpus = "".join(f"    {_gpu(gpu, models.index(gpu.model))},\n" for gpu in machine.gpus)
    return (
        '#include "tables.h"\n\n'
        f"{profiles}\n"
        f"struct sim_gpu sim_gpus[SIM_GPU_COUNT + 1] = {{\n{gpus}}};\n"
    )


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _fields(values: dict[str, str | int]) -> str:
    return "{" + ", ".join(f".{name} = {value}" for name, value in values.items()) + "}"


def _profiles(at: int, model: Model) -> str:
    """Return the array of a model's profiles, with an empty entry if there are none."""
    profiles = "".join(f"    {_profile(profile)},\n" for profile in model.mig)
    return f"static const struct sim_profile profiles_{at}[] = {{\n{profiles or '    {0},'}}};\n"


def _profile(profile: MigProfile) -> str:
    return _fields(
        {
            "name": _text(profile.name),
            "number": profile.number,
            "id": profile.id,
            "slices": profile.slices,
            "memory_slices": profile.memory_slices,
            "multiprocessors": profile.multiprocessors,
            "decoders": profile.decoders,
            "media": profile.media,
            "instances": profile.instances,
            "memory": f"{profile.memory}ULL << 20",
        }
    )


def _gpu(gpu: SimulatedGpu, at: int) -> str:
    model = gpu.model
    return _fields(
        {
            "uuid": _text(gpu.uuid),
            "name": _text(model.name),
            "serial": _text(gpu.serial),
            "board_part": _text(model.board_part),
            "vbios": _text(model.vbios),
            "slot": gpu.index,
            "minor": gpu.minor,
            "domain": gpu.domain,
            "bus": gpu.bus,
            "device": 0,
            "pci_id": model.pci_id,
            "pci_subsystem": model.pci_subsystem,
            "brand": model.brand,
            "architecture": model.architecture,
            "cc_major": model.capability[0],
            "cc_minor": model.capability[1],
            "multiprocessors": model.multiprocessors,
            "cores": model.cores,
            "bus_width": model.bus_width,
            "sm_clock": model.clocks[0],
            "memory_clock": model.clocks[1],
            "power_limit": model.power * 1000,
            "pcie_generation": model.pcie_generation,
            "fans": model.fans,
            "nvlinks": model.nvlinks[0],
            "nvlink_version": model.nvlinks[1],
            "numa_node": gpu.numa_node,
            "ecc": int(model.ecc),
            "memory": f"{model.memory}ULL << 20",
            "profiles": f"profiles_{at}",
            "profile_count": len(model.mig),
        }
    )
