"""The content of containers for the devices that the kubelet chose: shared and own cases."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import RequestError, UnknownDeviceError
from gpuhook.cluster.device_plugin.allocate import ContainerResponse, Mount, allocate
from gpuhook.cluster.device_plugin.settings import STRATEGIES, Settings
from gpuhook.cluster.device_plugin.state import DeviceSpec, Resource, Unit
from gpuhook.core.cdi.names import annotated

FOLDER = "/var/run/nvidia-container-devices"
CONTROL = DeviceSpec("/dev/nvidiactl", "/dev/nvidiactl")
ENABLED = {"NVIDIA_GDS": "enabled", "NVIDIA_IMEX_CHANNELS": "0"}


def unit(name: str, **facts: Any) -> Unit:
    nodes = (CONTROL, DeviceSpec(f"/host/dev/{name}", f"/dev/{name}"))
    return Unit(name, name, f"nvidia.com/gpu={name}", name, **{"nodes": nodes, **facts})


def gpus(*names: str, **facts: Any) -> Resource:
    usual = {"mounts": FOLDER, "driver_folder": "/usr/local/nvidia", **facts}
    units = tuple(unit(name) for name in names)
    return Resource("nvidia.com/gpu", "nvidia", "NVIDIA_VISIBLE_DEVICES", units=units, **usual)


def by(*strategies: str, **facts: Any) -> Settings:
    return Settings(device_list_strategy=strategies, **facts)


# The shared cases -----------------------------------------------------------------------------


@pytest.mark.vectors("plugin_allocate", "plugin.allocate_envvar")
def test_envvar_allocations_match_the_shared_cases(case: dict[str, Any]) -> None:
    ids, expected = case["input"]["ids"], case["expected"]
    answer = allocate(gpus(*ids), ids, by(*case["input"]["strategies"]))
    assert answer == ContainerResponse(envs=expected["envs"])


@pytest.mark.vectors("plugin_allocate", "plugin.allocate_cdi_annotations")
def test_annotation_allocations_match_the_shared_cases(case: dict[str, Any]) -> None:
    facts = case["input"]
    kind = facts["kind_of_gpus"].partition("/")[0]
    beside = [*(f"{kind}/imex-channel={n}" for n in facts["imex_channels"]), *facts["additional"]]
    settings = by("cdi-annotations", cdi_annotation_prefix=facts["prefix"])
    resource = gpus(*facts["ids"], cdi=tuple(beside))
    answer = allocate(resource, facts["ids"], settings, facts["allocation_id"])
    assert answer == ContainerResponse(annotations=case["expected"].get("annotations", {}))


@pytest.mark.vectors("plugin_allocate", "plugin.validate_request")
def test_request_validation_matches_the_shared_cases(case: dict[str, Any]) -> None:
    facts = case["input"]
    shared = facts["sharing"] is not None
    names = list(dict.fromkeys(each.partition("::")[0] for each in facts["devices"]))
    replicas = len(facts["devices"]) // len(names) if shared else 1
    resource = gpus(*names, replicas=replicas, single=bool(facts["failRequestsGreaterThanOne"]))
    assert list(resource.offers()) == facts["devices"]
    if case["expected"].get("error"):
        with pytest.raises(RequestError):
            allocate(resource, facts["ids"], by("envvar"))
    else:
        assert allocate(resource, facts["ids"], by("envvar"))


# Strategies ------------------------------------------------------------------------------------


def test_volume_mounts_request_the_devices() -> None:
    answer = allocate(gpus("a", "b", places=("imex/3",)), ["b", "a"], by("volume-mounts"))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": FOLDER}
    places = [f"{FOLDER}/{name}" for name in ("b", "a", "imex/3")]
    assert answer.mounts == tuple(Mount(each, "/dev/null", read_only=False) for each in places)


@pytest.mark.protects(
    "plugin-memory",
    "the mount that requests a device also names its memory limit",
    instead="places = [f'{resource.mounts}/{unit.selector}' for unit in units]",
)
@pytest.mark.parametrize(
    ("memory", "ids", "places"),
    [
        (("25%",) * 4, ["a::0"], ["25%/a"]),
        (("25%",) * 4, ["a::0", "b::3", "a::2", "a::0"], ["50%/a", "25%/b"]),
        (("80%", "80%"), ["a::0", "a::1"], ["100%/a"]),
        (("8GiB", "4GiB"), ["a::1"], [f"{4 << 30}/a"]),
        (("8GiB", "4GiB"), ["a::1", "b::0", "b::1"], [f"{4 << 30}/a", f"{10 << 30}/b"]),
    ],
)
def test_a_memory_share_is_named_by_the_mount_that_requests_the_device(
    memory: tuple[str, ...], ids: list[str], places: list[str]
) -> None:
    """No mount requests the device without its limit, so no container can avoid the limit."""
    facts: dict[str, Any] = {"memory": memory, "replicas": len(memory), "places": ("imex/3",)}
    units = tuple(unit(name, memory=10 << 30) for name in ("a", "b"))
    answer = allocate(replace(gpus(**facts), units=units), ids, by("volume-mounts"))
    expected = [*(f"{FOLDER}/memory/{place}" for place in places), f"{FOLDER}/imex/3"]
    assert [mount.container for mount in answer.mounts] == expected
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": FOLDER}


def test_the_cdi_cri_strategy_answers_with_cdi_device_names() -> None:
    resource = gpus("a", "b", cdi=("nvidia.com/gds=all",), environment=ENABLED)
    answer = allocate(resource, ["b", "a"], by("cdi-cri"))
    names = ("nvidia.com/gpu=b", "nvidia.com/gpu=a", "nvidia.com/gds=all")
    assert answer == ContainerResponse(cdi_devices=names)


def test_the_mounts_strategy_gives_nodes_and_the_driver_folder() -> None:
    settings = by("mounts", driver_folder="/srv/driver")
    answer = allocate(gpus("a", "b"), ["a", "b"], settings)
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "void"}, "gpu-py has nothing to add"
    assert answer.mounts == (Mount("/usr/local/nvidia", "/srv/driver", read_only=True),)
    assert [node.container for node in answer.devices] == ["/dev/nvidiactl", "/dev/a", "/dev/b"]
    assert answer.devices[1].host == "/host/dev/a"


def test_the_value_for_no_device_is_the_vendors_own() -> None:
    """Habana's own hook, which may be installed, would read void as all devices."""
    answer = allocate(gpus("a", nothing="none"), ["a"], by("mounts"))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "none"}


def test_variables_that_gpu_py_would_set_are_given_without_it() -> None:
    units = tuple(unit(name, variables={"SEATS": seat}) for name, seat in (("a", "3"), ("b", "1")))
    resource = replace(gpus(), units=units)
    for strategy in ("mounts", "cdi-cri", "cdi-annotations"):
        assert allocate(resource, ["b", "a"], by(strategy)).envs["SEATS"] == "1,3"
    for strategy in ("envvar", "volume-mounts"):
        assert "SEATS" not in allocate(resource, ["b", "a"], by(strategy)).envs
    partly = replace(resource, units=(units[0], unit("b")))
    assert "SEATS" not in allocate(partly, ["b", "a"], by("cdi-cri")).envs


def test_a_vendor_without_driver_files_gets_only_device_nodes() -> None:
    answer = allocate(gpus("a", driver_folder=""), ["a"], by("mounts"))
    assert (answer.mounts, len(answer.devices)) == ((), 2)


def test_pass_device_specs_adds_nodes_to_a_variable() -> None:
    resource = gpus("a", "b", environment=ENABLED)
    answer = allocate(resource, ["a"], by("envvar", pass_device_specs=True))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "a", **ENABLED}
    assert [node.container for node in answer.devices] == ["/dev/nvidiactl", "/dev/a"]
    assert allocate(resource, ["a"], by("cdi-cri", pass_device_specs=True)).devices == ()


def test_all_strategies_can_be_combined() -> None:
    answer = allocate(gpus("a"), ["a"], by(*STRATEGIES), "7")
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": FOLDER}
    assert [mount.container for mount in answer.mounts] == [f"{FOLDER}/a", "/usr/local/nvidia"]
    assert answer.cdi_devices == ("nvidia.com/gpu=a",)
    assert annotated(answer.annotations) == ["nvidia.com/gpu=a"]
    assert len(answer.devices) == 2


def test_each_allocation_has_a_unique_annotation_key() -> None:
    first, second = (allocate(gpus("a"), ["a"], by("cdi-annotations")) for _ in range(2))
    assert first.annotations.keys() != second.annotations.keys()
    assert annotated({**first.annotations, **second.annotations}) == ["nvidia.com/gpu=a"] * 2


def test_an_empty_allocation_gives_no_device() -> None:
    answer = allocate(gpus("a"), [], by("envvar"))
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": "void"}, "whatever the image says"
    assert not allocate(gpus("a"), [], by("cdi-annotations")).annotations


# Refusals ---------------------------------------------------------------------------------------


def test_an_unknown_device_id_is_refused() -> None:
    with pytest.raises(UnknownDeviceError, match="has no device 'x'"):
        allocate(gpus("a"), ["a", "x"], by("envvar"))


def test_an_unhealthy_device_is_refused() -> None:
    resource = gpus("a", "b")
    bad = replace(resource.units[0], reason="GPU 0: Xid 79")
    resource = replace(resource, units=(bad, resource.units[1]))
    with pytest.raises(RequestError, match="GPU 0: Xid 79"):
        allocate(resource, ["a"], by("envvar"))
    assert allocate(resource, ["b"], by("envvar")).envs == {"NVIDIA_VISIBLE_DEVICES": "b"}


# Properties --------------------------------------------------------------------------------------


@given(st.data())
def test_replicas_of_a_device_are_given_once_in_order(data: st.DataObject) -> None:
    resource = gpus("a", "b", "c", replicas=3)
    ids = data.draw(st.lists(st.sampled_from(list(resource.offers())), unique=True, min_size=1))
    strategies = data.draw(st.lists(st.sampled_from(STRATEGIES), unique=True, min_size=1))
    answer = allocate(resource, ids, by(*strategies, pass_device_specs=True), "7")
    devices = list(dict.fromkeys(each.partition("::")[0] for each in ids))
    names = [f"nvidia.com/gpu={each}" for each in devices]
    if "cdi-cri" in strategies:
        assert list(answer.cdi_devices) == names
    if "cdi-annotations" in strategies:
        assert annotated(answer.annotations) == names
    if "volume-mounts" in strategies:
        places = [mount.container for mount in answer.mounts if mount.host == "/dev/null"]
        assert places == [f"{FOLDER}/{each}" for each in devices]
    elif "envvar" in strategies:
        assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join(devices)
    paths = [node.container for node in answer.devices]
    assert len(set(paths)) == len(paths)
    if {"envvar", "volume-mounts", "mounts"} & {*strategies}:
        assert paths == ["/dev/nvidiactl", *(f"/dev/{each}" for each in devices)]
