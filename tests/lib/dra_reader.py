"""Objects of resource.k8s.io as other programs read them: Kubernetes' models, its rules, and CEL.

The rules come from the API's documentation (resource/v1 types). They are written again here,
and are not gpuhook's.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import celpy
from celpy import celtypes
from kubernetes import client
from kubernetes.utils.quantity import parse_quantity

Object = dict[str, Any]

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
# The regular expression of semver.org, without build metadata.
SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-((0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
)
_MODELS = {"ResourceSlice": "V1ResourceSlice", "DeviceClass": "V1DeviceClass"}


def read(each: Object) -> Any:
    """Return an object as Kubernetes' models read it, and check that they know each field."""
    api = client.ApiClient()
    model = api.deserialize(json.dumps(each), _MODELS[each["kind"]], "application/json")
    assert api.sanitize_for_serialization(model) == each
    return model


def check(objects: Iterable[Object], release: tuple[int, int] = (1, 35)) -> list[Any]:
    """Check everything that a node publishes; return its slices as models."""
    every = [read(each) for each in objects]
    slices = [each for each in every if each.kind == "ResourceSlice"]
    classes = [each for each in every if each.kind == "DeviceClass"]
    names = [each.metadata.name for each in every]
    assert len({*names}) == len(names)
    assert all(len(name) <= 253 and SUBDOMAIN.fullmatch(name) for name in names)
    resources = [each.spec.extended_resource_name for each in classes]
    served = [name for name in resources if name]
    assert len({*served}) == len(served)
    for driver in {each.spec.driver for each in slices}:
        _check_pool([each for each in slices if each.spec.driver == driver], release)
    return slices


def _check_pool(slices: list[Any], release: tuple[int, int]) -> None:
    assert len({each.spec.pool.name for each in slices}) == 1
    assert {each.spec.pool.resource_slice_count for each in slices} == {len(slices)}
    assert {each.spec.node_name for each in slices} != {None}
    assert len(slices[0].spec.driver) <= 63
    sets: dict[str, dict[str, Any]] = {}
    for each in slices:
        devices, counters = each.spec.devices or [], each.spec.shared_counters or []
        assert not (devices and counters) or release < (1, 35)
        assert len(counters) <= 8
        if release < (1, 35):
            assert sum(len(each.counters) for each in counters) <= 32
            here = {each.name for each in counters}
            assert all(
                used.counter_set in here
                for device in devices
                for used in device.consumes_counters or []
            )
        for one in counters:
            assert LABEL.fullmatch(one.name)
            assert one.name not in sets
            assert 0 < len(one.counters) <= 32
            assert all(LABEL.fullmatch(name) for name in one.counters)
            sets[one.name] = one.counters
        costly = any(device.consumes_counters or device.taints for device in devices)
        assert len(devices) <= (64 if costly else 128)
    devices = [device for each in slices for device in each.spec.devices or []]
    names = [device.name for device in devices]
    assert len({*names}) == len(names)
    for device in devices:
        _check_device(device, sets)


def _check_device(device: Any, sets: dict[str, dict[str, Any]]) -> None:
    assert LABEL.fullmatch(device.name), device.name
    attributes, capacity = device.attributes or {}, device.capacity or {}
    assert len(attributes) + len(capacity) <= 32
    for name in [*attributes, *capacity]:
        domain, slash, own = name.rpartition("/")
        assert IDENTIFIER.fullmatch(own)
        assert not slash or SUBDOMAIN.fullmatch(domain)
    for name, value in attributes.items():
        said = {key: each for key, each in value.to_dict().items() if each is not None}
        assert len(said) == 1, (name, said)
        text = said.get("string", said.get("version", ""))
        assert len(str(text).encode()) <= 64
        assert "version" not in said or SEMVER.fullmatch(said["version"]), said
    for value in capacity.values():
        _check_policy(parse_quantity(value.value), value.request_policy, device)
    for used in device.consumes_counters or []:
        for name, value in used.counters.items():
            all_of_it = parse_quantity(sets[used.counter_set][name].value)
            assert 0 <= parse_quantity(value.value) <= all_of_it, (device.name, name)
    for taint in device.taints or []:
        domain, _, word = taint.key.partition("/")
        assert SUBDOMAIN.fullmatch(domain)
        assert LABEL.fullmatch(word)
        assert taint.effect in {"NoSchedule", "NoExecute"}


def _check_policy(capacity: Any, policy: Any, device: Any) -> None:
    """Check the policy for requests of a capacity (resource/v1, CapacityRequestPolicy)."""
    if policy is None:
        return
    assert device.allow_multiple_allocations
    default = parse_quantity(policy.default)
    assert 0 < default <= capacity
    assert (policy.valid_values is None) != (policy.valid_range is None)
    if policy.valid_values is not None:
        values = [parse_quantity(each) for each in policy.valid_values]
        assert values == sorted({*values})
        assert len(values) <= 10
        assert default in values
        return
    sizes = policy.valid_range
    least, most, step = (parse_quantity(each) for each in (sizes.min, sizes.max, sizes.step))
    assert least <= default <= most <= capacity
    assert least + step <= capacity
    assert {default % step, most % step} == {0}


# Claims -----------------------------------------------------------------------------------------


def chosen(slices: Iterable[Any], expression: str) -> list[str]:
    """Return the names of the devices that a claim's CEL expression selects."""
    environment = celpy.Environment()
    program = environment.program(
        environment.compile(expression),
        functions={"quantity": _quantity, "semver": _semver, "compareTo": _compare},
    )
    return [
        device.name
        for each in slices
        for device in each.spec.devices or []
        if program.evaluate({"device": _seen(each.spec.driver, device)})
    ]


def _seen(driver: str, device: Any) -> Any:
    """Return a device as expressions see it: attributes and capacities by domain."""
    attributes: dict[str, dict[str, Any]] = {driver: {}}
    capacity: dict[str, dict[str, Any]] = {driver: {}}
    for name, value in (device.attributes or {}).items():
        domain, _, own = name.rpartition("/")
        [said] = [(key, each) for key, each in value.to_dict().items() if each is not None]
        kept = _semver(said[1]) if said[0] == "version" else said[1]
        attributes.setdefault(domain or driver, {})[own] = kept
    for name, value in (device.capacity or {}).items():
        capacity[driver][name] = _quantity(value.value)
    return celpy.json_to_cel({"driver": driver, "attributes": attributes, "capacity": capacity})


def _quantity(text: Any) -> Any:
    return celtypes.IntType(int(parse_quantity(str(text))))


def _semver(text: Any) -> Any:
    major, minor, patch = (int(word) for word in str(text).partition("-")[0].split("."))
    return celtypes.IntType((major << 40) + (minor << 20) + patch)


def _compare(one: Any, other: Any) -> Any:
    return celtypes.IntType((one > other) - (one < other))
