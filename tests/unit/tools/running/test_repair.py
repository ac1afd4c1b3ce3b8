import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhook.base.errors import ContainerError
from gpuhook.base.host import proc
from gpuhook.base.oci.spec import ContainerState
from gpuhook.core.inventory import model
from gpuhook.core.inventory.model import Device, DeviceNode
from gpuhook.core.records import records
from gpuhook.monitor.containers.device_users import RunningContainer
from gpuhook.tools.running import repair
from gpuhook.tools.running.names import Names
from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory

ONE = RunningContainer("0123456789ab" + "0" * 52, "docker", 10, "python3")
TWO = RunningContainer("0123456fffff" + "0" * 52, "docker", 20, "python3")
POD = RunningContainer("pod", "", 30, "pause")


@pytest.fixture
def names(tmp_path: Path) -> Names:
    """Container names from podman's store; one container has another's id as its name."""
    stored = [{"id": TWO.name, "names": ["web"]}, {"id": ONE.name, "names": [TWO.name]}]
    (tmp_path / "containers.json").write_text(json.dumps([*stored, {"id": POD.name}]))
    found = Names()
    found.ask([("podman", each.name, f"{tmp_path}/ID/userdata") for each in (ONE, TWO, POD)])
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [(ONE.name, ONE), (ONE.name[:12], ONE), ("0123456f", TWO), ("pod", POD), ("web", TWO),
     (TWO.name, TWO)],
)  # fmt: skip
def test_containers_are_selected_by_id_or_engine_name(
    names: Names, name: str, expected: RunningContainer
) -> None:
    assert repair.select([name], [ONE, TWO, POD], names) == [expected]


@pytest.mark.parametrize(
    ("name", "words"),
    [("0123456", "several"), ("po", "t a running"), ("", "t a running"), ("--all", "t a running")],
)
def test_unknown_and_ambiguous_container_names_are_refused(
    names: Names, name: str, words: str
) -> None:
    with pytest.raises(ContainerError, match=rf"{words}.*as `gpuhook list` or the engine shows it"):
        repair.select([name], [ONE, TWO, POD], names)


MINE = (195, 3)
GPU = Gpu(0, 3, "GPU-1", "00000000:1B:00.0", "H100", "9.0", "Nvidia", False, ())


def inventory(gpu: Gpu = GPU) -> list[NvidiaInventory]:
    nodes = (DeviceNode("/dev/nvidia3", *MINE), DeviceNode("/dev/nvidia4", 195, 4))
    return [NvidiaInventory("/", "535.1", "12.2", (gpu,), nodes, ())]


def recorded(pid: int, started: int, *devices: tuple[int, int]) -> RunningContainer:
    given = {
        "vendor": "nvidia",
        "nodes": {"GPU-1": [[195, 3]]},
        "devices": [list(pair) for pair in devices],
    }
    record = {"started": started, "given": [given], "cgroups": {}}
    return RunningContainer("web", "docker", pid, "sleep", set(devices), record=record)


@pytest.fixture
def ourselves() -> Iterator[tuple[int, int]]:
    """A descriptor of the test's own process, and its start time."""
    process = os.open(f"/proc/{os.getpid()}", os.O_PATH)
    yield process, records.started(process)
    os.close(process)


def test_repaired_devices_are_both_in_the_record_and_on_the_host(
    ourselves: tuple[int, int],
) -> None:
    process, started = ourselves
    one = recorded(os.getpid(), started, MINE, (500, 7))
    assert repair.given_devices(one, process, inventory()) == [MINE]


def test_a_gpu_missing_from_the_host_is_not_repaired(ourselves: tuple[int, int]) -> None:
    process, started = ourselves
    one = recorded(os.getpid(), started, MINE)
    moved = Gpu(0, 4, "GPU-1", "00000000:1B:00.0", "H100", "9.0", "Nvidia", False, ())
    for now in (inventory(moved), [NvidiaInventory("/", "535.1", "12.2", (), (), ())]):
        with pytest.raises(ContainerError, match="uses GPU-1, which this host no longer has"):
            repair.given_devices(one, process, now)


@pytest.mark.protects(
    "another-process", "a container's record isn't applied to another process that reused its PID"
)
def test_a_process_that_reused_the_containers_pid_is_refused(ourselves: tuple[int, int]) -> None:
    process, started = ourselves
    with pytest.raises(ContainerError, match="has exited"):
        repair.given_devices(recorded(os.getpid(), started - 1, MINE), process, inventory())


def test_an_ended_process_is_refused() -> None:
    with pytest.raises(ContainerError, match="has exited"):
        repair.repair(recorded(2**22 + 1, 1, MINE), inventory())


def test_a_container_without_record_and_bundle_is_refused(ourselves: tuple[int, int]) -> None:
    one = RunningContainer("web", "", os.getpid(), "sleep", {MINE})
    with pytest.raises(ContainerError, match="no record"):
        repair.given_devices(one, ourselves[0], inventory())


def test_equal_device_names_of_two_vendors_are_not_confused(ourselves: tuple[int, int]) -> None:
    process, started = ourselves
    one = recorded(os.getpid(), started, MINE)
    theirs = Device("GPU-1", "0", {}, ("/dev/other0",))
    others = model.Inventory("other", "/", "1", (theirs,), (DeviceNode("/dev/other0", 9, 9),))
    for now in ([*inventory(), others], [others, *inventory()]):
        assert repair.given_devices(one, process, now) == [MINE]


def test_a_cgroup_named_like_a_recorded_container_is_not_selected(names: Names) -> None:
    own = recorded(os.getpid(), 1, MINE)
    other = RunningContainer(own.name, own.engine, own.pid + 1, "sleep", {MINE})
    assert repair.select([own.name], [own, other], names) == [own]
    assert repair.select([own.name], [other], names) == [other]


def test_a_record_without_cgroups_is_refused_unless_the_names_match(
    ourselves: tuple[int, int], tmp_path: Path
) -> None:
    """Earlier versions recorded none; then the cgroup must be named after the container."""
    (tmp_path / "cgroup").write_bytes(b"5:devices:/docker/web\n0::/docker-web.scope/init\n")
    process = os.open(tmp_path, os.O_PATH)
    try:
        container = recorded(os.getpid(), 1, MINE)
        assert container.record is not None
        assert repair._written(container, process) == {}
        del container.record["cgroups"]
        assert repair._written(container, process) == {}
        container.record["cgroups"] = {"1": "/docker/web"}
        assert repair._written(container, process) == {1: "/docker/web"}
        container.record["cgroups"] = {}
        for text in ("0::/docker/victim\n", "5:devices:/docker/web\n0::/docker/victim\n"):
            (tmp_path / "cgroup").write_text(text)
            with pytest.raises(ContainerError, match="The cgroup in which web got its devices"):
                repair._written(container, process)
    finally:
        os.close(process)
    assert repair._written(RunningContainer("web", "", 1, "sleep"), -1) == {}


def test_the_containers_cgroups_are_recorded(tmp_path: Path, ourselves: tuple[int, int]) -> None:
    record = records.describe(ContainerState("web", os.getpid(), "", None), None, [])
    with records.RecordWriter(str(tmp_path / "state"), ourselves[0], record):
        [found] = records.read_all(str(tmp_path / "state"))
    told = proc.cgroups(proc.read("/proc/self/cgroup"))
    assert {*records.cgroups_of(found).values()} <= {*told.values()} - {"/"}
    inside = {**record, **found, "cgroups": {}}  # as the hook of a CDI spec sees the container
    assert records._merged(found, inside)["cgroups"] == found["cgroups"]
