"""The gate: no reader of a container's requests gives it more devices than the kubelet did."""

import copy
import itertools
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import machines
import nri_engines as engines
import paper
import pytest
import wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from yardstick import costs_less

from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError, MemoryLimitError, NoDriverError, RequestError
from gpuhook.cluster.nri import parser
from gpuhook.cluster.nri.answer import InjectionMode, NriResponse, decide
from gpuhook.cluster.nri.asked import LONGEST, PATIENCE, ContainerRequest, check_length
from gpuhook.cluster.nri.service import NriPlugin
from gpuhook.cluster.nri.verdicts import Verdicts
from gpuhook.core.inventory import cache
from gpuhook.core.resolve import resolve
from gpuhook.vendors import registry

HOOK = "/opt/gpuhook/bin/gpuhook-cdi-hook"
ID = "4f0c"
FIRST, SECOND = "GPU-00000000-0000-0000-0000-000000000000", "0x84cafeae17e7610"


class Machine:
    """A simulated machine with four NVIDIA GPUs, four AMD GPUs and four Gaudi accelerators."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        nvidia = machines.machine(*(machines.gpu(index, index + 100) for index in range(4)))
        every = {"nvidia": nvidia}
        for name in ("amd", "gaudi"):
            every[name] = paper.machine(name, folder / name)  # type: ignore[assignment]
        self.inventories = every
        known = {name: registry.BUILT_IN[name] for name in every}
        monkeypatch.setattr(registry, "all_vendors", lambda _: known)
        monkeypatch.setattr(cache, "get_inventory", self._inventory)
        status, real = os.stat("/dev/null"), os.stat
        monkeypatch.setattr(
            "gpuhook.cluster.nri.service.os.stat",
            lambda path, *rest, **more: (
                status if "/dev/" in str(path) else real(path, *rest, **more)
            ),
        )
        self.known = known
        self.state = folder / "state"

    def _inventory(self, _: Config, vendor: Any, **__: Any) -> Any:
        return self.inventories[vendor.names.NAME]

    def ids(self, spec: dict[str, Any], config: Config) -> set[str]:
        """Return the devices that gpu-py gives, or none if it refuses."""
        try:
            found = resolve(spec, config, self.known, container=ID)
        except GpuhookError:
            return set()
        return {name for grant in (found.grants if found else ()) for name in grant.ids}

    def of_edits(self, edits: Mapping[str, Any]) -> set[str]:
        """Return the devices whose nodes are in the edits."""
        paths = {node["path"] for node in edits.get("deviceNodes", ())}
        return {
            device.id
            for inventory in self.inventories.values()
            for device in inventory.devices
            if paths.intersection(device.nodes)
        }


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def settings_of(machine: Machine, **chosen: Any) -> Config:
    config = Config()
    config.state_dir = str(machine.state)
    for name, value in chosen.items():
        setattr(config, name, value)
    return config


def spec_of(env: Iterable[str], asked: ContainerRequest) -> dict[str, Any]:
    return {
        "process": {"env": [*env], "capabilities": {"bounding": ["CAP_SYS_ADMIN"]}},
        "mounts": [{"destination": to, "source": source} for to, source in asked.mounts],
        "annotations": dict(asked.annotations),
    }


# All ways of reading ------------------------------------------------------------------------------

ENGINES = (engines.adjusted, engines.replaced, engines.replaced_first)


def first_entries(env: Iterable[str]) -> list[str]:
    """Return the entries for a runtime that reads the first of each name, as Ascend's does."""
    found: dict[str, str] = {}
    for entry in env:
        found.setdefault(entry.partition("=")[0], entry)
    return [*found.values()]


def strangers(
    machine: Machine, env: list[str], asked: ContainerRequest, config: Config
) -> set[str]:
    """Return the devices that runtimes without verdicts may give, whatever requests they read."""
    found: set[str] = set()
    for read in (list, first_entries):
        for by_mounts, by_notes in itertools.product((False, True), repeat=2):
            theirs = copy.copy(config)
            theirs.gate = False
            theirs.accept_envvar_unprivileged = True
            theirs.accept_volume_mounts, theirs.accept_annotations = by_mounts, by_notes
            found |= machine.ids(spec_of(read(env), asked), theirs)
            for each in machine.known.values():  # a runtime for only one vendor
                only = {each.NAME: each}
                try:
                    got = resolve(spec_of(read(env), asked), theirs, only)
                except GpuhookError:
                    continue
                found |= {name for grant in (got.grants if got else ()) for name in grant.ids}
    return found | of_amds(machine, env)


def of_amds(machine: Machine, env: Iterable[str]) -> set[str]:
    """Return the devices that AMD's runtime gives because of a swarm's variables of any name."""
    values = [each.partition("=")[2] for each in env if each.startswith("DOCKER_RESOURCE_")]
    words = {word.strip().lower() for value in values[-1:] for word in value.split(",")}
    return {
        device.id
        for device in machine.inventories["amd"].devices
        if words & {"all", device.id.lower(), device.label}
    }


def check(
    machine: Machine, asked: ContainerRequest, config: Config, names: list[tuple[str, str]]
) -> NriResponse:
    """Let the gate decide, and check that no runtime gives more devices.

    A refusal by the gate raises RequestError.
    """
    way = InjectionMode(config, HOOK, given=lambda *_: names)
    answer = decide(asked, way)
    if answer.verdict is not None:
        Verdicts().write(config.state_dir, ID, answer.verdict)
    given = {name for _, name in names}
    changes = dict(each.partition("=")[::2] for each in answer.edits.get("env", ()))
    assert machine.of_edits(answer.edits) <= given
    for engine in ENGINES:
        env = engine(asked.env, changes)
        if config.gate:
            for reader in (config, settings_of(machine, **{**vars(config), "mode": "spec"})):
                assert machine.ids(spec_of(env, asked), reader) <= given, (engine, env)
        if not (config.gate and asked.handler == "gpu-py"):
            assert strangers(machine, env, asked, config) <= given, (engine, env)
    return answer


NAMES = (
    "NVIDIA_VISIBLE_DEVICES", "AMD_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_PCI_BUS_IDS", "CUDA_VERSION",
    "NVIDIA_REQUIRE_CUDA", "NVIDIA_IMEX_CHANNELS", "DOCKER_RESOURCE_GPU",
    "DOCKER_RESOURCE_AMD_GPU", "nvidia_visible_devices", "A", "",
)  # fmt: skip
ODD_NAMES = ("NVIDIA_VISIBLE_DEVICES ", "\tNVIDIA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES\0")
VALUES = (
    "all", "void", "none", "", "0", "1", "0,1", "3", "0-3", " 0 ", "void,all", "all,void",
    "none,all", "0,all", FIRST, SECOND, "nvidia.com/gpu=0", "nvidia.com/gpu=all", "amd.com/gpu=1",
    "ALL", "None", "any", "any:2",
)  # fmt: skip
ODD_VALUES = (
    "0:0", "9", "0x84cafeae17e7620", "runtime.nvidia.com/gpu=all", "a.com/b=1", "11.0", "all\n",
    "all\0", "0000:1b:00.0",
)  # fmt: skip
ODD_ENTRIES = ("NVIDIA_VISIBLE_DEVICES", "=all", "", "A=\0NVIDIA_VISIBLE_DEVICES=all")
FOLDERS = [f"/var/run/{name}-container-devices" for name in ("nvidia", "amd", "gaudi")]
USUAL = some.builds(
    "{}={}".format, some.sampled_from((*NAMES[:2] * 3, *NAMES)), some.sampled_from(VALUES)
)
ODD = some.one_of(
    some.builds(
        "{}={}".format,
        some.sampled_from((*NAMES, *ODD_NAMES)),
        some.sampled_from((*VALUES, *ODD_VALUES)),
    ),
    some.sampled_from(ODD_ENTRIES),
)
ENTRIES = some.one_of(
    some.lists(USUAL, max_size=4),
    some.lists(USUAL, max_size=3),
    some.lists(some.one_of(USUAL, ODD), max_size=4),
)


def rarely(strategy: Any, otherwise: Any) -> Any:
    """Return a strategy that is drawn one time in four."""
    nothing = some.just(otherwise)
    return some.one_of(nothing, nothing, nothing, strategy)


MOUNTS = some.lists(
    some.tuples(
        some.builds(
            "{}{}{}".format,
            some.sampled_from((*FOLDERS, "//var/run/./nvidia-container-devices", "/data")),
            some.sampled_from(("/", "//", "/x/../")),
            some.sampled_from(
                ("all", "0", "1", "2", FIRST, SECOND, "cdi/nvidia.com/gpu/0", "cdi/x", "imex/0")
            ),
        ),
        some.sampled_from(("/dev/null", "/dev//null", "/etc")),
    ),
    max_size=2,
)
NOTES = some.dictionaries(
    some.sampled_from(
        ("cdi.k8s.io/x", "nvidia.cdi.k8s.io/container.main", "nvidia.cdi.k8s.io", "a.io/cdi.k8s.io")
    ),
    some.sampled_from(("nvidia.com/gpu=0", "amd.com/gpu=all", "a.com/b=1", "nvidia.com/gpu=all")),
    max_size=1,
)
GIVEN = some.lists(
    some.sampled_from(
        (
            ("nvidia.com/gpu", FIRST), ("amd.com/gpu", SECOND), ("a.com/b", "1"),
            ("nvidia.com/gpu", "GPU-00000001-0000-0000-0000-000000000000"),
        )
    ),
    unique=True, max_size=3,
)  # fmt: skip
FLAGS = some.fixed_dictionaries(
    {
        name: some.booleans()
        for name in (
            "gate", "accept_envvar_unprivileged", "accept_volume_mounts", "accept_annotations",
        )
    }
)  # fmt: skip


@pytest.mark.protects(
    "nri-gate-doubled",
    "the NRI gate sets each repeated variable for runtimes that read its first entry",
    instead="return found",
)
@pytest.mark.protects(
    "nri-gate-readings",
    "a request yields no more devices than the kubelet allocated, however a runtime reads it",
)
@settings(
    max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    image=ENTRIES, pod=ENTRIES, mounts=rarely(MOUNTS, []), notes=rarely(NOTES, {}), names=GIVEN,
    flags=FLAGS,
    handler=some.sampled_from(("", "gpu-py", "nvidia", "gpu-x")),
    merge=some.sampled_from((engines.of_containerd, engines.of_crio)),
)  # fmt: skip
def test_no_runtime_gives_more_devices_than_the_kubelet(
    machine: Machine, image: list[str], pod: list[str], mounts: list[tuple[str, str]],
    notes: dict[str, str], names: list[tuple[str, str]], flags: dict[str, bool], handler: str,
    merge: Any,
) -> None:  # fmt: skip
    asked = ContainerRequest(
        "team", "pod", "main", handler, tuple(merge(image, pod)), tuple(mounts),
        tuple(notes.items()), tuple(notes.items()), ID,
    )  # fmt: skip
    try:
        check(machine, asked, settings_of(machine, **flags), names)
    except GpuhookError as error:
        assert not isinstance(error, AssertionError)  # noqa: PT017 - a refusal gives nothing


# One by one ---------------------------------------------------------------------------------------

ONE = ("nvidia.com/gpu", FIRST)
ALL = "NVIDIA_VISIBLE_DEVICES=all"


def asking(*env: str, handler: str = "", **more: Any) -> ContainerRequest:
    return ContainerRequest("team", "pod", "main", handler, env, id=ID, **more)


def refused(
    machine: Machine, asked: ContainerRequest, match: str, *names: Any, **chosen: Any
) -> None:
    with pytest.raises(RequestError, match=match):
        check(machine, asked, settings_of(machine, **chosen), [*names])


def changed(
    machine: Machine, asked: ContainerRequest, *names: Any, **chosen: Any
) -> dict[str, str]:
    answer = check(machine, asked, settings_of(machine, **chosen), [*names])
    return dict(each.partition("=")[::2] for each in answer.edits.get("env", ()))


TWICE = {
    "all and all": (ALL, ALL),
    "void and all": ("NVIDIA_VISIBLE_DEVICES=void", ALL),
    "its own and all": (f"NVIDIA_VISIBLE_DEVICES={FIRST}", ALL),
    "all, others and all": (ALL, *(f"A{number}=x" for number in range(5000)), ALL),
    "thrice": ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=void", ALL),
}


@pytest.mark.protects(
    "nri-gate-twice",
    "the NRI gate takes into account that engines replace only a variable's first entry",
    instead="single = set(changes)",
)
@pytest.mark.protects(
    "nri-gate-readings",
    "a request yields no more devices than the kubelet allocated, however a runtime reads it",
)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("names", [(), (ONE,)])
@pytest.mark.parametrize("handler", ["", "gpu-py", "nvidia", "gpu-x"])
@pytest.mark.parametrize("name", [*TWICE])
def test_a_repeated_devices_variable_is_refused_or_left_to_gpu_py(
    machine: Machine, name: str, handler: str, names: Any, gate: bool
) -> None:
    asked = asking(*TWICE[name], handler=handler)
    if gate and handler == "gpu-py":
        assert changed(machine, asked, *names, gate=True) == {}, "which obeys the verdict"
    else:
        refused(machine, asked, "has NVIDIA_VISIBLE_DEVICES more than once", *names, gate=gate)


@pytest.mark.parametrize("handler", ["", "nvidia", "gpu-x"])
def test_the_kubelets_value_counts_over_the_images(machine: Machine, handler: str) -> None:
    """The kubelet's value comes last; a change gives it to a runtime that reads the first entry."""
    asked = asking(ALL, f"NVIDIA_VISIBLE_DEVICES={FIRST}", handler=handler)
    found = changed(machine, asked, ONE)["NVIDIA_VISIBLE_DEVICES"]
    assert found == (FIRST if handler == "nvidia" else "void")


@pytest.mark.protects(
    "nri-gate-doubled",
    "the NRI gate sets each repeated variable for runtimes that read its first entry",
    instead="return found",
)
@pytest.mark.protects(
    "nri-gate-twice",
    "the NRI gate takes into account that engines replace only a variable's first entry",
    instead="single = set(changes)",
)
@pytest.mark.protects(
    "nri-gate-readings",
    "a request yields no more devices than the kubelet allocated, however a runtime reads it",
)
def test_every_repeated_nvidia_variable_is_set_to_its_last_value(machine: Machine) -> None:
    env = ("NVIDIA_X=1", "NVIDIA_X=2", "NVIDIA_VISIBLE_DEVICES=0", "A=1", "A=2")
    assert changed(machine, asking(*env, handler="nvidia"), ONE) == {"NVIDIA_X": "2"}


@pytest.mark.parametrize(
    ("value", "names", "expected"),
    [
        ("all", (), "void"),
        ("all", (ONE,), "0"),
        ("void,all", (ONE,), "void"),
        ("all,void", (), "void"),
        ("None", (), "none"),
        (" 0 ", (ONE,), "0"),
        ("0-0", (ONE,), "0"),
        ("runtime.nvidia.com/gpu=0", (ONE,), "0"),
        ("k8s.device-plugin.nvidia.com/gpu=0", (ONE,), "0"),
        ("ALL", (ONE,), "0"),
    ],
)
def test_values_are_replaced_by_plain_device_names(
    machine: Machine, value: str, names: tuple[Any, ...], expected: str
) -> None:
    """A runtime that interprets a word differently never sees that word."""
    asked = asking(f"NVIDIA_VISIBLE_DEVICES={value}", handler="nvidia")
    assert changed(machine, asked, *names) == {"NVIDIA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize("value", ["0", FIRST, "void", "none", ""])
def test_plain_values_are_unchanged(machine: Machine, value: str) -> None:
    asked = asking(f"NVIDIA_VISIBLE_DEVICES={value}", handler="nvidia")
    assert changed(machine, asked, ONE) == {}


def test_an_absent_vendor_does_not_skip_the_check_of_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image may request devices of several vendors, so the others must be checked."""
    look = cache.get_inventory

    def absent(config: Config, vendor: Any, **more: Any) -> Any:
        if vendor.names.NAME == "amd":
            raise NoDriverError("There is none", "Load it")
        return look(config, vendor, **more)

    monkeypatch.setattr(cache, "get_inventory", absent)
    asked = asking("AMD_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1", handler="nvidia")
    refused(machine, asked, "asks for GPU 1 by a variable", ONE)
    asked = asking("AMD_VISIBLE_DEVICES=0", ALL, handler="nvidia")
    assert changed(machine, asked, ONE) == {
        "AMD_VISIBLE_DEVICES": "none",
        "NVIDIA_VISIBLE_DEVICES": "0",
    }


@pytest.mark.protects(
    "nri-gate-entries",
    "the NRI gate refuses environment entries that runtimes may read differently",
)
@pytest.mark.parametrize(
    "entry",
    [
        "NVIDIA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES =all", " NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_VISIBLE_DEVICES\0=all", "NVIDIA_VISIBLE_DEVICES=all\0", "A=\0" + ALL,
        "NVIDIA_VISIBLE_DEVICES=all\n", "NVIDIA_VISIBLE_DEVICES=0\x1b", "CUDA_VERSION",
        "\nAMD_VISIBLE_DEVICES=all", "AMD_VISIBLE_DEVICES\t=0", "NVIDIA_VISIBLE_DEVICES\u200b=all",
    ],
)  # fmt: skip
@pytest.mark.parametrize("handler", ["", "gpu-py", "nvidia"])
def test_ambiguous_environment_entries_are_refused(
    machine: Machine, entry: str, handler: str
) -> None:
    for gate in (False, True):
        asked = asking("A=1", entry, handler=handler)
        refused(machine, asked, "which runtimes understand in different ways", ONE, gate=gate)


@pytest.mark.parametrize(
    "entry",
    [
        "MY_NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES_OLD=a\nb", "=all", "",
        "nvidia_visible_devices=all", "my.NVIDIA_VISIBLE_DEVICES=a", "AWS_KEY=a\nb",
        "NVIDIA_KEY=-----\n----", "A=\0",
    ],
)  # fmt: skip
def test_unrelated_environment_entries_are_unchanged(machine: Machine, entry: str) -> None:
    assert changed(machine, asking(entry, handler="nvidia")) == {}


@pytest.mark.protects(
    "nri-gate-mounts", "the NRI gate refuses device mounts that runtimes may read differently"
)
@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("/var/run/nvidia-container-devices/all", "/dev//null"),
        ("/var/run/nvidia-container-devices/all", "/etc"),
        ("/var/run/nvidia-container-devices/cdi/x", "/dev/null"),
        ("//var/run/./nvidia-container-devices/0", "/"),
    ],
)
@pytest.mark.parametrize("accepts", [False, True])
def test_ambiguous_device_mounts_are_refused(
    machine: Machine, place: str, source: str, accepts: bool
) -> None:
    asked = asking(mounts=((place, source),), handler="nvidia")
    match = "which runtimes understand in different ways"
    refused(machine, asked, match, ONE, accept_volume_mounts=accepts)


@pytest.mark.protects(
    "nri-gate-sources",
    "device mounts don't bypass the NRI gate, whatever the settings are",
    instead="mounts = {False}",
)
@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("name", ["all", "1", "imex/7"])
def test_device_mounts_are_refused_unless_allocated_by_the_kubelet(
    machine: Machine, name: str, accepts: bool
) -> None:
    """NVIDIA's runtime has its own setting for such mounts."""
    folder = "/var/run/nvidia-container-devices"
    mounts = ((f"{folder}/{FIRST}", "/dev/null"), (f"{folder}/{name}", "/dev/null"))
    for handler in ("", "nvidia", "gpu-x"):
        asked = asking(mounts=mounts, handler=handler)
        refused(machine, asked, "kubelet hasn't allocated", ONE, accept_volume_mounts=accepts)
    asked = asking(mounts=mounts[:1], handler="nvidia")
    assert changed(machine, asked, ONE, accept_volume_mounts=accepts) == {}


@pytest.mark.protects(
    "nri-gate-notes", "CDI annotations from a pod's author don't bypass the NRI gate"
)
@pytest.mark.parametrize("handler", ["", "gpu-py", "nvidia"])
@pytest.mark.parametrize(
    "key", ["cdi.k8s.io/a", "nvidia.cdi.k8s.io", "nvidia.cdi.k8s.io/container.main", "my.io/x"]
)
def test_cdi_annotations_are_refused_unless_allocated_by_the_kubelet(
    machine: Machine, key: str, handler: str
) -> None:
    """NVIDIA's runtime and its plugin of the engine read different annotation prefixes."""
    chosen = {"cdi_annotation_prefixes": ("cdi.k8s.io/", "my.io/"), "gate": True}
    for text in ("nvidia.com/gpu=1", "nvidia.com/gpu=all", "a.com/b=1", "nvidia.com/gpu=0,x"):
        asked = asking(pod_annotations=((key, text),), handler=handler)
        refused(machine, asked, "by an annotation, and the kubelet hasn't", ONE, **chosen)
    asked = asking(pod_annotations=((key, "nvidia.com/gpu=0"),), handler=handler)
    assert changed(machine, asked, ONE, **chosen) == {}


MEMORY = "nvidia.com/container.{}.gpu-memory.{}"
LIMIT, LEAST = "NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"


@pytest.mark.parametrize("word", ["any", "any:2", "any:4"])
@pytest.mark.parametrize("handler", ["", "gpu-py"])
def test_a_request_for_any_gives_the_devices_of_the_kubelet(
    machine: Machine, word: str, handler: str
) -> None:
    """A request for any device is treated as one for all; without a gate it is refused in a pod."""
    asked = asking(f"NVIDIA_VISIBLE_DEVICES={word}", handler=handler)
    config = settings_of(machine, gate=True)
    answer = check(machine, asked, config, [("nvidia.com/gpu", FIRST)])
    given = machine.of_edits(answer.edits)
    verdict = answer.verdict.devices.get("nvidia", ()) if answer.verdict else ()
    assert given | {*verdict} == {FIRST}
    answer = check(machine, asked, config, [])
    assert not machine.of_edits(answer.edits)
    assert answer.verdict is None or not answer.verdict.devices
    if not handler:
        with pytest.raises(RequestError, match="which is free is only decided when"):
            decide(asked, InjectionMode(settings_of(machine), HOOK))


def limited(*env: str, handler: str = "", **annotations: str) -> ContainerRequest:
    """Return a container whose pod has these memory annotations, and one for another container."""
    own = [(MEMORY.format("main", end), text) for end, text in annotations.items()]
    notes = (*own, (MEMORY.format("other", "limit"), "1Gi"))
    return asking(*env, handler=handler, pod_annotations=notes)


@pytest.mark.parametrize("handler", ["", "gpu-py", "nvidia"])
@pytest.mark.parametrize(
    ("env", "annotations", "expected"),
    [
        ((), {"limit": "8Gi"}, {LIMIT: "8192"}),
        ((), {"request": "8Gi"}, {LIMIT: "8192"}),
        ((), {"limit": "8Gi", "request": "4Gi"}, {LIMIT: "8192"}),
        ((f"{LIMIT}=4096",), {"limit": "8Gi"}, {LIMIT: "4096"}),
        ((f"{LIMIT}=16384",), {"limit": "8Gi"}, {LIMIT: "8192"}),
        ((f"{LEAST}=16384",), {"limit": "8Gi"}, {LIMIT: "8192", LEAST: "8192"}),
        ((f"{LIMIT}=4096",), {}, {}),
    ],
)
def test_memory_annotations_become_variables(
    machine: Machine,
    handler: str,
    env: tuple[str, ...],
    annotations: dict[str, str],
    expected: dict[str, str],
) -> None:
    """The lower of annotation and variable counts, whatever gives the container its devices."""
    assert changed(machine, limited(*env, handler=handler, **annotations)) == expected


def test_memory_annotations_are_applied_with_devices(machine: Machine) -> None:
    asked = limited("NVIDIA_VISIBLE_DEVICES=all", limit="8Gi")
    found = changed(machine, asked, ONE)
    assert found[LIMIT] == "8192"
    assert found["NVIDIA_VISIBLE_DEVICES"] != "all"


def test_invalid_memory_annotations_are_refused(machine: Machine) -> None:
    for annotations in ({"limit": "8 GiB"}, {"limit": "1Gi", "request": "2Gi"}):
        with pytest.raises(MemoryLimitError):
            changed(machine, limited(**annotations))
    refused(machine, limited(f"{LIMIT}=1", f"{LIMIT}=9", limit="2Gi"), "more than once")


def test_annotations_for_another_container_are_ignored(machine: Machine) -> None:
    key = "nvidia.cdi.k8s.io/container.other"
    asked = asking(pod_annotations=((key, "nvidia.com/gpu=1"), ("a.io/b", "nvidia.com/gpu=1")))
    assert changed(machine, asked) == {}
    asked = asking(annotations=(("cdi.k8s.io/plugin", "k8s.io/gpu=1"),))  # the kubelet's annotation
    assert changed(machine, asked) == {}


@pytest.mark.protects("nri-gate-swarm", "swarm resource variables don't bypass the NRI gate")
@pytest.mark.parametrize("value", ["all", "0", "1", f"{FIRST},{SECOND}", "GPU-00000001"])
@pytest.mark.parametrize("name", ["DOCKER_RESOURCE_GPU", "DOCKER_RESOURCE_", "MY_SWARM"])
def test_swarm_variables_are_refused_unless_allocated_by_the_kubelet(
    machine: Machine, name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's runtime reads all with this prefix, NVIDIA's those that its configuration names."""
    theirs = tmp_path / "config.toml"
    theirs.write_text('swarm-resource = "OTHER,MY_SWARM"\n')
    monkeypatch.setattr("gpuhook.cluster.nri.gate._NVIDIAS", str(theirs))
    asked = asking(f"{name}={value}", "NVIDIA_VISIBLE_DEVICES=0", handler="nvidia")
    refused(machine, asked, f"by '{name}', and the kubelet hasn't allocated that to it", ONE)
    for allowed in (FIRST, FIRST.lower(), "void", ""):
        asked = asking(f"{name}={allowed}", "NVIDIA_VISIBLE_DEVICES=0", handler="nvidia")
        assert changed(machine, asked, ONE) == {}


@pytest.mark.parametrize("others", ["MODULES", "PCI_BUS_IDS"])
def test_only_one_of_several_variables_of_a_vendor_keeps_a_value(
    machine: Machine, others: str
) -> None:
    """Another runtime may read any of them, so the others are set to request nothing."""
    [device, *_] = machine.inventories["gaudi"].devices
    given = ("habana.ai/gaudi", device.id)
    first, name = "HABANA_VISIBLE_DEVICES", f"HABANA_VISIBLE_{others}"
    for value in ("all", "1", "0,1", "void"):
        asked = asking(f"{first}={device.label}", f"{name}={value}", handler="nvidia")
        assert changed(machine, asked, given) == {first: device.label, name: "none"}
    asked = asking(f"{name}=all", f"{name}=all", f"{first}={device.label}", handler="nvidia")
    refused(machine, asked, "kubelet hasn't allocated", given)


# Verdicts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", [False, True])
def test_the_verdict_for_gpu_py_has_only_devices_the_kubelet_gave(
    machine: Machine, accepts: bool
) -> None:
    """The verdict doesn't depend on the privileges that the plugin can see."""
    config = settings_of(machine, gate=True, accept_envvar_unprivileged=accepts)
    for env, names, expected in (
        ((ALL,), (ONE,), {"nvidia": (FIRST,)}),
        ((ALL,), (), {}),
        ((ALL, "AMD_VISIBLE_DEVICES=1"), (ONE, ("amd.com/gpu", SECOND)),
         {"nvidia": (FIRST,), "amd": (SECOND,)}),
        (("NVIDIA_VISIBLE_DEVICES=none",), (ONE,), {}),
    ):  # fmt: skip
        answer = check(machine, asking(*env, handler="gpu-py"), config, [*names])
        assert answer.edits == {}
        assert answer.verdict is not None
        assert answer.verdict.devices == expected
    assert check(machine, asking("A=1", handler="gpu-py"), config, []).verdict is None


@pytest.mark.protects(
    "nri-gate-given",
    "a runtime doesn't add devices again that the NRI plugin has added",
    instead="for names in ():",
)
@pytest.mark.parametrize("handler", ["", "gpu-x", "kata"])
def test_devices_given_by_the_plugin_are_not_given_again(machine: Machine, handler: str) -> None:
    """The runtime may be gpu-py by another name, or the engine's default runtime."""
    for env in ((ALL,), (ALL, f"NVIDIA_VISIBLE_DEVICES={FIRST}")):
        config = settings_of(machine, gate=True)
        answer = check(machine, asking(*env, handler=handler), config, [ONE])
        assert machine.of_edits(answer.edits) == {FIRST}
        assert answer.verdict is not None
        assert answer.verdict.devices == {}
    by_cdi = decide(
        asking(ALL, handler=handler),
        InjectionMode(config, HOOK, by_cdi=True, given=lambda *_: [ONE]),
    )
    assert by_cdi.edits == {
        "names": ["nvidia.com/gpu=0"],
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
    }


def a_request(payload: bytes) -> bytes:
    return wire.message((1, "nri.pkg.api.v1alpha1.Plugin"), (2, "CreateContainer"), (3, payload))


@pytest.mark.protects(
    "nri-payload", "an overlong NRI device request is refused without being parsed"
)
@pytest.mark.protects(
    "nri-long-request", "an NRI request too long to be parsed is refused if it may ask for devices"
)
def test_an_overlong_request_is_not_parsed_and_refused_if_it_names_devices() -> None:
    """The request isn't parsed; its bytes show whether it may request devices."""
    short, config = b"x" * LONGEST, Config()
    for size, is_parsed in ((LONGEST - 100, True), (LONGEST, False)):
        payload = wire.message((2, wire.message((8, "x" * size))))
        found = parser.parsed(True, a_request(payload))
        assert found["understood"]
        assert ("asked" in found) == is_parsed
    check_length(short, config)
    for word in (b"NVIDIA_VISIBLE_DEVICES", b"CUDA_VERSION", b"-container-devices", b"cdi.k8s.io"):
        with pytest.raises(RequestError, match="of one that asks for devices may have 2097152"):
            check_length(short + word, config)


def test_long_requests_are_refused_in_time(machine: Machine) -> None:
    """The parsing of 300,000 annotations took 2.3 s, and an engine waits only two."""
    notes = b"".join(
        wire.message((6, wire.message((1, f"a{n}"), (2, "b")))) for n in range(150_000)
    )
    payload = wire.message((1, b""), (2, notes + wire.message((8, ALL))))
    plugin = NriPlugin.__new__(NriPlugin)
    way = InjectionMode(settings_of(machine), HOOK, given=lambda *_: [])
    plugin._current, plugin._last = lambda: way, None

    def ask(payload: bytes) -> None:
        data = a_request(payload)
        request = parser._request(parser.parsed(True, data))
        with pytest.raises(RequestError, match="may have"):
            plugin._create(request, data, time.monotonic() + PATIENCE)

    assert len(payload) < LONGEST
    assert costs_less(lambda: ask(payload), 30)
    assert costs_less(lambda: ask(payload + b"x" * LONGEST), 1)
