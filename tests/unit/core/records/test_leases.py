"""Leases: the holder of an exclusive device, and how long it holds the device."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhook.base.errors import HeldError
from gpuhook.base.host import proc
from gpuhook.base.oci.spec import ContainerState
from gpuhook.core.inventory.model import Device, DeviceNode, Inventory
from gpuhook.core.records import leases, records

KIND = "acme.example/npu"
OTHER = "other.example/npu"
Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def state_dir(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts processes in place of containers' first processes."""
    made: list[subprocess.Popen[bytes]] = []

    def begin() -> "subprocess.Popen[bytes]":
        made.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))
        return made[-1]

    yield begin
    for each in made:
        each.kill()
        each.wait()


def given(*devices: str, parent: str = "", kind: str = KIND) -> dict[str, Any]:
    every = [*devices, *([parent] if parent else [])]
    nodes: dict[str, list[Any]] = {device: [] for device in every}
    vendor = kind.partition(".")[0]
    request = {"source": "none", "devices": []}
    facts = {"vendor": vendor, "kind": kind, "request": request}
    return {**facts, "selected": [*devices], "nodes": nodes, "devices": []}


def record(*gifts: dict[str, Any], name: str = "web", **more: Any) -> dict[str, Any]:
    facts = records.describe(ContainerState(name, 0, "", None), None, [])
    return {**facts, "given": [*gifts], **more}


def take(
    state_dir: str,
    process: "subprocess.Popen[bytes]",
    *gifts: dict[str, Any],
    kinds: tuple[str, ...] = (KIND,),
    add: bool = False,
    **more: Any,
) -> None:
    """Write a container's record, as the start that allocates its devices does."""
    entry = os.open(f"/proc/{process.pid}", os.O_PATH)
    facts = {**record(*gifts), "pid": process.pid, **more}
    try:
        with records.RecordWriter(state_dir, entry, facts, add=add, exclusive=kinds):
            pass
    finally:
        os.close(entry)


CONFLICTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "same": (given("A"), given("A"), "=A is in use by"),
    "one of several": (given("A", "B"), given("B", "C"), "=B is in use by"),
    "another": (given("A"), given("B"), ""),
    "none": (given("A"), given(), ""),
    "a part of it": (given("A/0", parent="A"), given("A"), "=A is in parts in use by"),
    "the whole of it": (
        given("A"),
        given("A/0", parent="A"),
        "=A is whole, and not in parts, in use",
    ),
    "the part beside": (given("A/0", parent="A"), given("A/1", parent="A"), ""),
    "the same part": (given("A/0", parent="A"), given("A/0", parent="A"), "=A/0 is in use by"),
    "another kind": (given("A", kind=OTHER), given("A"), ""),
    "a kind that isn't exclusive": (given("A", kind=OTHER), given("A", kind=OTHER), ""),
}


@pytest.mark.protects("lease-refused", "an exclusive device in use is refused to another container")
@pytest.mark.parametrize(("theirs", "ours", "words"), CONFLICTS.values(), ids=CONFLICTS.keys())
def test_an_exclusive_device_in_use_is_refused_and_a_free_one_given(
    state_dir: str, start: Start, theirs: dict[str, Any], ours: dict[str, Any], words: str
) -> None:
    take(state_dir, start(), theirs)
    if words:
        with pytest.raises(HeldError) as caught:
            take(state_dir, start(), ours, id="other")
        assert f"{KIND}{words}" in caught.value.cause
        assert "the container web" in caught.value.cause
        assert len(records.read_all(state_dir)) == 1
    else:
        take(state_dir, start(), ours, id="other")
        assert len(records.read_all(state_dir)) == 2


def numbered(*selected: str, kind: str = KIND, **paths: str) -> dict[str, Any]:
    """Return the record of selected devices on a host where A and B have nodes of these numbers.

    A number that both have is one node.
    """
    devices = [Device(name, name, {}, tuple(numbers.split())) for name, numbers in paths.items()]
    every = dict.fromkeys(path for device in devices for path in device.nodes)
    nodes = tuple(DeviceNode(path, 9, int(path)) for path in every)
    names = SimpleNamespace(NAME=kind.partition(".")[0], KIND=kind)
    machine = Inventory("", "/", "1", tuple(devices), nodes)
    has = [device for device in devices if device.id in selected]
    return records.given(names, machine, has, [])


NUMBERED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "renumbered": (numbered("A", A="0", B="1"), numbered("B", A="1", B="0"), "9:0"),
    "one node of two": (numbered("A", A="0 8", B="1 9"), numbered("B", A="2 9", B="3 8"), "9:8"),
    "gone, and another came": (numbered("A", A="0", B="1"), numbered("B", B="0"), "9:0"),
    "of another driver now": (numbered("A", A="0", kind=OTHER), numbered("B", B="0"), "9:0"),
    "as it was": (numbered("A", A="0", B="1"), numbered("B", A="0", B="1"), ""),
    "numbers that nobody has": (numbered("A", A="0", B="1"), numbered("B", A="1", B="2"), ""),
    "a node of both": (numbered("A", A="0 5", B="1 5"), numbered("B", A="0 5", B="1 5"), ""),
}


@pytest.mark.protects(
    "lease-renumbered",
    "an exclusive device is refused if a container still has its node from another device",
)
@pytest.mark.parametrize(("theirs", "ours", "node"), NUMBERED.values(), ids=NUMBERED)
def test_a_device_is_refused_while_its_renumbered_node_is_in_use(
    state_dir: str, start: Start, theirs: dict[str, Any], ours: dict[str, Any], node: str
) -> None:
    """After a driver is loaded again, a container can still open a node that it had before."""
    take(state_dir, start(), theirs)
    if node:
        with pytest.raises(HeldError, match=f"{KIND}=B's node {node} is in use by the container"):
            take(state_dir, start(), ours, id="other")
    else:
        take(state_dir, start(), ours, id="other")


@pytest.mark.parametrize(
    ("theirs", "ours", "refused"),
    [("0", "0", True), ("0", "1", False), ("all", "1", True), ("1", "all", True)],
)
def test_an_exclusive_cdi_device_in_use_is_refused(
    state_dir: str, start: Start, theirs: str, ours: str, refused: bool
) -> None:
    take(state_dir, start(), documents=[f"{KIND}={theirs}", f"{OTHER}=0"])
    if refused:
        with pytest.raises(HeldError, match=f"{KIND}={ours} is in use by"):
            take(state_dir, start(), documents=[f"{KIND}={ours}"])
    else:
        take(state_dir, start(), documents=[f"{KIND}={ours}"])


def test_devices_of_containers_started_before_exclusivity_are_held(
    state_dir: str, start: Start
) -> None:
    take(state_dir, start(), given("A"), kinds=())
    with pytest.raises(HeldError):
        take(state_dir, start(), given("A"))


def test_an_ended_container_holds_no_device(state_dir: str, start: Start) -> None:
    """This is so even while its process is a zombie."""
    first = start()
    take(state_dir, first, given("A"))
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    take(state_dir, start(), given("A"), id="next")
    assert [each["id"] for each in records.read_all(state_dir)] == ["next"]


def test_a_process_whose_first_thread_ended_keeps_its_lease(state_dir: str) -> None:
    script = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1000,))"
    script += ".start(); print('go', flush=True); ctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        status = Path(f"/proc/{process.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert process.poll() is None
        take(state_dir, process, given("A"))
        assert len(records.read_all(state_dir)) == 1
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_reused_process_number_holds_no_device(state_dir: str, start: Start) -> None:
    first = start()
    take(state_dir, first, given("A"))
    [file] = Path(state_dir, "containers").glob(f"{first.pid}-*")
    facts = {**json.loads(file.read_text()), "started": 1}
    file.write_text(json.dumps(facts))
    file.rename(file.with_name(records.name_of(facts)))
    take(state_dir, start(), given("A"), id="next")


def test_no_device_is_held_after_a_reboot(
    state_dir: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state folder may outlive a reboot, and a new process may reuse an old id and time."""
    take(state_dir, start(), given("A"))
    with monkeypatch.context() as again:
        for module in (records, leases):
            again.setattr(module, "boot_id", lambda: "another")
        take(state_dir, start(), given("A"))
    with pytest.raises(HeldError):
        take(state_dir, start(), given("A"))


def test_a_container_may_take_its_own_devices_again(state_dir: str, start: Start) -> None:
    process = start()
    take(state_dir, process, given("A"))
    take(state_dir, process, given("A"))
    take(state_dir, process, given("B"), add=True)
    [found] = records.read_all(state_dir)
    assert found["given"][0]["selected"] == ["A", "B"]


def test_a_container_that_fails_to_start_frees_its_device(state_dir: str, start: Start) -> None:
    process = start()
    entry = os.open(f"/proc/{process.pid}", os.O_PATH)
    facts = {**record(given("A")), "pid": process.pid}

    def fail() -> None:
        with records.RecordWriter(state_dir, entry, facts, exclusive=(KIND,)):
            assert len(records.read_all(state_dir)) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    os.close(entry)
    take(state_dir, start(), given("A"))


def test_a_lease_whose_record_cannot_be_written_is_refused(
    state_dir: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_users_folder", lambda: "")
    Path(state_dir).mkdir()
    Path(state_dir).chmod(0o777)
    with pytest.raises(HeldError, match=f"{KIND}=A can't be written: the folder of"):
        take(state_dir, start(), given("A"))
    take(state_dir, start(), given("A"), kinds=(OTHER,))
    with (
        pytest.raises(HeldError),
        records.RecordWriter(state_dir, -1, record(given("A")), exclusive=(KIND,)),
    ):
        pass


def test_a_lease_is_refused_when_the_disk_is_full(
    state_dir: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, space = os.write, [10]  # bytes

    def write_some(fd: int, data: bytes) -> int:
        if not space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: space.pop()])

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(HeldError, match="No space left"):
        take(state_dir, start(), given("A"))
    monkeypatch.undo()
    take(state_dir, start(), given("A"))


@pytest.mark.protects(
    "record-unseen",
    "a container keeps its devices if its process can't be examined",
    instead="return True",
    only="can_not_be_looked_at and process",
)
@pytest.mark.protects(
    "lease-every",
    "an exclusive device isn't allocated if a container's record can't be read",
    instead="found = read_folder(self._folder, [])",
)
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("what", ["process", "record"])
def test_a_device_whose_holder_can_not_be_looked_at_stays_held(
    state_dir: str, start: Start, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    """If a check fails, for example for lack of memory, a running container keeps its devices."""
    holder, read = start(), records._read
    take(state_dir, holder, given("0"))

    def fail(path: str, folder: int | None = None) -> bytes:
        if path.startswith(f"/proc/{holder.pid}/" if what == "process" else f"{holder.pid}-"):
            raise OSError(number, os.strerror(number))
        return read(path, folder)

    monkeypatch.setattr(records, "_read", fail)
    with pytest.raises(HeldError):
        take(state_dir, start(), given("0"))
    monkeypatch.undo()
    with pytest.raises(HeldError, match="in use"):
        take(state_dir, start(), given("0"))


@pytest.mark.protects(
    "lease-every",
    "an exclusive device isn't allocated if a container's record can't be read",
    instead="found = read_folder(self._folder, [])",
)
@pytest.mark.parametrize("text", ["", "{", '{"version": 3}', '{"version": 2, "given": 7}'])
def test_a_damaged_record_holds_every_device_until_its_process_ends(
    state_dir: str, start: Start, text: str
) -> None:
    """The container's devices are unknown until its process exits."""
    holder = start()
    take(state_dir, holder, given("A"))
    [file] = Path(state_dir, "containers").glob(f"{holder.pid}-*")
    file.write_text(text)
    with pytest.raises(HeldError, match=f"process {holder.pid} has: {file} is damaged"):
        take(state_dir, start(), given("B"))
    take(state_dir, start(), given("B"), kinds=(OTHER,))
    holder.kill()
    holder.wait()
    take(state_dir, start(), given("A"))


def test_a_device_leased_in_another_pid_namespace_is_refused(
    state_dir: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its container may have ended unseen, so the error says how to remove the record."""
    holder = start()
    take(state_dir, holder, given("0"))
    other = proc.pids() + 1
    monkeypatch.setattr(proc, "pids", lambda: other)
    with pytest.raises(HeldError) as caught:
        take(state_dir, start(), given("0"))
    assert f"remove its record, containers/{holder.pid}-" in caught.value.remedy
    assert [each["pid"] for each in records.read_every(state_dir, "0")] == [holder.pid]
    assert records.read_all(state_dir) == []
    take(state_dir, start(), given("1"))
    assert len(records.read_all(state_dir)) == 1


@pytest.mark.protects(
    "lease-lock",
    "an exclusive device is allocated to only one of several concurrent requests",
    instead="return folder.lock(f'{LOCK}-{proc.os.getpid()}', _WAIT)",
)
def test_a_lease_is_refused_while_another_process_keeps_the_lock(
    state_dir: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(state_dir, start(), given("A"))
    monkeypatch.setattr(leases, "_WAIT", 0.05)
    with Path(state_dir, "containers/lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HeldError, match=r"has locked .*/containers/lock"):
            take(state_dir, start(), given("B"))
        take(state_dir, start(), given("B"), kinds=(OTHER,))
    take(state_dir, start(), given("C"))


TAKE = f"""
import os, sys, time
sys.path.insert(0, {str(Path(records.__file__).parents[3])!r})
from gpuhook.base.errors import HeldError
from gpuhook.core.records import records
state_dir, device, go = sys.argv[1:]
from gpuhook.base.oci.spec import ContainerState
facts = records.describe(ContainerState(device, os.getpid(), "", None), None, [])
facts["given"] = [{{"vendor": "acme", "kind": {KIND!r}, "request": {{"source": "", "devices": []}},
    "selected": [device], "nodes": {{device: []}}, "devices": []}}]
read = records.read_folder
records.read_folder = lambda *a, **b: (read(*a, **b), time.sleep(0.05))[0]  # space for others
while not os.path.exists(go):
    time.sleep(0.001)
try:
    entry = os.open("/proc/self", os.O_PATH)
    with records.RecordWriter(state_dir, entry, facts, exclusive=({KIND!r},)):
        print("won", flush=True)
except HeldError:
    print("lost", flush=True)
time.sleep(1000)
"""


@pytest.mark.protects(
    "lease-lock",
    "an exclusive device is allocated to only one of several concurrent requests",
    instead="return folder.lock(f'{LOCK}-{proc.os.getpid()}', _WAIT)",
)
def test_concurrent_requests_for_a_device_have_one_winner(state_dir: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    words = [sys.executable, "-c", TAKE, state_dir]
    running = [
        subprocess.Popen([*words, f"N{number % 3}", str(go)], stdout=subprocess.PIPE, text=True)
        for number in range(18)
    ]
    try:
        go.touch()
        said = [process.stdout.readline().strip() for process in running if process.stdout]
        winners = [number % 3 for number, word in enumerate(said) if word == "won"]
        assert sorted(winners) == [0, 1, 2]
        assert said.count("lost") == 15
    finally:
        for process in running:
            process.kill()
            process.communicate()


NAMES = {
    "abc": {},
    "docker's container abc": {"engine": "docker"},
    r"container abc (ns/'po\x1b[2J d'/'\xe9')": {
        "namespace": "ns",
        "pod": "po\x1b[2J d",
        "container": "é",
    },
    "container abc (ns/pod/web)": {"namespace": "ns", "pod": "pod", "container": "web"},
    "container of process 7": {"id": "", "pid": 7},
    # The container's id as its engine shows it.
    "docker's container 0123456789ab": {"engine": "docker", "id": "0123456789abcdef" * 4},
    "docker's container training-job": {"engine": "docker", "id": "training-job"},
    f"docker's container {'g' * 64}": {"engine": "docker", "id": "g" * 64},
}


@pytest.mark.parametrize(("words", "facts"), NAMES.items(), ids=NAMES.keys())
def test_a_holders_name_has_engine_container_and_escaped_pod(
    words: str, facts: dict[str, Any]
) -> None:
    assert leases.holder({**record(name="abc"), **facts}).endswith(words)


def test_a_lease_is_refused_when_no_lock_can_be_made(
    state_dir: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(leases, "lock", refuse)
    with pytest.raises(HeldError, match="Read-only file system"):
        take(state_dir, start(), given("A"))
