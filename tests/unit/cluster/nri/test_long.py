"""Overlong requests: an engine drops a plugin after two seconds, and thereby the gate."""

from dataclasses import replace

import pytest
from yardstick import costs_less

from gpuhook.base.errors import RequestError
from gpuhook.cluster.nri.answer import InjectionMode, edits
from gpuhook.cluster.nri.asked import ContainerRequest
from gpuhook.vendors import registry
from gpuhook.vendors.ascend import variables as ascend
from gpuhook.vendors.neuron.vendor import CORES
from gpuhook.vendors.nvidia import variables

MANY = 1 << 16
# Requests for devices, or for details of them, that are too long.
Pairs = tuple[tuple[str, str], ...]
LONG: dict[str, tuple[tuple[str, ...], Pairs, Pairs]] = {
    **{
        name: ((f"{name}=" + "0," * MANY,), (), ())
        for each in registry.BUILT_IN.values()
        for name in (*each.VARIABLES, *each.LEGACY)
    },
    **{
        name: ((f"{name}=" + "arch<0.1 " * MANY,), (), ())
        for name in (
            "NVIDIA_REQUIRE_X", variables.IMEX_CHANNELS, variables.DRIVER_CAPABILITIES,
            variables.MIG_CONFIG, *variables.MPS_LIMITS, ascend.OPTIONS, ascend.LISTS,
            ascend.SPLIT, CORES,
        )
    },
    "many variables": (tuple(f"NVIDIA_REQUIRE_{each}=cuda>1" for each in range(MANY)), (), ()),
    "swarm": (("DOCKER_RESOURCE_GPU=" + "0," * MANY,), (), ()),
    "mounts": (
        (), tuple((f"/var/run/amd-container-devices/{each}", "/dev/null") for each in range(MANY)),
        (),
    ),
    "annotations": ((), (), (("cdi.k8s.io/a", "amd.com/gpu=1," * MANY),)),
    "others' variables": (
        ("AMD_VISIBLE_DEVICES=1", *(f"A{each}=" for each in range(MANY))), (), ()),
}  # fmt: skip


@pytest.mark.protects(
    "nri-longest",
    "a container with an overlong request for devices is refused at once",
    instead="if False:",
)
@pytest.mark.protects(
    "nri-most",
    "a device request with too many variables, mounts or annotations is refused quickly",
    instead="if False:",
)
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("name", [*LONG])
def test_an_overlong_device_request_is_refused_at_once(
    way: InjectionMode, name: str, gate: bool
) -> None:
    way.config.swarm_resource = "DOCKER_RESOURCE_GPU"
    asked = ContainerRequest("team", "pod", "main", "", *LONG[name])

    def ask() -> None:
        with pytest.raises(RequestError, match=r"asks for devices .* may have"):
            edits(asked, replace(way, given=(lambda *_: []) if gate else None))

    assert costs_less(ask, 10)


def test_long_unrelated_variables_are_accepted(way: InjectionMode) -> None:
    """Such variables aren't read, and a container without a request is accepted unread."""
    asked = ContainerRequest(
        "n", "p", "c", "", (*(["A=" + "x" * 100_000] * 20), "AMD_VISIBLE_DEVICES=1")
    )
    assert edits(asked, way)
    asked = ContainerRequest("n", "p", "c", "", tuple(f"A{each}=" for each in range(MANY)))
    assert edits(asked, replace(way, given=lambda *_: [])) == {}
