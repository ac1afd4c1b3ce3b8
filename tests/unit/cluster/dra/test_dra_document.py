"""CDI specs of claims, and the meaning of claim configurations, without a kubelet."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import paper
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError
from gpuhook.base.sizes import parse_quantity
from gpuhook.cluster.dra import configs, document
from gpuhook.cluster.dra.document import ClaimDevice
from gpuhook.cluster.dra.options import DraOptions
from gpuhook.core import contract
from gpuhook.vendors import registry

HOOK = "/usr/bin/gpuhook-cdi-hook"
NVIDIA, AMD = registry.BUILT_IN["nvidia"], registry.BUILT_IN["amd"]


@pytest.mark.protects(
    "dra-limit-hook", "a DRA claim's CDI spec with a memory limit has the hook that sets it"
)
@pytest.mark.parametrize("limited", [False, True])
def test_the_hook_is_added_only_for_a_device_with_a_limit(limited: bool, tmp_path: Path) -> None:
    inventory = paper.machine("amd", tmp_path / "root", 2)
    vendor = contract.load(AMD)
    more = {"mounts": [{"hostPath": "/dev/null", "containerPath": "/x"}]} if limited else {}
    devices = [
        ClaimDevice("uid-a", inventory.devices[0], vendor, inventory, more, with_hook=limited),
        ClaimDevice("uid-b", inventory.devices[1], vendor, inventory),
    ]
    where = document.path(str(tmp_path), "gpu.amd.com", "uid")
    text = document.text("gpu.amd.com", devices, DraOptions(cdi_hook_path=HOOK), Config())
    document.write(where, text)
    made = json.loads(Path(where).read_text())
    assert made["kind"] == "k8s.gpu.amd.com/claim"
    hooks = [[hook["path"] for hook in each["containerEdits"].get("hooks", ())]
             for each in made["devices"]]  # fmt: skip
    assert hooks == [[HOOK] if limited else [], []]
    assert document.uids(str(tmp_path), "gpu.amd.com") == ["uid"]
    assert document.uids(str(tmp_path), "gpu.nvidia.com") == []


def test_claim_configuration_precedes_class_and_the_last_match_counts() -> None:
    def each(source: str, memory: str, *requests: str) -> Any:
        parameters = {"apiVersion": configs.API, "kind": configs.KIND, "memory": memory}
        opaque = {"driver": "d", "parameters": parameters}
        return {"source": source, "requests": [*requests], "opaque": opaque}

    def chosen(request: str, *given: Any) -> str | None:
        found = configs.wish(given, "d", request, NVIDIA, is_part=False).memory
        return found.text if found else None

    claim, of_class = each("FromClaim", "1Gi"), each("FromClass", "2Gi")
    assert chosen("a", claim, of_class) == chosen("a", of_class, claim) == "1Gi"
    later = each("FromClaim", "3Gi", "a")
    assert chosen("a", claim, later) == chosen("a/x", claim, later) == "3Gi"
    assert chosen("b", claim, later) == "1Gi"
    assert chosen("a", claim, each("FromClaim", "4Gi", "a/x")) == "1Gi"
    other = {**claim, "opaque": {"driver": "other", "parameters": {"any": "thing"}}}
    assert chosen("a", other) is None


def test_an_invalid_memory_size_is_refused() -> None:
    sizes: tuple[Any, ...] = ("0", "-1", "8GB", "1.5.5Gi", "", [], {}, True, "1e99", "²Gi")
    for memory in sizes:
        parameters = {"apiVersion": configs.API, "kind": configs.KIND, "memory": memory}
        opaque = {"driver": "d", "parameters": parameters}
        with pytest.raises(RequestError):
            configs.wish([{"opaque": opaque}], "d", "a", NVIDIA, is_part=False)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8Gi", 8 << 30), ("1.5Gi", 3 << 29), ("500M", 500_000_000), (17, 17), ("1e3", 1000),
        ("1k", 1000), ("2Ki", 2048), ("1E", 10**18), ("0.1", 1), ("1Ei", 1 << 60),
    ],
)  # fmt: skip
def test_kubernetes_quantities_are_parsed(text: object, number: int) -> None:
    assert parse_quantity(text) == number


@given(some.one_of(some.text(max_size=30), some.integers(), some.floats(), some.none()))
def test_any_value_is_a_valid_quantity_or_none(text: object) -> None:
    found = parse_quantity(text)
    assert found is None or 0 < found <= 1 << 60


JSON = some.recursive(
    some.one_of(some.none(), some.booleans(), some.integers(), some.text(max_size=8)),
    lambda inner: some.one_of(
        some.lists(inner, max_size=3),
        some.dictionaries(
            some.sampled_from(["sharing", "strategy", "mpsConfig", "timeSlicingConfig", "interval",
                               "defaultActiveThreadPercentage", "x"]),
            inner, max_size=3,
        ),
    ),
    max_leaves=8,
)  # fmt: skip


@given(some.dictionaries(some.sampled_from(["sharing", "kind", "memory", "x"]), JSON), JSON)
def test_any_parameters_are_read_or_refused(parameters: Any, kind: Any) -> None:
    for api in (configs.API, "resource.nvidia.com/v1beta1", None):
        told = {"apiVersion": api, "kind": "GpuConfig", **parameters}
        opaque = {"driver": "d", "parameters": told}
        with suppress(RequestError):
            configs.wish([{"opaque": opaque, "source": kind}], "d", "a", NVIDIA, is_part=False)
