"""Records of containers: written by root for root, and void once the process is gone."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import damaged
import pytest

from gpuhook.base.host import proc
from gpuhook.base.oci.spec import ContainerState
from gpuhook.core.contract import Grant, Vendor
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import records
from gpuhook.core.request.reader import Request
from gpuhook.vendors import registry

SOURCES = Path(records.__file__).parents[3]
BUNDLE = "/run/containerd/io.containerd.runtime.v2.task/moby/abc"


@pytest.fixture(autouse=True)
def pids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The initial pid namespace, even if the tests run in another."""
    monkeypatch.setattr(proc, "pids", lambda: proc.FIRST_PIDS)


@pytest.fixture
def state_dir(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A stand-in for a container's first process."""
    made = subprocess.Popen(["sleep", "1000"])
    yield made
    made.kill()
    made.wait()


@pytest.fixture
def pid(process: "subprocess.Popen[bytes]") -> int:
    return process.pid


def described(pid: int, **facts: Any) -> dict[str, Any]:
    """Return a record with additional facts."""
    return {**records.describe(ContainerState("web", pid, BUNDLE, None), None, []), **facts}


def write(state_dir: str, pid: int, *, failing: bool = False, **facts: Any) -> None:
    entry = os.open(f"/proc/{pid}", os.O_PATH)
    try:
        with records.RecordWriter(state_dir, entry, described(pid, **facts)):
            if failing:
                raise ZeroDivisionError
    finally:
        os.close(entry)


def files(state_dir: str) -> list[str]:
    return sorted(path.name for path in Path(state_dir, "containers").iterdir())


def test_a_written_record_is_read_back(state_dir: str, pid: int) -> None:
    write(state_dir, pid, id="web", given=[])
    [record] = records.read_all(state_dir)
    assert not records.are_unseen(state_dir)
    assert (record["id"], record["pid"], record["given"]) == ("web", pid, [])
    assert files(state_dir) == [f"{pid}-{record['started']}"]


def test_record_files_are_accessible_to_their_owner_only(state_dir: str, pid: int) -> None:
    old = os.umask(0)
    try:
        write(state_dir, pid)
    finally:
        os.umask(old)
    folder = Path(state_dir, "containers")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_records_in_a_folder_writable_by_others_are_ignored(state_dir: str, pid: int) -> None:
    write(state_dir, pid)
    Path(state_dir, "containers").chmod(0o770)
    assert records.read_all(state_dir) == []
    Path(state_dir, "containers").chmod(0o700)
    Path(state_dir).chmod(0o777)
    assert records.read_all(state_dir) == []


def test_failed_injection_has_no_record(state_dir: str, pid: int) -> None:
    with pytest.raises(ZeroDivisionError):
        write(state_dir, pid, failing=True)
    assert files(state_dir) == []


def test_container_starts_where_no_record_can_be_written(tmp_path: Path, pid: int) -> None:
    (tmp_path / "state").write_text("a file")
    write(str(tmp_path / "state"), pid)
    write("/proc/none/state", pid)


def test_the_record_of_an_ended_process_is_removed(state_dir: str) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write(state_dir, gone.pid)
    gone.communicate()
    assert records.read_all(state_dir) == []
    assert files(state_dir) == []


def test_files_other_than_records_stay_also_while_they_are_written(
    state_dir: str, pid: int
) -> None:
    write(state_dir, pid)
    folder = Path(state_dir, "containers")
    others = ["lock", "choices", "changes"]
    others += [f".{name}" for name in others]
    for name in others:
        (folder / name).touch()
    for _ in range(len(others) + 1):
        write(state_dir, pid)  # checks some of the others each time
    records.read_all(state_dir)
    assert {*files(state_dir)} > {*others}


@pytest.mark.parametrize("is_removed", [False, True], ids=["ended", "removed"])
def test_a_container_whose_start_ends_while_records_are_read_is_found(
    state_dir: str, pid: int, is_removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is new: when the folder was listed, only the record of its start existed."""
    start = subprocess.Popen(["sleep", "1000"])
    write(state_dir, start.pid, starting=True)
    [name] = files(state_dir)
    is_gone = records.is_gone

    def and_end(asked: str, ours: int | None = None) -> bool:
        if asked == name and start.returncode is None:
            with monkeypatch.context() as plain:
                plain.setattr(records, "is_gone", is_gone)
                write(state_dir, pid)
            start.kill()
            start.wait()
            if is_removed:  # by another process, after it was listed here
                Path(state_dir, "containers", name).unlink()
                return False
        return is_gone(asked, ours)

    monkeypatch.setattr(records, "is_gone", and_end)
    assert [record["pid"] for record in records.read_all(state_dir)] == [pid]
    assert len(files(state_dir)) == 1


@pytest.mark.protects(
    "record-began",
    "a record of a process that has exited is ignored, even if its id is reused",
    instead="return _began(status) < 0 or _has_ended(status)",
)
def test_a_record_whose_process_number_was_reused_is_removed(state_dir: str, pid: int) -> None:
    write(state_dir, pid)
    folder = Path(state_dir, "containers")
    [record] = folder.iterdir()
    earlier = int(record.name.partition("-")[2]) - 1
    data = {**json.loads(record.read_text()), "started": earlier}
    record.unlink()
    (folder / f"{pid}-{earlier}").write_text(json.dumps(data))
    assert records.read_all(state_dir) == []
    assert files(state_dir) == []


OTHER = 4026532999  # the number of a pid namespace that isn't the first


@pytest.mark.protects(
    "pids-unseen",
    "a record from another pid namespace is kept while its process may still run",
    instead="return True",
)
@pytest.mark.protects(
    "other-pids",
    "process ids of another pid namespace aren't mistaken for local ones",
    instead="return found",
)
def test_records_are_left_alone_from_another_pid_namespace(
    state_dir: str, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process id means another process there, or none, so nothing is known of such records."""
    write(state_dir, process.pid)
    process.kill()
    process.wait()
    [name] = files(state_dir)
    with monkeypatch.context() as patch:
        patch.setattr(proc, "pids", lambda: OTHER)
        assert not records.is_gone(name)
        assert records.read_all(state_dir) == []
        assert records.are_unseen(state_dir)
        write(state_dir, os.getpid())
        assert name in files(state_dir)
    assert not records.are_unseen(state_dir)
    assert records.read_all(state_dir) == []
    assert name not in files(state_dir)


@pytest.mark.protects(
    "pids-unseen",
    "a record from another pid namespace is kept while its process may still run",
    instead="return True",
)
@pytest.mark.protects(
    "other-pids",
    "process ids of another pid namespace aren't mistaken for local ones",
    instead="return found",
)
def test_the_initial_pid_namespace_removes_records_of_ended_processes(
    state_dir: str, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(proc, "pids", lambda: OTHER)
        write(state_dir, process.pid, id="web")
        assert [each["id"] for each in records.read_all(state_dir)] == ["web"]
        assert not records.are_unseen(state_dir)
    [name] = files(state_dir)
    assert name.endswith(f"-{OTHER}")
    assert records.read_all(state_dir) == []  # here, its pid belongs to another process
    assert files(state_dir) == [name]
    process.kill()
    process.wait()
    assert records.read_all(state_dir) == []
    assert files(state_dir) == []


@pytest.mark.protects(
    "hidden-process",
    "a container's record is kept if /proc hides its process from the user",
    instead="return False",
)
def test_the_record_of_a_process_hidden_by_proc_stays(
    state_dir: str, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hidepid=2, the process of a container with another USER isn't visible in /proc."""
    write(state_dir, pid)
    read = records._read

    def hidden(path: str, folder: int | None = None) -> bytes:
        if path.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return read(path, folder)

    monkeypatch.setattr(records, "_read", hidden)
    assert [each["pid"] for each in records.read_all(state_dir)] == [pid]
    for name in (f"{2**22 + 1}-1", f"{2**80}-1", "0-1"):
        assert records.is_gone(name), name


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"version": 1}', '{"version": 2}', '{"version": 2, "pid": 1}', "\xff"],
)
def test_a_record_of_unknown_form_is_ignored_and_reported(
    state_dir: str, pid: int, text: str
) -> None:
    write(state_dir, pid)
    [record] = Path(state_dir, "containers").iterdir()
    record.write_text(text, encoding="latin-1")
    unclear: list[str] = []
    assert records.read_all(state_dir, unclear) == []
    assert files(state_dir) == unclear == [record.name]


def test_a_damaged_record_is_reported_and_sound_ones_are_returned(state_dir: str, pid: int) -> None:
    """This holds for damage anywhere in the record, and the error names its file."""
    write(state_dir, os.getpid(), id="sound")
    limits = [{"vendor": "nvidia", "device": "0", "id": "G1", "bytes": 7}]
    nodes = {"acme/npu": {"7:1": "acme/npu=0"}}
    gifts = [given("nvidia", "G1", parent="G")]
    more: dict[str, Any] = {
        "limits": limits,
        "nodes": nodes,
        "documents": ["acme/npu=0"],
        "boot": "this",
    }
    write(state_dir, pid, given=gifts, cgroups={"2": "/web"}, **more)
    assert len(records.read_all(state_dir)) == 2
    [file] = Path(state_dir, "containers").glob(f"{pid}-*")
    data = json.loads(file.read_text())
    others: list[Any] = [{**data, "cgroups": {"x": "/web"}}, {**data, "pids": None}, None, {}, []]
    others += damaged.without(data, *(data.keys() - {"cgroups", *more}))
    for each in [*damaged.every(data), *others]:
        file.write_text(json.dumps(each))
        unclear: list[str] = []
        found = [record["id"] for record in records.read_all(state_dir, unclear)]
        assert (found, unclear) == (["sound"], [file.name]), each


def test_records_of_ended_containers_do_not_accumulate(state_dir: str, pid: int) -> None:
    """Each start checks a few others, so unlisted records don't stay forever."""
    write(state_dir, pid)
    folder = Path(state_dir, "containers")
    for number in range(100):
        (folder / f"{2**22 + number}-1").write_text("{}")
        (folder / f".{2**22 + number}-1").write_text("half written")
    for _ in range(100):
        write(state_dir, pid)
    assert len(files(state_dir)) == 1


def test_a_start_checks_only_a_few_other_records(
    state_dir: str, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(state_dir, pid)
    for number in range(100):
        Path(state_dir, "containers", f"{2**22 + number}-1").write_text("{}")
    write(state_dir, pid)
    assert len(files(state_dir)) >= 96


@pytest.mark.protects(
    "pod-annotation",
    "a pod's annotation can't override the engine that the bundle's path shows",
    instead="if found and _MANAGER not in annotations:",
)
@pytest.mark.parametrize(
    ("bundle", "annotations", "engine"),
    [
        (BUNDLE, {}, "docker"),
        (BUNDLE.replace("moby", "k8s.io"), {}, "kubernetes"),
        (BUNDLE.replace("moby", "default"), {}, "containerd"),
        ("/var/lib/containers/x/userdata", {"io.container.manager": "libpod"}, "podman"),
        ("/var/lib/containers/x/userdata", {"io.container.manager": "cri-o"}, "cri-o"),
        ("/bundle", {"io.container.manager": ["libpod"]}, ""),
        (BUNDLE, {"io.container.manager": "cri-o"}, "docker"),
        ("/bundle", {}, ""),
    ],
)
def test_the_engine_is_recognised_from_bundle_and_annotations(
    bundle: str, annotations: dict[str, Any], engine: str
) -> None:
    assert records.engine_of(bundle, annotations) == engine


CONTAINERD = {
    "io.kubernetes.cri.sandbox-namespace": "ns",
    "io.kubernetes.cri.sandbox-name": "pod",
    "io.kubernetes.cri.container-name": "main",
    "io.kubernetes.cri.sandbox-uid": "uid",
    "io.kubernetes.cri.image-name": "image",
}
LABELS = {
    "io.kubernetes.pod.namespace": "ns",
    "io.kubernetes.pod.name": "pod",
    "io.kubernetes.container.name": "main",
    "io.kubernetes.pod.uid": "uid",
}
CRIO = {
    "io.container.manager": "cri-o",
    "io.kubernetes.cri-o.Labels": json.dumps(LABELS),
    "io.kubernetes.cri-o.ImageName": "image",
}
OF_CRI = BUNDLE.replace("moby", "k8s.io")
OF_CRIO = "/run/containers/storage/overlay-containers/x/userdata"
HOSTILE = dict.fromkeys((*CONTAINERD, *LABELS), "\x1b[2J of somebody else")


@pytest.mark.parametrize(
    ("bundle", "annotations"),
    [
        (OF_CRI, CONTAINERD),
        (OF_CRIO, CRIO),
        # A pod's author may write any other annotations, whatever their names; they don't count.
        (OF_CRI, {**HOSTILE, **dict.fromkeys(CRIO, "x"), **CONTAINERD}),
        (OF_CRIO, {**HOSTILE, **CRIO}),
    ],
    ids=["containerd", "CRI-O", "in containerd's", "in CRI-O's"],
)
def test_pod_names_are_read_only_from_the_engines_own_annotations(
    bundle: str, annotations: dict[str, Any]
) -> None:
    engine = records.engine_of(bundle, annotations)
    assert engine == ("kubernetes" if bundle == OF_CRI else "cri-o")
    found = records._names(engine, annotations)
    assert found == {
        "namespace": "ns", "pod": "pod", "container": "main", "uid": "uid", "image": "image"
    }  # fmt: skip


@pytest.mark.parametrize("bundle", [OF_CRI, OF_CRIO])
def test_names_in_annotations_an_engine_did_not_set_are_ignored(bundle: str) -> None:
    """A pod can't supply names that its engine leaves out, such as those of a later version."""
    other = {**CRIO, "io.container.manager": "libpod"} if bundle == OF_CRI else CONTAINERD
    annotations = {**HOSTILE, **other}
    if bundle == OF_CRI:
        annotations = {key: annotations[key] for key in annotations if key not in CONTAINERD}
    else:
        annotations["io.container.manager"] = "cri-o"
    found = records._names(records.engine_of(bundle, annotations), annotations)
    assert set(found.values()) == {""}


@pytest.mark.protects(
    "engines-own-annotations",
    "pod names are read only from annotations that the engine itself writes",
    instead="else:",
)
@pytest.mark.parametrize("bundle", [BUNDLE, BUNDLE.replace("moby", "default"), "/bundle", OF_CRIO])
def test_containers_outside_kubernetes_get_no_pod_names(bundle: str) -> None:
    annotations = {**CONTAINERD, **LABELS, **CRIO, "io.container.manager": "libpod"}
    found = records._names(records.engine_of(bundle, annotations), annotations)
    assert set(found.values()) == {""}


@pytest.mark.parametrize(
    ("annotations", "pod"),
    [
        ({"io.kubernetes.cri-o.Labels": "{"}, ""),
        ({"io.kubernetes.cri-o.Labels": "[]"}, ""),
        ({"io.kubernetes.cri-o.Labels": 3}, ""),
        ({"io.kubernetes.cri-o.Labels": "[" * 10**5}, ""),
        ({"io.kubernetes.cri-o.Labels": '{"io.kubernetes.pod.name": ["p"]}'}, ""),
        ({"io.kubernetes.cri-o.Labels": json.dumps({"io.kubernetes.pod.name": "p" * 9999})},
         "p" * 256),
    ],
)  # fmt: skip
def test_malformed_cri_o_labels_are_ignored(annotations: dict[str, Any], pod: str) -> None:
    assert records._names("cri-o", annotations)["pod"] == pod


def given(vendor: str, *devices: str, parent: str = "") -> dict[str, Any]:
    """Return a vendor's entry in a record; a device's last character is the number of its node."""
    numbers = {device: [[7, int(device[-1])]] for device in devices}
    return {
        "vendor": vendor,
        "kind": f"{vendor}.com/gpu",
        "request": {"source": "none", "devices": []},
        "selected": list(devices),
        "nodes": {**numbers, **({parent: [[7, 9]]} if parent else {})},
        "devices": [pair for pairs in numbers.values() for pair in pairs],
    }


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (True, [given("acme", "A1"), given("nvidia", "G1", "G2")]),
        (False, [given("nvidia", "G2")]),
    ],
)
def test_devices_recorded_by_other_hooks_are_kept_only_when_adding(
    state_dir: str, pid: int, add: bool, expected: list[Any]
) -> None:
    write(state_dir, pid, given=[given("acme", "A1"), given("nvidia", "G1")])
    entry = os.open(f"/proc/{pid}", os.O_PATH)
    record = described(pid, given=[given("nvidia", "G2")])
    with records.RecordWriter(state_dir, entry, record, add=add):
        pass
    os.close(entry)
    [found] = records.read_all(state_dir)
    assert found["given"] == expected


def test_first_process_is_the_parent_within_one_mount_namespace() -> None:
    """A hook in gpuhook's own mount namespace is started by the container's first process."""
    code = f"import sys; sys.path.insert(0, {str(SOURCES)!r})\n"
    code += "from gpuhook.core.records import records"
    code += "; pid, process = records.first_process(); print(pid, records.started(process) > 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(os.getpid()), "True"]


def test_a_process_that_is_not_known_has_no_record(state_dir: str) -> None:
    with records.RecordWriter(state_dir, -1, {"version": records.VERSION, "pid": 0}):
        pass
    assert records.read_all(state_dir) == []


def test_the_start_time_is_read_from_the_kernel(process: "subprocess.Popen[bytes]") -> None:
    entry = os.open(f"/proc/{process.pid}", os.O_PATH)
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        assert records.started(entry) == int(fields[19])
        process.kill()
        process.wait()
        with pytest.raises(OSError, match="process"):
            records.started(entry)
    finally:
        os.close(entry)


def test_any_process_name_leaves_the_start_time_readable(tmp_path: Path) -> None:
    named = tmp_path / "a) b 1 2 3 (c"
    named.symlink_to("/bin/sleep")
    sleeper = subprocess.Popen([named, "1000"])
    try:
        entry = os.open(f"/proc/{sleeper.pid}", os.O_PATH)
        ours = os.open("/proc/self", os.O_PATH)
        assert records.started(entry) >= records.started(ours)
        os.close(entry)
        os.close(ours)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_record_stays_small_whatever_image_and_user_wrote() -> None:
    names = tuple(f"{number}" * 60 for number in range(1000))
    request = Request("acme", source="environment", devices=names, selectors=names)
    grant = Grant(Vendor(), request, Inventory("acme", "/", "1", (), ()), ())
    grant.vendor.names = registry.BUILT_IN["nvidia"]
    state = ContainerState("id", 7, BUNDLE, None)
    for annotations in (None, ["none"], {"io.kubernetes.cri.sandbox-name": "x" * 10**6}):
        record = records.describe(state, annotations, [grant])
        assert len(json.dumps(record)) < 4096
        assert (record["id"], record["pid"], record["engine"]) == ("id", 7, "docker")
