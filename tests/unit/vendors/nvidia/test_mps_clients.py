"""Shared GPUs: only MPS clients with their limits get one, for every kind of request."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machines
import pytest

from gpuhook import inject
from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, GpuhookError, MemoryLimitError, RequestError
from gpuhook.base.oci.spec import Spec
from gpuhook.base.state_directory import StateDirectory
from gpuhook.cluster.nri.answer import InjectionMode, decide
from gpuhook.cluster.nri.asked import ContainerRequest
from gpuhook.core import contract, edit
from gpuhook.core.cdi import generate
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.plan import image
from gpuhook.core.planner import make_plan
from gpuhook.core.records import exclusive_request, records
from gpuhook.core.resolve import Allocation, find_memory_limits, resolve
from gpuhook.nvidia_cli import configure
from gpuhook.tools import root_folder
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia import mps, mps_mounts
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.variables import CAPABILITIES
from gpuhook.vendors.nvidia.vendor import VENDOR

GIB = 1 << 30
GPUS = tuple(machines.gpu(index, index).but(memory=80 * GIB) for index in range(4))
SPLIT = machines.gpu(3, 3, (machines.mig(0, 1, 12, 13),))
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
SETTINGS = """
[gpuhook]
state-dir = "{state}"
[gpuhook.mps]
devices = "0,1"
device-memory = "8GiB"
active-thread-percentage = 40
"""


def machine(*gpus: Any) -> NvidiaInventory:
    found = machines.machine(*(gpus or GPUS)).but(version="615.10.01")
    folder = DeviceNode("/dev/nvidia-caps-imex-channels/channel0", 509, 0)
    return found.but(nodes=(*found.nodes, folder))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "all_vendors", lambda _: {"nvidia": registry.BUILT_IN["nvidia"]})
    monkeypatch.setattr(cache, "get_inventory", lambda *_, **__: machine())
    monkeypatch.setattr(exclusive_request, "get_inventory", lambda *_, **__: machine())


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return loads(SETTINGS.format(state=tmp_path))


def keep(config: Config, *, daemon: bool = True, ready: bool = True) -> None:
    """Write the state that ``gpuhook mps`` would save; the daemon is this process."""
    fd = os.open("/proc/self", os.O_RDONLY)
    name = records.name_of_process(fd) if daemon else ""
    os.close(fd)
    shared = tuple(mps.SharedDevice(gpu.uuid, gpu.index, 8 * GIB, 80 * GIB) for gpu in GPUS[:2])
    state = mps.MpsState(2, shared, name, 40, 2, (), ready=ready)
    with StateDirectory.opened(config.state_dir) as folder:
        folder.write_checked(mps.STATE, json.dumps(state.to_json()).encode())


def asked(config: Config, *env: str, inventory: NvidiaInventory | None = None) -> Allocation | None:
    spec = {"process": {"env": [*env]}}
    inventories = {"nvidia": inventory or machine()}
    return resolve(spec, config, registry.all_vendors(config), inventories=inventories)


def is_client(found: Allocation) -> bool:
    """Return whether a container has its place and its limits."""
    plan = make_plan(found.grants, image.unknown(), found.groups)
    names = {each.name for each in found.settings}
    has_place = any(isinstance(each, mps_mounts.BindPipe) for each in plan.operations)
    assert has_place == (mps.PIPE_VARIABLE in names)
    return has_place and {*names} >= {mps._THREADS, mps._MEMORY}


def nodes(found: Allocation) -> set[str]:
    return {node.path for grant in found.grants for node, _ in grant.nodes}


# What a tenant chooses ----------------------------------------------------------------------------

SETS = [
    ",".join(each)
    for size in range(len(CAPABILITIES) + 1)
    for each in itertools.combinations(CAPABILITIES, size)
]
WORDS = ("0", "1", "0,1", GPUS[0].uuid, "1b:00.0", "nvidia.com/gpu=0", "runtime.nvidia.com/gpu=0")


@pytest.mark.protects(
    "mps-any-capability",
    "a container with a shared GPU is an MPS client, whatever its driver capabilities are",
    instead="if config.mps_devices and {'compute', 'video'} & {*options.capabilities}:",
)
@pytest.mark.parametrize("capabilities", [*SETS, "all", None])
def test_a_shared_gpu_makes_an_mps_client_with_any_capabilities(
    config: Config, capabilities: str | None
) -> None:
    """Only the sharing of the device decides, whatever name and other variables a request has."""
    env = () if capabilities is None else (f"NVIDIA_DRIVER_CAPABILITIES={capabilities}",)
    extra = ("NVIDIA_GDS=enabled", "NVIDIA_NVSWITCH=enabled", "NVIDIA_DISABLE_REQUIRE=1")
    for word, more in itertools.product(WORDS, ((), extra)):
        words = (f"{VARIABLE}={word}", *env, *more)
        keep(config)
        found = asked(config, *words)
        assert found is not None
        assert is_client(found), words
        for daemon, ready in ((False, True), (True, False)):
            keep(config, daemon=daemon, ready=ready)
            with pytest.raises(DriverError, match="is shared by MPS here"):
                asked(config, *words)


@pytest.mark.parametrize("capabilities", [*SETS, "all"])
def test_unshared_devices_make_no_client_and_mixed_requests_are_refused(
    config: Config, capabilities: str
) -> None:
    keep(config)
    env = f"NVIDIA_DRIVER_CAPABILITIES={capabilities}"
    found = asked(config, f"{VARIABLE}=2,3", env)
    assert found is not None
    assert not is_client(found)
    assert found.settings == []
    for words in ("0,2", "all", "2,nvidia.com/gpu=1"):
        with pytest.raises(RequestError, match="uses MPS for all of its devices or for none"):
            asked(config, f"{VARIABLE}={words}", env)
    none = asked(config, f"{VARIABLE}=none", env)
    assert none is not None
    assert not is_client(none)
    assert not nodes(none) & {f"/dev/nvidia{gpu.minor}" for gpu in GPUS}
    assert asked(config, f"{VARIABLE}=void", env) is None


@pytest.mark.parametrize("word", ["3", "3:0", SPLIT.uuid, SPLIT.mig[0].uuid, "nvidia.com/gpu=3:0"])
@pytest.mark.parametrize("capabilities", ["graphics", "utility", "compute", "all"])
def test_a_shared_gpu_in_mig_mode_and_its_parts_are_refused(
    config: Config, word: str, capabilities: str
) -> None:
    """MPS can share neither, so a request for a MIG device of a shared GPU is refused, too."""
    config.mps_devices = "3"
    keep(config)
    env = (f"{VARIABLE}={word}", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    with pytest.raises(RequestError, match="is in MIG mode"):
        asked(config, *env, inventory=machine(*GPUS[:3], SPLIT))


@pytest.mark.parametrize("mode", ["spec", "cdi"])
@pytest.mark.parametrize("capabilities", ["graphics", "utility", "compute", "all"])
def test_shared_devices_in_spec_and_cdi_mode_are_refused(
    config: Config, mode: str, capabilities: str
) -> None:
    config.mode = mode
    keep(config)
    env = (f"{VARIABLE}=runtime.nvidia.com/gpu=0", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    with pytest.raises(RequestError, match="can't be given in mode spec"):
        asked(config, *env)


@pytest.mark.parametrize("capabilities", [*SETS, "all"])
def test_limits_and_exclusive_use_apply_with_any_capabilities(
    tmp_path: Path, capabilities: str
) -> None:
    words = (f"{VARIABLE}=0,1", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}")
    spec = Spec("config.json", json.dumps({"process": {"env": [*words]}}))
    config = loads("[gpuhook.limits]\ndevice-memory = '8GiB'\n")
    known, inventories = registry.all_vendors(config), {"nvidia": with_library()}
    found = resolve(spec.data, config, known, inventories=inventories)
    limited = find_memory_limits(spec, config, known, found, inventories)
    assert limited is not None
    assert [each.bytes for each in limited.operations] == [8 * GIB] * 2
    config = Config()
    config.exclusive, config.state_dir = ("nvidia.com/gpu",), str(tmp_path / "none")
    found = resolve(spec.data, config, known, inventories=inventories)
    assert exclusive_request.check(spec, found, known, config)


def with_library() -> NvidiaInventory:
    """Return a machine with NVML, which sets the limits."""
    return machine()


# What others give ---------------------------------------------------------------------------------

GIVEN: dict[str, dict[str, Any]] = {
    "a node": {"linux": {"devices": [{"path": "/dev/x", "type": "c", "major": 195, "minor": 1}]}},
    "a rule": {
        "linux": {
            "resources": {"devices": [{"allow": True, "type": "c", "major": 195, "access": "rw"}]}
        }
    },
    "a rule for its node": {
        "linux": {
            "resources": {
                "devices": [{"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rwm"}]
            }
        }
    },
}


@pytest.mark.protects(
    "given-by-others",
    "a device shared by MPS is refused if the engine itself adds it",
    instead="for grant in ():",
)
@pytest.mark.parametrize("name", [*GIVEN])
@pytest.mark.parametrize("env", [(), (f"{VARIABLE}=void",), (f"{VARIABLE}=2",)])
def test_a_shared_node_added_by_the_engine_is_refused(
    config: Config, tmp_path: Path, name: str, env: tuple[str, ...]
) -> None:
    """The engine may add it by --device, by another toolkit's CDI spec, or only by a rule."""
    keep(config)
    namespaces = [{"type": "mount"}]
    data = {"process": {"env": env}, "linux": {**GIVEN[name]["linux"], "namespaces": namespaces}}
    (tmp_path / "gpuhook-prestart").write_text("#!/bin/sh\n")
    (tmp_path / "gpuhook-prestart").chmod(0o755)
    spec = Spec(str(tmp_path / "config.json"), json.dumps(data))
    vendors = registry.all_vendors(config)
    with pytest.raises(RequestError, match="is shared by MPS, and only gpu-py makes clients"):
        edit.edit(spec, config, vendors, str(tmp_path), inventories={"nvidia": machine()})


def test_an_mps_client_may_have_a_rule_for_its_own_device(config: Config, tmp_path: Path) -> None:
    keep(config)
    (tmp_path / "gpuhook-prestart").write_text("#!/bin/sh\n")
    (tmp_path / "gpuhook-prestart").chmod(0o755)
    linux = {**GIVEN["a rule for its node"]["linux"], "namespaces": [{"type": "mount"}]}
    data = {"process": {"env": [f"{VARIABLE}=0"]}, "linux": linux}
    spec = Spec(str(tmp_path / "config.json"), json.dumps(data))
    vendors = registry.all_vendors(config)
    made = edit.edit(spec, config, vendors, str(tmp_path), inventories={"nvidia": machine()})
    assert made is not None
    assert f"{mps.PIPE_VARIABLE}={mps.PLACE}" in made.finish().data["process"]["env"]


@pytest.mark.protects(
    "restored-shared",
    "a container restored from a checkpoint can't use a device shared by MPS",
    instead="shared = False",
)
@pytest.mark.parametrize("capabilities", ["graphics", "compute", "all"])
def test_a_restored_container_with_a_shared_device_is_refused(
    config: Config, capabilities: str
) -> None:
    """gpuhook doesn't edit its config.json, and no hook counts it as a client."""
    keep(config)
    vendors = registry.all_vendors(config)
    for device, refused in (("0", True), ("2", False)):
        env = [f"{VARIABLE}={device}", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}"]
        spec = Spec("config.json", json.dumps({"process": {"env": env}}))
        if refused:
            with pytest.raises(MemoryLimitError, match="limited, shared or exclusive"):
                edit.check_restored(spec, config, vendors)
        else:
            edit.check_restored(spec, config, vendors)


def test_cdi_specs_leave_out_shared_devices(config: Config) -> None:
    source = generate.SpecSource(VENDOR, machine(), config, "/opt/gpuhook-cdi-hook")
    made = generate.generate(source)
    assert [each["name"] for each in made.document["devices"] if len(each["name"]) == 1] == [
        "2",
        "3",
    ]
    every = next(each for each in made.document["devices"] if each["name"] == "all")
    paths = {each["path"] for each in every["containerEdits"]["deviceNodes"]}
    assert not paths & {"/dev/nvidia0", "/dev/nvidia1"}
    assert sum("is shared by MPS" in each for each in made.warnings) == 2


WAYS: dict[str, Callable[[Config], object]] = {
    "a document": lambda config: generate.SpecSource(VENDOR, machine(), config, "/h").edits(
        machine().devices[:1]
    ),
    "the engine's plugin": lambda config: decide(
        ContainerRequest("n", "p", "c", "", (f"{VARIABLE}=0",)), InjectionMode(config, "/h")
    ),
    "nvidia-container-cli": lambda config: configure.configure(
        configure.ConfigureTarget(1, "/none"),
        granted(config),
        config,
        configure.DeviceSwitches(False, False),
    ),
    "a root folder": lambda config: root_folder.check(
        resolved(config), config, Spec("config.json", "{}")
    ),
    "a hook alone": lambda config: inject.Injection(
        Spec("config.json", "{}"), config, resolved(config)
    )._check_without_runtime(make_plan(resolved(config).grants, image.unknown(), {}).operations),
}


def resolved(config: Config) -> Allocation:
    found = asked(config, f"{VARIABLE}=0", "NVIDIA_DRIVER_CAPABILITIES=graphics")
    assert found is not None
    return found


def granted(config: Config) -> contract.Grant:
    return resolved(config).grants[0]


@pytest.mark.protects(
    "only-by-runtime",
    "CDI specs, NRI plugins and hooks without gpu-py can't inject a device shared by MPS",
)
@pytest.mark.protects(
    "hook-alone",
    "a hook that can't set environment variables refuses devices shared by MPS",
    instead="pass",
    only="other_ways and hook",
)
@pytest.mark.parametrize("name", [*WAYS])
def test_other_ways_to_give_a_shared_device_are_refused(config: Config, name: str) -> None:
    keep(config)
    with pytest.raises(GpuhookError, match="is shared by MPS, and only gpu-py makes clients"):
        WAYS[name](config)
