"""Choices of free devices, by devices and containers, and the records about them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machines
import paper
import pytest
from steps import edit, resolve

from gpuhook import prestart_hook
from gpuhook.base.config.model import Config
from gpuhook.base.errors import AnyDeviceError, HeldError, RequestError, UnknownDeviceError
from gpuhook.base.oci.spec import ContainerState, Spec
from gpuhook.base.state_directory import StateDirectory
from gpuhook.core.inventory import nearness
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.records import choice, leases, records
from gpuhook.vendors import registry

VENDORS = [name for name in registry.BUILT_IN if name != "nvidia"]
VARIABLES = [(name, variable) for name in VENDORS for variable in registry.BUILT_IN[name].VARIABLES]
Start = Callable[..., list[str]]


class Host:
    """A host with devices of one vendor, and containers that each live as long as a process."""

    def __init__(self, inventory: Inventory, state: Path) -> None:
        self.inventory = inventory
        self.names = registry.BUILT_IN[inventory.vendor]
        self.config = Config()
        self.config.state_dir = str(state)
        self.variable = next(iter(self.names.VARIABLES))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, word: str = "any", **more: Any) -> list[str]:
        """Choose devices for a starting container, and return their labels."""
        if name not in self.running:
            code = "import time; time.sleep(1000)"
            self.running[name] = subprocess.Popen([sys.executable, "-c", code])
        return self.labels(word, container=name, starter=self.running[name].pid, **more)

    def labels(
        self, word: str, starter: int | None = 0, variable: str = "", **more: Any
    ) -> list[str]:
        spec = {"process": {"env": [f"{variable or self.variable}={word}"]}}
        spec["annotations"] = more.pop("annotations", {})
        found = resolve(
            spec, self.config, inventories={self.inventory.vendor: self.inventory},
            starter=starter, **more,
        )  # fmt: skip
        assert found is not None
        return [device.label for grant in found.grants for device in grant.devices]

    def end(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    @property
    def folder(self) -> Path:
        return Path(self.config.state_dir) / records.FOLDER


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def of(inventory: Inventory) -> Host:
        made.append(Host(inventory, tmp_path / "state"))
        return made[-1]

    yield of
    for each in made:
        for name in [*each.running]:
            each.end(name)


@pytest.fixture
def gpus(host: Callable[..., Host]) -> Host:
    return host(machines.machine(*(machines.gpu(index, index) for index in range(4))))


# Which devices ------------------------------------------------------------------------------------


@pytest.mark.protects(
    "choice-free", "an automatically chosen device is never another container's exclusive device"
)
@pytest.mark.parametrize(("vendor", "variable"), VARIABLES)
def test_the_word_any_chooses_free_devices_of_each_vendor(
    host: Callable[..., Host], tmp_path: Path, vendor: str, variable: str
) -> None:
    one = host(paper.machine(vendor, tmp_path / vendor))
    every = [each.label for each in one.inventory.devices if not each.parent]
    assert one.start("a", variable=variable) == every[:1]
    assert one.start("b", "Any:2", variable=variable) == every[1:3]
    assert one.start("c", variable=variable) == every[3:4]
    one.end("b")
    one.config.exclusive = (one.names.KIND,)
    assert one.start("d", "ANY:2", variable=variable) == every[1:3]
    with pytest.raises(HeldError, match="0 of 4 are free here"):
        one.start("e", variable=variable)


def test_devices_with_the_fewest_containers_are_chosen(gpus: Host) -> None:
    assert gpus.start("a", "any:3") == ["0", "1", "2"]
    assert gpus.start("b", "any:2") == ["0", "3"], "3 has none, and 0 is the first with one"
    assert gpus.start("c", "any:2") == ["1", "2"]
    gpus.end("a")
    assert gpus.start("d") == ["0"]
    assert gpus.start("e", "any:4") == ["0", "1", "2", "3"]


def test_among_equal_devices_near_ones_are_chosen(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    """Devices are near by NUMA node, or else by their place in the PCI tree."""
    inventory = machines.machine(*(machines.gpu(index, index) for index in range(4)))
    inventory.root = str(tmp_path)
    for device, node in zip(inventory.devices, "0101", strict=True):
        folder = tmp_path / f"sys/bus/pci/devices/{device.bus_id}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    one = host(inventory)
    assert one.start("a", "any:2") == ["0", "2"]
    assert one.start("b", "any:2") == ["1", "3"]


def test_the_set_of_devices_nearest_to_each_other_is_chosen() -> None:
    def score(one: str, other: str) -> int:
        return 10 - abs(int(one) - int(other))

    assert nearness.best([], ["1", "5", "6", "9"], 2, score) == ["5", "6"]
    assert nearness.best(["9"], ["1", "5", "6"], 1, score) == ["6"]


def test_neuron_devices_are_chosen_side_by_side_only(
    host: Callable[..., Host], tmp_path: Path
) -> None:
    one = host(paper.machine("neuron", tmp_path / "neuron"))
    one.config.exclusive = (one.names.KIND,)
    assert [one.start(name) for name in "abcd"] == [["0"], ["1"], ["2"], ["3"]]
    for name in "ac":
        one.end(name)
    with pytest.raises(HeldError, match="any 2 Neuron devices, side by side; 2 of 4 are free"):
        one.start("e", "any:2")
    one.end("b")
    assert one.start("e", "any:2") == ["0", "1"]


@pytest.mark.protects(
    "choice-free", "an automatically chosen device is never another container's exclusive device"
)
def test_mig_devices_are_chosen_only_where_no_gpu_is_whole(host: Callable[..., Host]) -> None:
    """A GPU in MIG mode can't be used as a whole, even before it has MIG devices."""
    migs = machines.mig(0, 1, 12, 13), machines.mig(1, 2, 21, 22)
    mixed = machines.machine(
        machines.gpu(0, 0), machines.gpu(1, 1), machines.gpu(3, 3, migs), machines.gpu(4, 4)
    )
    empty = mixed.gpus[1]
    empty.mig_enabled = True
    one = host(mixed)
    assert [one.start(name) for name in "abc"] == [["0"], ["4"], ["0"]]
    with pytest.raises(UnknownDeviceError, match="any 3 GPUs, and this host has 2 that can be"):
        one.start("d", "any:3")
    divided = host(machines.machine(machines.gpu(3, 3, migs)))
    divided.config.state_dir += "-divided"
    divided.config.exclusive = ("nvidia.com/gpu",)
    assert [divided.start(name) for name in "ab"] == [["3:0"], ["3:1"]]
    with pytest.raises(HeldError, match="3:0 in use by the container a, 3:1 in use by the"):
        divided.start("c")


def test_containers_with_a_whole_gpu_count_for_its_mig_devices(host: Callable[..., Host]) -> None:
    migs = machines.mig(0, 1, 12, 13), machines.mig(1, 2, 21, 22)
    one = host(machines.machine(machines.gpu(3, 3, migs)))
    kept(one, "x", "3:0")
    assert one.start("a") == ["3:1"]
    kept(one, "y", "3")
    assert one.start("b") == ["3:0"], "each has two"


def kept(host: Host, name: str, *labels: str) -> None:
    """Write the record of a running container that names its devices."""
    devices = [each for each in host.inventory.devices if each.label in labels]
    code = "import time; time.sleep(1000)"
    host.running[name] = subprocess.Popen([sys.executable, "-c", code])
    pid = host.running[name].pid
    record = records.describe(ContainerState(name, pid, "/b", None), {}, [])
    record["given"] = [records.given(host.names, host.inventory, devices, ())]
    process = os.open(f"/proc/{pid}", os.O_PATH)
    with records.RecordWriter(host.config.state_dir, process, record):
        os.close(process)


def test_unusable_devices_are_never_chosen(gpus: Host) -> None:
    devices = list(gpus.inventory.devices)
    devices[0].state = "it is broken"
    assert gpus.start("a") == ["1"]
    with pytest.raises(UnknownDeviceError, match="this host has 3 that can be used"):
        gpus.start("b", "any:4")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("any,0", "for 'any' and for '0' of NVIDIA's devices, and any can't be combined"),
        ("0-1,any:2", "for 'any:2' and for '0-1' of NVIDIA's"),
        ("any,ANY:2", "for 'any' and for 'ANY:2' of NVIDIA's"),
        ("nvidia.com/gpu=any,nvidia.com/gpu=1", "for 'any' and for '1' of NVIDIA's"),
        *((f"any:{number}", f"'any:{number}' isn't a number of devices")
          for number in ("", "0", "00", "01", "-1", "+1", "1.0", "x", "2:3", "99999")),
    ],
)  # fmt: skip
def test_an_invalid_choice_of_free_devices_is_refused(gpus: Host, word: str, says: str) -> None:
    with pytest.raises(RequestError, match=f".*{says.replace('+', '.')}"):
        gpus.start("a", word)
    assert not gpus.folder.exists()


@pytest.mark.parametrize(
    ("word", "labels"),
    [
        ("any,any", ["0"]),
        ("any,ANY", ["0"]),
        ("any,all", ["0", "1", "2", "3"]),
        ("any,none", []),
        ("nvidia.com/gpu=any:2", ["0", "1"]),
        ("runtime.nvidia.com/gpu=any", ["0"]),
    ],
)
def test_any_combined_with_other_names_selects_as_expected(
    gpus: Host, word: str, labels: list[str]
) -> None:
    assert gpus.start("a", word) == labels


# For whom -----------------------------------------------------------------------------------------

PODS = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/a/config.json"
CRIO = {"io.container.manager": "cri-o"}


@pytest.mark.protects(
    "choice-pod", "no device is chosen automatically in a pod, where the kubelet allocates devices"
)
@pytest.mark.parametrize("more", [{"path": PODS}, {"annotations": CRIO}])
def test_any_is_refused_in_a_pod(gpus: Host, more: dict[str, Any]) -> None:
    """In a pod, the kubelet chooses devices, or the gate's verdict does (see the gate's tests)."""
    with pytest.raises(RequestError, match="in a pod, whose devices the kubelet allocates"):
        gpus.start("a", **more)


def test_any_is_refused_outside_a_container_start(gpus: Host) -> None:
    """A root folder (gpuhook apply) can't ask for free devices, because its use has no end."""
    with pytest.raises(AnyDeviceError, match="only decided when gpu-py or gpuhook's hook starts"):
        gpus.labels("any", starter=None)


def test_the_hook_finds_the_devices_the_runtime_chose(gpus: Host, tmp_path: Path) -> None:
    """It finds them by the runtime's record, whatever its process and the bundle's path are."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (tmp_path / "link").symlink_to(bundle)
    assert gpus.start("a", path=f"{bundle}/config.json") == ["0"]
    assert gpus.start("b") == ["1"]
    for _ in range(2):
        found = gpus.labels(
            "any", starter=os.getpid(), container="a", path=f"{tmp_path}/link/config.json"
        )
        assert found == ["0"]
    assert gpus.labels("any", starter=os.getpid(), container="a", path="/b/config.json") == ["2"]


def test_a_containers_record_replaces_its_start_record(gpus: Host) -> None:
    """The start isn't counted, refused or listed in addition to the container."""
    gpus.config.exclusive = ("nvidia.com/gpu",)
    assert gpus.start("a", path="/b/config.json") == ["0"]
    assert records.read_all(gpus.config.state_dir) == []
    [starting] = records.read_every(gpus.config.state_dir, "x")
    process = os.open(f"/proc/{os.getpid()}", os.O_PATH)
    record = {**starting, "pid": os.getpid(), "started": records.started(process)}
    del record["starting"]
    with records.RecordWriter(
        gpus.config.state_dir, process, record, exclusive=gpus.config.exclusive
    ):
        assert [each["id"] for each in records.read_all(gpus.config.state_dir)] == ["a"]
        gpus.config.exclusive = ()
        assert [gpus.start(name) for name in "bcde"] == [["1"], ["2"], ["3"], ["0"]]
    os.close(process)


@pytest.mark.protects(
    "choice-lock",
    "containers that start at the same time choose different free devices",
    instead="if True:",
)
def test_concurrent_starts_choose_different_devices(
    gpus: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start reads the records of the starts before it."""
    read = records.read_folder

    def read_slowly(
        folder: StateDirectory, unclear: list[str] | None = None
    ) -> list[dict[str, Any]]:
        found = read(folder, unclear)
        time.sleep(0.03)
        return found

    monkeypatch.setattr(records, "read_folder", read_slowly)
    reader, writer = os.pipe()
    children = []
    for number in range(8):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                found = gpus.labels("any", starter=os.getpid(), container=f"at-once-{number}")
                os.write(writer, found[0].encode())
                time.sleep(60)
            finally:
                os._exit(1)
    os.close(writer)
    try:
        labels = "".join(os.read(reader, 1).decode() for _ in children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(reader)
    assert sorted(labels) == [*"00112233"]


def test_a_device_of_another_container_is_refused_before_recording(gpus: Host) -> None:
    gpus.config.exclusive = ("nvidia.com/gpu",)
    assert gpus.start("a") == ["0"]
    kind = (registry.BUILT_IN["nvidia"].KIND,)
    wanted = {"given": [records.given(gpus.names, gpus.inventory, gpus.inventory.devices[:1], ())]}
    with pytest.raises(HeldError, match="in use by the container a"):
        leases.refuse(wanted, records.read_every(gpus.config.state_dir, "x"), kind)


def test_explain_writes_no_choice(gpus: Host) -> None:
    assert gpus.labels("any", starter=0) == ["0"]
    assert not gpus.folder.exists()
    gpus.start("a")
    assert gpus.labels("any:2", starter=0) == ["1", "2"]
    assert gpus.start("b") == ["1"]


def test_any_is_refused_without_a_usable_state_folder(gpus: Host) -> None:
    gpus.config.state_dir = "/dev/null/none"
    with pytest.raises(HeldError, match="Which devices are free can't be known"):
        gpus.start("a")


# Again --------------------------------------------------------------------------------------------


def test_a_restarted_container_gets_its_devices_again_or_freer_ones(gpus: Host) -> None:
    assert [gpus.start(name) for name in "abc"] == [["0"], ["1"], ["2"]]
    for name in "abc":
        gpus.end(name)
    assert gpus.start("c") == ["2"]
    assert gpus.start("x", "any:3") == ["0", "1", "3"]
    assert gpus.start("y", "any:4") == ["0", "1", "2", "3"]
    assert gpus.start("b") == ["1"], "all have two"
    gpus.end("b")
    assert gpus.start("z", "any:2") == ["0", "1"]
    assert gpus.start("b") == ["2"], "others are freer now"


def test_only_the_most_recent_choices_are_saved(
    gpus: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_REMEMBERED", 3)
    for name in "abcdef":
        gpus.start(name)
        gpus.end(name)
    kept_now = json.loads((gpus.folder / choice.CHOICES).read_text())
    assert [each[0] for each in kept_now] == ["d", "e", "f"]
    gpus.start("e")
    kept_now = json.loads((gpus.folder / choice.CHOICES).read_text())
    assert [each[0] for each in kept_now] == ["d", "f", "e"]
    assert (gpus.folder / choice.CHOICES).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[1]", '[["a"]]', '[["a", "b", "c", [1]]]', "\xff"]
)
def test_a_damaged_file_of_choices_is_replaced(gpus: Host, text: str) -> None:
    gpus.start("a")
    gpus.end("a")
    (gpus.folder / choice.CHOICES).write_text(text, "latin-1")
    assert gpus.start("b") == ["0"]
    assert len(json.loads((gpus.folder / choice.CHOICES).read_text())) == 1


@pytest.mark.protects(
    "choice-former",
    "a reused bundle keeps no node of a device that isn't chosen again",
    instead="if False:",
)
def test_a_reused_bundle_loses_the_devices_given_before(gpus: Host, tmp_path: Path) -> None:
    """A bundle that is used again still has the nodes and rules of its earlier devices."""
    gpus.config.exclusive = ("nvidia.com/gpu",)
    path = tmp_path / "config.json"

    def edited() -> dict[str, Any]:
        starter = gpus.running["a"].pid
        done = edit(
            Spec(str(path), path.read_text()), gpus.config, str(tmp_path), container="a",
            starter=starter, inventories={"nvidia": gpus.inventory},
        )  # fmt: skip
        assert done is not None
        path.write_text(done.text)
        return json.loads(done.text)  # type: ignore[no-any-return]

    (tmp_path / "gpuhook-prestart").write_text("#!/bin/sh\n")
    (tmp_path / "gpuhook-prestart").chmod(0o755)
    own = {"path": "/dev/x", "type": "c", "major": 195, "minor": 0}
    spec = {
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=any", "NVIDIA_DRIVER_CAPABILITIES=utility"]},
        "root": {"path": "rootfs"},
        "linux": {
            "namespaces": [{"type": "mount"}],
            "devices": [own, {"path": "/dev/y", "type": "c", "major": 1, "minor": 3}],
        },
    }
    path.write_text(json.dumps(spec))
    gpus.start("a", path=str(path))
    assert (195, 0) in rules(edited())
    gpus.end("a")
    assert gpus.start("b") == ["0"]
    gpus.running["a"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    found = edited()
    assert (195, 0) not in rules(found)
    assert (195, 1) in rules(found)
    assert [each["path"] for each in found["linux"]["devices"]] == ["/dev/y"]


def rules(spec: dict[str, Any]) -> set[tuple[int, int]]:
    return {(each["major"], each["minor"]) for each in spec["linux"]["resources"]["devices"]}


@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
def test_podmans_precreate_leaves_the_choice_to_the_hook(
    gpus: Host, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpuhook-prestart").write_text("#!/bin/sh\n")
    (tmp_path / "gpuhook-prestart").chmod(0o755)
    gpus.config.mode = mode
    monkeypatch.setattr(
        "gpuhook.core.inventory.cache.get_inventory", lambda *_, **__: gpus.inventory
    )
    text = json.dumps({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=any"]}, "linux": {}})
    spec = Spec("standard input", text)
    if mode != "hook":
        with pytest.raises(AnyDeviceError, match="Use gpu-py as podman's runtime, or mode hook"):
            prestart_hook._edited(spec, gpus.config, str(tmp_path))
        return
    edited = prestart_hook._edited(spec, gpus.config, str(tmp_path))
    assert edited is not None
    data = edited.finish().data
    assert data["hooks"]["prestart"][0]["path"] == str(tmp_path / "gpuhook-prestart")
    assert "resources" not in data["linux"]
