"""Links of simulated GPUs: NVLink in pairs or through switches, PCI Express, memory."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvml_program import Program

from gpuhook.base.errors import SimulateError
from gpuhook_simulate.vendors.nvidia import change
from gpuhook_simulate.vendors.nvidia.machine import SimulatedMachine, make_machine
from gpuhook_simulate.vendors.nvidia.options import Options

MakeRoot = Callable[..., tuple[Path, SimulatedMachine]]

OK, ACROSS, UNSUPPORTED = 0, 3, 5
STATUS = "attempt(n.nvmlDeviceGetP2PStatus, gpu({}), gpu({}), {})"
ANCESTOR = "n.nvmlDeviceGetTopologyCommonAncestor(gpu({}), gpu({}))"
STATE = "attempt(n.nvmlDeviceGetNvLinkState, gpu({}), {})"
REMOTE = "n.nvmlDeviceGetNvLinkRemotePciInfo(gpu({}), {}).busId"


def linked(program: Program, gpus: int) -> set[tuple[int, int]]:
    """Return the pairs of GPUs for which NVML reports an NVLink connection."""
    pairs = set(itertools.combinations(range(gpus), 2))
    return {(a, b) for a, b in pairs if program.ask(STATUS.format(a, b, 2)) == OK}


def test_gpus_without_nvlink_have_only_pci_express_links(make_root: MakeRoot) -> None:
    with Program(make_root(gpus=8)[0]) as program:
        assert program.ask(STATE.format(0, 0)) == "error 3"
        assert linked(program, 8) == set()
        assert program.ask(STATUS.format(0, 3, 0)) == OK
        assert program.ask(STATUS.format(0, 4, 0)) == ACROSS
        assert program.ask(STATUS.format(0, 1, 3)) == UNSUPPORTED
        levels = [program.ask(ANCESTOR.format(0, other)) for other in range(8)]
        assert levels == [0, 10, 30, 30, 50, 50, 50, 50]
        near = [program.ask(f"n.nvmlDeviceGetMemoryAffinity(gpu({i}), 1, 0)[0]") for i in range(8)]
        assert near == [1] * 4 + [2] * 4


def test_nvlink_pairs_link_two_gpus_each(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=5, nvlink="pairs", models=("A100",))
    with Program(root) as program:
        assert linked(program, 5) == {(0, 1), (2, 3)}
        assert [program.ask(STATE.format(0, link)) for link in (0, 11, 12, 36)] == [
            1, 1, "error 2", "error 2",
        ]  # fmt: skip
        assert program.ask(REMOTE.format(2, 5)) == machine.gpus[3].pci_bus_id
        assert program.ask("n.nvmlDeviceGetNvLinkRemoteDeviceType(gpu(2), 5)") == 0
        assert program.ask(STATE.format(4, 0)) == 0  # alone
        assert program.ask(REMOTE.format(4, 0)) == "error 3"
        change(str(root), lost=frozenset({1}))
        assert program.ask(STATE.format(0, 0)) == 0
        assert program.ask(STATUS.format(0, 1, 2)) == "error 15"
        assert program.ask(STATUS.format(2, 3, 2)) == OK


def test_nvlink_switches_link_all_gpus(make_root: MakeRoot) -> None:
    root, machine = make_root(gpus=8, nvlink="all", models=("H100",))
    with Program(root) as program:
        assert len(linked(program, 8)) == 28
        assert program.ask(STATUS.format(0, 7, 0)) == OK
        assert program.ask("n.nvmlDeviceGetNvLinkRemoteDeviceType(gpu(0), 17)") == 2
        switches = {program.ask(REMOTE.format(0, link)) for link in range(18)}
        assert len(switches) == 4
        assert not switches & {gpu.pci_bus_id for gpu in machine.gpus}
        assert program.ask("n.nvmlDeviceGetNvLinkVersion(gpu(0), 0)") == 6
        capability = "attempt(n.nvmlDeviceGetNvLinkCapability, gpu(0), 0, {})"
        assert [program.ask(capability.format(number)) for number in (0, 4, 6)] == [1, 0, "error 2"]
        assert program.ask("n.nvmlDeviceGetFieldValues(gpu(0), [91])[0].value.uiVal") == 18


def test_mig_mode_disables_peer_access(make_root: MakeRoot) -> None:
    with Program(make_root(gpus=3, nvlink="all", mig={0: ("1g.18gb",)})[0]) as program:
        assert linked(program, 3) == {(1, 2)}
        assert program.ask(STATUS.format(0, 1, 0)) == UNSUPPORTED
        mig = "n.nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), 0)"
        assert program.ask(f"n.nvmlDeviceGetNvLinkState({mig}, 0)") == "error 3"


def test_invalid_link_arguments_are_refused(make_root: MakeRoot) -> None:
    with Program(make_root(gpus=2, nvlink="all")[0]) as program:
        assert program.ask(STATUS.format(0, 0, 0)) == "error 2"
        assert program.ask(STATUS.format(0, 1, 5)) == "error 2"
        assert program.ask("n.nvmlLib.nvmlDeviceGetP2PStatus(gpu(0), gpu(1), 0, None)") == 2
        assert program.ask("n.nvmlLib.nvmlDeviceGetNvLinkState(gpu(0), 0, None)") == 2
        assert program.ask("n.nvmlLib.nvmlDeviceGetMemoryAffinity(gpu(0), 0, None, 0)") == 2


def _check(options: Options) -> None:
    options.check()
    make_machine(options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"models": ("L4",), "nvlink": "all"}, "NVIDIA L4 has no NVLink"),
        ({"nvlink": "ring"}, "can't be linked by 'ring'"),
        ({"nvlink": "all", "platform": "wsl"}, "can't be linked on the platform wsl"),
    ],
)
def test_invalid_nvlink_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SimulateError, match=words):
        _check(Options(root="/x", **fields))


def test_numa_nodes_are_unchanged_when_a_gpu_is_unplugged() -> None:
    gpus = make_machine(Options(root="/x", gpus=8, unplugged=frozenset({2}))).gpus
    assert [gpu.numa_node for gpu in gpus] == [0] * 3 + [1] * 4
    assert {gpu.numa_node for gpu in make_machine(Options(root="/x", gpus=64)).gpus} == {0, 1}
