"""Devices attached to running containers: names, records, processes, scopes and programs."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base import fileio
from gpuhook.base.cgroup import device_program as code
from gpuhook.base.config.model import Config
from gpuhook.base.errors import ContainerError, MemoryLimitError, RequestError
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.spec import ContainerState, Spec
from gpuhook.base.state_directory import StateDirectory, boot_id
from gpuhook.core import contract
from gpuhook.core.contract import Grant
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.records import records
from gpuhook.core.resolve import Allocation
from gpuhook.monitor.containers import attach, attached, live
from gpuhook.monitor.containers.cgroup_check import program_allows
from gpuhook.monitor.containers.device_users import RunningContainer
from gpuhook.monitor.containers.target import AttachTarget
from gpuhook.tools.running import bundles, repair
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory

NVIDIA = contract.load(registry.BUILT_IN["nvidia"])
CONFIG = Config()
CONTROL = ("/dev/nvidiactl", 195, 255)


def inventory(*numbers: int) -> NvidiaInventory:
    gpus = tuple(
        Gpu(n, n, f"GPU-{n}", f"00000000:{n:02X}:00.0", "H100", "9.0", "Nvidia", False, ())
        for n in numbers
    )
    nodes = (DeviceNode(*CONTROL), *(DeviceNode(f"/dev/nvidia{n}", 195, n) for n in numbers))
    return NvidiaInventory("/", "535.1", "12.2", gpus, nodes, ())


FOUR = inventory(0, 1, 2, 3)


def grant(*numbers: int) -> Grant:
    devices = [FOUR.devices[n] for n in numbers]
    return Grant.of_document(NVIDIA, FOUR, CONFIG, devices)


def given(record: dict[str, Any], *numbers: int, denied: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the record after these GPUs were attached."""
    new, before = grant(*numbers), [n for each in record["given"] for n in each["selected"]]
    whole = grant(*sorted({*numbers, *(int(name[4:]) for name in before)}))
    entries = attached.entries(new, denied)
    ids = attached.ids_of({"attached": entries})
    paths = [f"/dev/nvidia{n}" for n in numbers]
    places = [*paths, *([CONTROL[0]] if CONTROL[1:] in denied else [])]
    return attached.mounted(attached.added(record, [whole], entries), ids, places, lasts=True)


def removed(record: dict[str, Any], *numbers: int) -> attached.RemainingRecord:
    ids = {("nvidia", f"GPU-{n}") for n in numbers}
    before = copy.deepcopy(record)
    found = attached.removed(record, ids, {"nvidia": FOUR}, CONFIG)
    assert record == before, "another process may read it meanwhile"
    return found


EMPTY: dict[str, Any] = {"given": []}


def test_control_nodes_stay_until_the_last_device_is_detached() -> None:
    one = given(EMPTY, 1, denied=[CONTROL[1:], (195, 1)])
    two = given(one, 2, denied=[(195, 2)])
    [every] = two["given"]
    assert every["selected"] == ["GPU-1", "GPU-2"]
    assert every["request"]["source"] == "attach"
    first = removed(two, 1)
    assert (first.denied, first.places) == ([(195, 1)], {(195, 1): "/dev/nvidia1"})
    [left] = first.record["given"]
    assert left["selected"] == ["GPU-2"]
    assert sorted(left["devices"]) == [[195, 2], [195, 255]]
    last = removed(first.record, 2)
    assert last.denied == [(195, 2), CONTROL[1:]]
    assert last.places == {(195, 2): "/dev/nvidia2", CONTROL[1:]: CONTROL[0]}
    assert (last.record["given"], last.record["attached"]) == ([], [])


@pytest.mark.parametrize("together", [(1,), (2,), (1, 2)])
def test_jointly_attached_devices_can_be_detached_separately(together: tuple[int, ...]) -> None:
    both = given(EMPTY, 1, 2, denied=[CONTROL[1:], (195, 1), (195, 2)])
    found = removed(both, *together)
    assert {*found.denied} >= {(195, n) for n in together}
    assert (CONTROL[1:] in found.denied) == (len(together) == 2)


def test_devices_from_a_containers_start_stay_after_a_detach() -> None:
    start = {"given": [{**attached.added(EMPTY, [grant(0)], [])["given"][0]}]}
    start["given"][0]["request"] = {"source": "environment", "devices": ["0"]}
    more = given(start, 3, denied=[(195, 3)])
    assert more["given"][0]["request"]["source"] == "environment"
    assert attached.lasting(more) == {(195, 3)}
    found = removed(more, 3)
    assert (found.denied, found.places) == ([(195, 3)], {(195, 3): "/dev/nvidia3"})
    assert found.record["given"] == start["given"]


def test_a_node_that_the_cgroup_allowed_before_is_not_denied() -> None:
    found = removed(given(EMPTY, 1, denied=[]), 1)
    assert found.denied == []
    assert found.places == {(195, 1): "/dev/nvidia1"}


def test_limits_of_detached_devices_are_removed_from_the_record() -> None:
    limits = [{"vendor": "nvidia", "id": f"GPU-{n}"} for n in (1, 2)]
    record = {**given(EMPTY, 1, 2, denied=[]), "limits": limits}
    assert removed(record, 1).record["limits"] == limits[1:]


@pytest.mark.parametrize(
    ("word", "expected"), [("1", ["GPU-1"]), ("nvidia.com/gpu=1", ["GPU-1"]), ("GPU-3", ["GPU-3"])]
)
def test_attach_finds_devices_by_index_cdi_name_and_id(word: str, expected: list[str]) -> None:
    [(names, _, devices)] = attach.named([word], {"nvidia": FOUR}, CONFIG)
    assert names.NAME == "nvidia"
    assert [each.id for each in devices] == expected


@pytest.mark.parametrize("word", ["amd.com/gpu=0", "nvidia.com/gpu=", "=", "nvidia.com/gpu=a b"])
def test_words_naming_no_device_are_refused(word: str) -> None:
    with pytest.raises(RequestError, match=r"It is unclear which device .* Give KIND=NAME"):
        attach.named([word], {"nvidia": FOUR}, CONFIG)


@pytest.mark.protects("attach-limits", "attach can't bypass a host's memory limits")
def test_attach_is_refused_on_a_host_with_memory_limits() -> None:
    config = Config()
    config.device_memory = "1GiB"
    assert config.limits_memory
    allocation = Allocation([], config, registry.BUILT_IN)
    with pytest.raises(MemoryLimitError, match="This host limits the memory"):
        attach._memory_limits(Spec("config.json", "{}"), allocation, [], config)


# First processes and cgroups ------------------------------------------------------------------


@pytest.mark.protects(
    "attach-noted",
    "a device is attached only to a process of the requested container",
    instead="if started is not None:",
)
def test_a_recorded_process_of_another_container_is_refused(tmp_path: Path) -> None:
    (tmp_path / "init.pid").write_text(f"{os.getpid()}")
    with pytest.raises(ContainerError, match="The first process of victim is unknown"):
        bundles.first_process("victim", str(tmp_path))
    for text in ("", "x", "-1", str(2**31)):
        (tmp_path / "init.pid").write_text(text)
        with pytest.raises(ContainerError, match="The first process of victim is unknown"):
            bundles.first_process("victim", str(tmp_path))


def target(name: str) -> AttachTarget:
    process = live.FirstProcess(os.getpid(), bundles.start_time(os.getpid()) or 0)
    return AttachTarget(name, process, Spec("config.json", "{}"), [FOUR], CONFIG)


ID = "0123456789ab" * 5


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/docker/{ID}", f"/docker/{ID}"),
        (f"/docker/{ID}/init.scope", f"/docker/{ID}"),
        (f"/system.slice/docker-{ID}.scope", f"/system.slice/docker-{ID}.scope"),
        (f"/m.slice/libpod-{ID}.scope/container/x", f"/m.slice/libpod-{ID}.scope/container"),
    ],
)  # fmt: skip
def test_the_containers_own_cgroup_is_found(path: str, expected: str) -> None:
    assert target(ID)._own_part(path) == expected


@pytest.mark.protects(
    "attach-cgroup", "attach changes only a cgroup that is named after the container",
    instead="if not named:\n    return path",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "path"),
    [
        (ID, "/docker/another"),
        (ID, "/user.slice/session-1.scope"),
        (ID, ""),
        (ID, f"/docker/{ID}x"),
        ("a", "/machine.slice/libpod-b.scope"),  # the slice has an "a" in its name
    ],
)
def test_a_cgroup_not_named_after_the_container_is_refused(name: str, path: str) -> None:
    with pytest.raises(ContainerError, match="isn't named after it"):
        target(name)._own_part(path)


@pytest.mark.protects(
    "attach-scope", "attach changes only the container's own systemd scope",
    instead="if name.endswith(_SCOPE):\n    return name",
)  # fmt: skip
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/system.slice/docker-{ID}.scope", f"docker-{ID}.scope"),
        (f"/machine.slice/libpod-{ID}.scope/container", f"libpod-{ID}.scope"),
        (f"/docker/{ID}", ""),
        ("/user.slice/user-0.slice/session-1.scope", ""),
        (f"/system.slice/docker-{ID}.scope/init.scope", ""),
    ],
)
def test_only_the_containers_own_scope_is_found(path: str, expected: str) -> None:
    one = target(ID)
    one.written = {2: path}
    assert one._scope() == expected


# One change at a time -------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[tuple[Config, StateDirectory, RunningContainer]]:
    """A configuration, its folder of records, and this process as a container with GPU 1."""
    config = Config()
    config.state_dir = str(tmp_path / "state")
    folder = records.open_records(config.state_dir, make=True)
    assert folder is not None
    process = os.open(f"/proc/{os.getpid()}", os.O_PATH)
    state = ContainerState(ID, os.getpid(), str(tmp_path), None)
    described = {**records.describe(state, {}, []), **records.now(process)}
    os.close(process)
    record = given({**described, "boot": boot_id()}, 1, denied=[(195, 1)])
    name = records.name_of(record)
    fileio.replace(name, jsontext.dumps(record).encode(), f".{name}", folder=folder.fd)
    [record] = records.read_folder(folder)
    yield (
        config,
        folder,
        RunningContainer(ID, "docker", os.getpid(), "x", {(195, 1)}, record=record),
    )
    folder.close()


@pytest.mark.protects(
    "attach-one-at-a-time", "only one process at a time changes the devices of running containers",
    instead="held = contextlib.nullcontext()",
)  # fmt: skip
def test_a_concurrent_device_change_waits_and_times_out(
    recorded: tuple[Config, StateDirectory, RunningContainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, container = recorded
    monkeypatch.setattr(attached, "_WAIT", 0.05)
    folder = records.open_records(config.state_dir, make=False)
    assert folder is not None
    process = live.FirstProcess(os.getpid(), bundles.start_time(os.getpid()) or 0)
    one = AttachTarget(ID, process, Spec("config.json", "{}"), [FOUR], config)
    with attached.one_at_a_time(folder):
        for change in (one, repair._unchanged(container, config)):
            with pytest.raises(ContainerError, match="Another process hasn't finished"), change:
                pass
    with repair._unchanged(container, config):
        pass
    folder.close()


@pytest.mark.protects("repair-attached", "repair doesn't allow a device that was just detached")
def test_a_device_that_was_detached_meanwhile_is_not_repaired(
    recorded: tuple[Config, StateDirectory, RunningContainer],
) -> None:
    config, folder, container = recorded
    with repair._unchanged(container, config):
        pass
    assert container.record is not None
    fileio.remove(records.name_of(container.record), folder.fd)
    with (
        pytest.raises(ContainerError, match="have just changed"),
        repair._unchanged(container, config),
    ):
        pass


# Device programs ------------------------------------------------------------------------------

ALL = code.instruction(code.SET_32, 0, imm=1) + code.instruction(code.EXIT)
NONE = code.instruction(code.SET_32, 0, imm=0) + code.instruction(code.EXIT)
PAIRS = [(195, 1), (195, 255)]


@pytest.mark.parametrize("before", [ALL, NONE, code.allow_rules([(195, 1)]) + NONE])
def test_a_changed_device_program_denies_the_given_devices(before: bytes) -> None:
    changed = live._denying(before, PAIRS)
    assert [program_allows(changed, *pair) for pair in PAIRS] == [False, False]
    assert program_allows(changed, 195, 3) == program_allows(before, 195, 3)


def test_allowing_then_denying_restores_the_device_program() -> None:
    assert live._denying(code.allow_rules(PAIRS) + NONE, PAIRS) == NONE
