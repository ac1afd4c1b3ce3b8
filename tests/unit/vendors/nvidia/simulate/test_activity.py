"""Invented processes on simulated GPUs, and their effects on NVML's values."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nvml_program import Program

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.vendors.nvidia import (
    SimulatedProcess,
    change,
    end_process,
    report_xid,
    run_process,
)
from gpuhook_simulate.vendors.nvidia.activity import parse_process
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine

MakeRoot = Callable[..., tuple[Path, SimulatedMachine]]

GIB = 1 << 30
NONE = 0xFFFFFFFF
LISTS = ("Compute", "Graphics", "MPSCompute")
START = int(time.time()) - 100_000  # time at which the simulated machines start

_HELPERS = """
def running(kind, handle):
    call = getattr(n, f"nvmlDeviceGet{kind}RunningProcesses")
    fields = ("pid", "usedGpuMemory", "gpuInstanceId", "computeInstanceId")
    return [[getattr(found, name) for name in fields] for found in call(handle)]

def samples(handle, since):
    try:
        found = n.nvmlDeviceGetProcessUtilization(handle, since)
    except n.NVMLError as error:
        return f"error {error.value}"
    return [[each.pid, each.smUtil, each.memUtil, each.encUtil, each.decUtil] for each in found]

def stats(handle, pid):
    found = n.nvmlDeviceGetAccountingStats(handle, pid)
    return [found.gpuUtilization, found.memoryUtilization, found.maxMemoryUsage, found.time,
            found.startTime, found.isRunning]

def field(handle, number):
    found = n.nvmlDeviceGetFieldValues(handle, [number])[0]
    if found.nvmlReturn:
        return f"error {found.nvmlReturn}"
    return found.value.ullVal if found.valueType == 3 else found.value.uiVal

def mig(at):
    return n.nvmlDeviceGetMigDeviceHandleByIndex(gpu(2), at)
"""


@pytest.fixture
def machine(make_root: MakeRoot) -> tuple[Path, SimulatedMachine]:
    return make_root(gpus=3, mig={2: ("3g.71gb", "1g.18gb")})


@pytest.fixture
def root(machine: tuple[Path, SimulatedMachine]) -> Path:
    return machine[0]


@pytest.fixture
def program(root: Path) -> Iterator[Program]:
    with Program(root) as program:
        program.ask(_HELPERS)
        yield program


def write(root: Path, *lines: str) -> None:
    """Write a history from lines with seconds since the start; other text is written unchanged."""
    text = [f"{START} boot"]
    for line in lines:
        seconds, blank, words = line.partition(" ")
        known = blank and seconds.replace(".", "").isdecimal()
        text.append(f"{START + float(seconds):.6f} {words}" if known else line)
    new = root / "simulate/new"
    new.write_text("".join(f"{line}\n" for line in text))
    os.replace(new, root / "simulate/activity")


def test_started_and_ended_processes_are_seen_by_a_running_program(
    root: Path, program: Program
) -> None:
    assert [program.ask(f"running({kind!r}, gpu(0))") for kind in LISTS] == [[], [], []]
    run_process(str(root), SimulatedProcess(device="0", pid=11, memory=GIB, sm=30))
    run_process(str(root), SimulatedProcess(device="0", pid=12, memory=2 * GIB, kind="graphics"))
    run_process(str(root), SimulatedProcess(device="0", pid=11, memory=GIB // 2, kind="graphics"))
    run_process(str(root), SimulatedProcess(device="1", pid=11, memory=3 * GIB, kind="mps"))
    assert program.ask("running('Compute', gpu(0))") == [[11, GIB, NONE, NONE]]
    assert [found[0] for found in program.ask("running('Graphics', gpu(0))")] == [12, 11]
    assert program.ask("running('MPSCompute', gpu(1))") == [[11, 3 * GIB, NONE, NONE]]
    run_process(str(root), SimulatedProcess(device="0", pid=11, memory=GIB // 4, sm=90))
    assert program.ask("running('Compute', gpu(0))") == [[11, GIB // 4, NONE, NONE]]
    end_process(str(root), 11)
    assert program.ask("running('Compute', gpu(0))") == []
    assert program.ask("running('MPSCompute', gpu(1))") == []
    assert [found[0] for found in program.ask("running('Graphics', gpu(0))")] == [12]


def test_memory_follows_the_processes(root: Path, program: Program) -> None:
    program.ask("v1 = n.nvmlDeviceGetMemoryInfo(gpu(0))")
    reserved = program.ask("v1.used")
    assert 0 < reserved < GIB
    run_process(str(root), SimulatedProcess(device="0", pid=11, memory=GIB))
    run_process(str(root), SimulatedProcess(device="0", pid=12, memory=GIB))
    program.ask("v1 = n.nvmlDeviceGetMemoryInfo(gpu(0))")
    program.ask("v2 = n.nvmlDeviceGetMemoryInfo(gpu(0), n.nvmlMemory_v2)")
    assert program.ask("v1.used") == reserved + 2 * GIB
    assert program.ask("[v2.used, v2.reserved]") == [2 * GIB, reserved]
    assert program.ask("[v1.free + v1.used, v2.free + v2.used + v2.reserved]") == [
        143771 << 20, 143771 << 20,
    ]  # fmt: skip
    for pid in range(20, 30):
        run_process(str(root), SimulatedProcess(device="0", pid=pid, memory=100 * GIB))
    assert program.ask("n.nvmlDeviceGetMemoryInfo(gpu(0)).free") == 0


def test_processes_of_mig_devices_are_listed_with_their_instance(
    root: Path, machine: tuple[Path, SimulatedMachine], program: Program
) -> None:
    big, small = machine[1].gpus[2].migs
    run_process(str(root), SimulatedProcess(device=big.uuid, pid=11, memory=GIB, sm=50))
    run_process(str(root), SimulatedProcess(device=small.uuid, pid=12, memory=2 * GIB))
    assert program.ask("running('Compute', mig(0))") == [[11, GIB, big.gi, 0]]
    assert program.ask("running('Compute', mig(1))") == [[12, 2 * GIB, small.gi, 0]]
    assert [found[0] for found in program.ask("running('Compute', gpu(2))")] == [11, 12]
    used = "n.nvmlDeviceGetMemoryInfo({}, n.nvmlMemory_v2).used"
    assert program.ask(f"[{used.format('mig(0)')}, {used.format('gpu(2)')}]") == [GIB, 3 * GIB]
    assert program.ask("n.nvmlDeviceGetUtilizationRates(gpu(2))") == "error 3"
    assert program.ask("samples(gpu(2), 0)") == "error 3"
    assert program.ask("n.nvmlDeviceGetAccountingMode(gpu(2))") == "error 3"
    with pytest.raises(SimulateError, match="GPU 2 is in MIG mode"):
        run_process(str(root), SimulatedProcess(device="2", pid=13))


def test_processes_end_with_their_mig_device(
    root: Path, machine: tuple[Path, SimulatedMachine], program: Program
) -> None:
    big, small = machine[1].gpus[2].migs
    run_process(str(root), SimulatedProcess(device=big.uuid, pid=11, memory=GIB))
    run_process(str(root), SimulatedProcess(device=small.uuid, pid=12, memory=GIB))
    lines = (root / "simulate/mig").read_text().splitlines(keepends=True)
    (root / "simulate/mig").write_text("".join(line for line in lines if big.uuid not in line))
    assert [found[0] for found in program.ask("running('Compute', gpu(2))")] == [12]
    (root / "simulate/mig").write_text("")
    assert program.ask("running('Compute', gpu(2))") == []
    assert program.ask("n.nvmlDeviceGetMemoryInfo(gpu(2), n.nvmlMemory_v2).used") == 0


def test_process_lists_need_a_large_enough_buffer_as_in_nvml(root: Path, program: Program) -> None:
    for pid in range(1, 4):
        run_process(str(root), SimulatedProcess(device="0", pid=pid, memory=pid))
    program.ask("count, call = ctypes.c_uint(0), n.nvmlLib.nvmlDeviceGetComputeRunningProcesses")
    assert program.ask("[call(gpu(0), ctypes.byref(count), None), count.value]") == [7, 3]
    assert program.ask("call(gpu(0), ctypes.byref(count), None)") == 2
    program.ask("count.value = 2; space = (ctypes.c_uint64 * 9)(*[7] * 9)")
    assert program.ask("[call(gpu(0), ctypes.byref(count), space), space[0]]") == [7, 7]
    program.ask("count.value = 4; call(gpu(0), ctypes.byref(count), space)")
    # The first version of the function writes two words for each process, and nothing beyond.
    assert program.ask("[count.value, [space[i] for i in (0, 1, 2, 3, 4, 5, 6)]]") == [
        3, [1, 1, 2, 2, 3, 3, 7],
    ]  # fmt: skip
    assert program.ask("n.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3(gpu(0), None, None)") == 2


def test_utilisation_is_summed_over_processes(root: Path, program: Program) -> None:
    assert program.ask("samples(gpu(0), 0)") == "error 6"
    for pid, sm in ((11, 30), (12, 90), (13, 0)):
        process = SimulatedProcess(
            device="0", pid=pid, sm=sm, memory_use=10, encoder=5 * (pid == 11)
        )
        run_process(str(root), process)
    run_process(str(root), SimulatedProcess(device="0", pid=14))
    assert program.ask("samples(gpu(0), 0)") == [
        [11, 30, 10, 5, 0],
        [12, 90, 10, 0, 0],
        [13, 0, 10, 0, 0],
    ]
    assert program.ask("samples(gpu(0), 1 << 60)") == "error 6"
    program.ask("last = n.nvmlDeviceGetProcessUtilization(gpu(0), 0)[0].timeStamp")
    assert abs(program.ask("last") / 1e6 - time.time()) < 60
    end = time.monotonic() + 60
    while program.ask("samples(gpu(0), last)") == "error 6":  # until the next sample
        assert time.monotonic() < end
        time.sleep(0.02)
    program.ask("rates = n.nvmlDeviceGetUtilizationRates(gpu(0))")
    assert program.ask("[rates.gpu, rates.memory]") == [100, 30]
    assert program.ask("n.nvmlDeviceGetEncoderUtilization(gpu(0))[0]") == 5
    assert program.ask("n.nvmlDeviceGetDecoderUtilization(gpu(0))[0]") == 0
    info = (
        "[[each.pid, each.smUtil] for each in n.nvmlDeviceGetProcessesUtilizationInfo(gpu(0), 0)]"
    )
    assert program.ask(info) == [[11, 30], [12, 90], [13, 0]]


def test_power_and_energy_follow_the_load(root: Path, program: Program) -> None:
    write(root, "100 0 process 11 compute 0 50 0 0 0", "300 0 end 11")
    before = time.time()
    energy = program.ask("n.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
    idle, loaded = 70, 70 + 315  # watts of an H200
    seconds = before - START - 200
    assert energy == pytest.approx((200 * loaded + seconds * idle) * 1000, abs=60 * idle * 1000)
    assert program.ask("n.nvmlDeviceGetPowerUsage(gpu(0))") == idle * 1000
    assert program.ask("field(gpu(0), 83)") >= energy
    run_process(str(root), SimulatedProcess(device="0", pid=12, sm=100))
    assert program.ask("n.nvmlDeviceGetPowerUsage(gpu(0))") == 700_000
    assert program.ask("field(gpu(0), 186)") == 700_000
    assert program.ask("n.nvmlDeviceGetPowerUsage(gpu(1))") == 70_000


def test_all_programs_compute_the_same_energy(root: Path, program: Program) -> None:
    run_process(str(root), SimulatedProcess(device="0", pid=12, sm=100))
    with Program(root) as other:
        first = program.ask("n.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
        second = other.ask("n.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
        third = program.ask("n.nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
    assert first <= second <= third


def test_temperatures_rise_with_load_over_time(root: Path, program: Program) -> None:
    temperature = "n.nvmlDeviceGetTemperature(gpu({}), 0)"
    assert program.ask(temperature.format(0)) == 34
    began = time.time()
    write(
        root,
        f"{began - START - 10} 0 process 11 compute 0 100 0 0 0",
        f"{began - START - 999} 1 process 11 compute 0 100 0 0 0",
    )
    warm = program.ask(temperature.format(0))
    assert 44 <= warm <= min(80, 45 + time.time() - began)
    assert program.ask(temperature.format(1)) == 80
    assert program.ask("field(gpu(1), 82)") == 88
    assert program.ask("n.nvmlDeviceGetClockInfo(gpu(1), 1)") == 1980
    assert program.ask("n.nvmlDeviceGetClockInfo(gpu(2), 1)") < 500


def test_accounting_survives_the_end_of_a_process(root: Path, program: Program) -> None:
    write(
        root,
        "1 0 process 10 compute 5 5 5 0 0",
        "2 0 accounting on",
        "10 0 process 11 compute 1000 100 20 0 0",
        "20 0 process 11 compute 3000 0 0 0 0",
        "40 0 end 11",
        "50 0 process 12 compute 7 50 0 0 0",
    )
    assert program.ask("n.nvmlDeviceGetAccountingMode(gpu(0))") == 1
    assert program.ask("n.nvmlDeviceGetAccountingPids(gpu(0))") == [11, 12]
    assert program.ask("stats(gpu(0), 11)") == [33, 6, 3000, 30_000, (START + 10) * 10**6, 0]
    assert program.ask("stats(gpu(0), 12)") == [50, 0, 7, 0, (START + 50) * 10**6, 1]
    assert program.ask("stats(gpu(0), 10)") == "error 6"  # ran before
    assert program.ask("stats(gpu(1), 11)") == "error 3"  # accounting is off on GPU 1
    run_process(str(root), SimulatedProcess(device="0", pid=11, memory=9))
    assert program.ask("n.nvmlDeviceGetAccountingPids(gpu(0))") == [12, 11]
    assert program.ask("stats(gpu(0), 11)[2]") == 9  # the later of two processes with this PID


def test_only_root_can_switch_accounting(root: Path, program: Program) -> None:
    switch = "attempt(n.nvmlDeviceSetAccountingMode, gpu(0), {})"
    assert program.ask(switch.format(2)) == "error 2"
    if os.geteuid() != 0:
        assert program.ask(switch.format(1)) == "error 4"
        return
    assert program.ask(switch.format(1)) is None
    run_process(str(root), SimulatedProcess(device="0", pid=11))
    end_process(str(root), 11)
    assert program.ask("n.nvmlDeviceGetAccountingPids(gpu(0))") == [11]
    assert program.ask("n.nvmlDeviceClearAccountingPids(gpu(0))") is None
    assert program.ask("n.nvmlDeviceGetAccountingPids(gpu(0))") == []
    assert program.ask(switch.format(0)) is None
    assert program.ask("n.nvmlDeviceGetAccountingPids(gpu(0))") == "error 3"
    program.ask("os.setresuid(65534, 65534, 65534)")
    assert program.ask(switch.format(1)) == "error 4"


def test_accounting_forgets_the_oldest_ended_processes(root: Path, program: Program) -> None:
    """Processes that are still running are never forgotten."""
    lines = ["1 0 accounting on", "2 0 process 1 compute 1 0 0 0 0"]
    for pid in range(2, 4500):
        lines += [f"{pid} 0 process {pid} compute 1 0 0 0 0", f"{pid} 0 end {pid}"]
    write(root, *lines)
    pids = program.ask("n.nvmlDeviceGetAccountingPids(gpu(0))")
    assert len(pids) == program.ask("n.nvmlDeviceGetAccountingBufferSize(gpu(0))")
    assert {1, 4499} <= set(pids)
    assert 2 not in pids
    assert program.ask("running('Compute', gpu(0))") == [[1, 1, NONE, NONE]]


GARBAGE = [
    "", "x", "boot", "-1 boot", "1.1234567 boot", "99999999999999999999 boot", "5 0",
    "5 9 process 1 compute 1 1 1 1 1", "5 0 process 0 compute 1 1 1 1 1",
    "5 0 process 4294967297 compute 1 1 1 1 1", "5 0 process 1 games 1 1 1 1 1",
    "5 0 process 1 compute 1 101 1 1 1", "5 0 process 1 compute 99999999999999999 1 1 1 1",
    "5 0 process 1 compute 1 1 1 1", "5 0 process 1 compute 1 1 1 1 1 1",
    "5 0:1 process 1 compute 1 1 1 1 1", "5 0:x:0 process 1 compute 1 1 1 1 1", "5 0 end",
    "5 0 end x", "5 0 accounting", "5 0 accounting maybe",
    "5 " + "0" * 3000 + " process 1 compute 1 1 1 1 1",
]  # fmt: skip


def test_malformed_activity_lines_are_ignored(root: Path, program: Program) -> None:
    write(root, *GARBAGE)
    assert program.ask("running('Compute', gpu(0))") == []
    assert program.ask("n.nvmlDeviceGetAccountingMode(gpu(0))") == 0
    (root / "simulate/activity").unlink()
    assert program.ask("n.nvmlDeviceGetTemperature(gpu(0), 0)") == 34
    run_process(str(root), SimulatedProcess(device="0", pid=11))
    assert [found[0] for found in program.ask("running('Compute', gpu(0))")] == [11]


def test_xids_remap_memory_rows(root: Path, program: Program) -> None:
    rows = "n.nvmlDeviceGetRemappedRows(gpu({}))"
    assert program.ask(rows.format(0)) == [0, 0, 0, 0]
    for xid in (63, 63, 64, 79):
        report_xid(str(root), xid, "0")
    assert program.ask(rows.format(0)) == [0, 2, 1, 1]
    assert program.ask("[field(gpu(0), number) for number in (142, 143, 144, 145)]") == [0, 2, 1, 1]
    assert program.ask(rows.format(1)) == [0, 0, 0, 0]


def test_field_values_are_returned_or_unsupported(root: Path, program: Program) -> None:
    assert program.ask("[field(gpu(0), number) for number in (94, 4, 190, 9999)]") == [
        0, 0, 700_000, "error 3",
    ]  # fmt: skip
    assert program.ask("n.nvmlDeviceGetFieldValues(mig(0), [94])") == "error 3"
    change(str(root), lost=frozenset({0}))
    assert program.ask("field(gpu(0), 94)") == "error 15"


def test_a_model_without_row_remapping_reports_unsupported(make_root: MakeRoot) -> None:
    with Program(make_root(models=("T4",))[0]) as program:
        program.ask(_HELPERS)
        assert program.ask("n.nvmlDeviceGetRemappedRows(gpu(0))") == "error 3"
        assert program.ask("field(gpu(0), 82)") == "error 3"


@pytest.mark.parametrize(
    ("word", "process"),
    [
        ("0,11,8G,60", SimulatedProcess(device="0", pid=11, memory=8 * GIB, sm=60)),
        ("GPU-a,1,5", SimulatedProcess(device="GPU-a", pid=1, memory=5)),
        ("0,1,2M,mps", SimulatedProcess(device="0", pid=1, memory=2 << 20, kind="mps")),
        (
            "MIG-b,1,1K,1,2,3,4,graphics",
            SimulatedProcess("MIG-b", 1, 1024, 1, 2, 3, 4, "graphics"),
        ),
    ],
)
def test_process_descriptions_are_parsed(word: str, process: SimulatedProcess) -> None:
    assert parse_process(word) == process


@pytest.mark.parametrize("word", ["", "0,1", "0,x,1", "0,1,1T", "0,1,1,1,1,1,1,1", "0,1,1,-1"])
def test_malformed_process_descriptions_are_refused(word: str) -> None:
    with pytest.raises(SimulateError, match="doesn't describe a process"):
        parse_process(word)


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (SimulatedProcess(device="7", pid=1), "no device '7'"),
        (SimulatedProcess(device="0", pid=0), "0 is not a process id"),
        (SimulatedProcess(device="0", pid=1, sm=101), "101 is not a percentage"),
        (SimulatedProcess(device="0", pid=1, kind="x"), "no processes of the kind 'x'"),
        (SimulatedProcess(device="0", pid=1, memory=1 << 40), "can't have 1099511627776 bytes"),
    ],
)
def test_invalid_processes_are_refused(root: Path, process: SimulatedProcess, words: str) -> None:
    before = (root / "simulate/activity").read_text()
    with pytest.raises(SimulateError, match=words):
        run_process(str(root), process)
    assert (root / "simulate/activity").read_text() == before


def test_ending_an_unknown_process_is_refused(root: Path) -> None:
    run_process(str(root), SimulatedProcess(device="0", pid=11))
    end_process(str(root), 11)
    with pytest.raises(SimulateError, match="No process 11 runs"):
        end_process(str(root), 11)
