"""Messages of the kubelet, compared with bytes that were written by hand."""

import subprocess
import sys
from typing import Any

import pytest
import wire

from gpuhook.monitor import kubelet_api as api

P, R = api.plugin, api.pod_resources
DEVICE = wire.message((1, "GPU-1"), (2, "Healthy"), (3, wire.message((1, wire.message((1, 1))))))
TOPOLOGY = P.TopologyInfo(nodes=[P.NUMANode(ID=1)])

# A message made by gpuhook's code, and its bytes on the wire.
SAME: dict[str, tuple[Any, bytes]] = {
    "register": (
        P.RegisterRequest(
            version="v1beta1",
            endpoint="a.sock",
            resource_name="nvidia.com/gpu",
            options=P.DevicePluginOptions(get_preferred_allocation_available=True),
        ),
        wire.message(
            (1, "v1beta1"), (2, "a.sock"), (3, "nvidia.com/gpu"), (4, wire.message((2, 1)))
        ),
    ),
    "options": (P.DevicePluginOptions(pre_start_required=True), wire.message((1, 1))),
    "nothing": (P.Empty(), b""),
    "list": (
        P.ListAndWatchResponse(
            devices=[
                P.Device(ID="GPU-1", health=api.HEALTHY, topology=TOPOLOGY),
                P.Device(ID="GPU-2", health=api.UNHEALTHY),
            ]
        ),
        wire.message((1, DEVICE), (1, wire.message((1, "GPU-2"), (2, "Unhealthy")))),
    ),
    "prefer": (
        P.PreferredAllocationRequest(
            container_requests=[
                P.ContainerPreferredAllocationRequest(
                    available_deviceIDs=["a", "b"], must_include_deviceIDs=["b"], allocation_size=2
                )
            ]
        ),
        wire.message((1, wire.message((1, "a"), (1, "b"), (2, "b"), (3, 2)))),
    ),
    "preferred": (
        P.PreferredAllocationResponse(
            container_responses=[P.ContainerPreferredAllocationResponse(deviceIDs=["a", "b"])]
        ),
        wire.message((1, wire.message((1, "a"), (1, "b")))),
    ),
    "allocate": (
        P.AllocateRequest(container_requests=[P.ContainerAllocateRequest(devices_ids=["a", "b"])]),
        wire.message((1, wire.message((1, "a"), (1, "b")))),
    ),
    "answer": (
        P.AllocateResponse(
            container_responses=[
                P.ContainerAllocateResponse(
                    envs={"NVIDIA_VISIBLE_DEVICES": "a"},
                    mounts=[P.Mount(container_path="/c", host_path="/h", read_only=True)],
                    devices=[P.DeviceSpec(container_path="/c", host_path="/h", permissions="rw")],
                    annotations={"cdi.k8s.io/x": "y"},
                    cdi_devices=[P.CDIDevice(name="nvidia.com/gpu=0")],
                )
            ]
        ),
        wire.message(
            (
                1,
                wire.message(
                    (1, wire.message((1, "NVIDIA_VISIBLE_DEVICES"), (2, "a"))),
                    (2, wire.message((1, "/c"), (2, "/h"), (3, 1))),
                    (3, wire.message((1, "/c"), (2, "/h"), (3, "rw"))),
                    (4, wire.message((1, "cdi.k8s.io/x"), (2, "y"))),
                    (5, wire.message((1, "nvidia.com/gpu=0"))),
                ),
            )
        ),
    ),
    "prestart": (P.PreStartContainerRequest(devices_ids=["a"]), wire.message((1, "a"))),
    "pods": (
        R.ListPodResourcesResponse(
            pod_resources=[
                R.PodResources(
                    name="pod",
                    namespace="default",
                    containers=[
                        R.ContainerResources(
                            name="main",
                            devices=[
                                R.ContainerDevices(
                                    resource_name="nvidia.com/gpu",
                                    device_ids=["GPU-1"],
                                    topology=R.TopologyInfo(nodes=[R.NUMANode(ID=1)]),
                                )
                            ],
                            cpu_ids=[1, 300],
                            dynamic_resources=[
                                R.DynamicResource(
                                    claim_name="c",
                                    claim_resources=[
                                        R.ClaimResource(
                                            cdi_devices=[R.CDIDevice(name="a.b/c=d")],
                                            device_name="d",
                                        )
                                    ],
                                )
                            ],
                        )
                    ],
                )
            ]
        ),
        wire.message(
            (
                1,
                wire.message(
                    (1, "pod"),
                    (2, "default"),
                    (
                        3,
                        wire.message(
                            (1, "main"),
                            (
                                2,
                                wire.message(
                                    (1, "nvidia.com/gpu"),
                                    (2, "GPU-1"),
                                    (3, wire.message((1, wire.message((1, 1))))),
                                ),
                            ),
                            (3, wire.varint(1) + wire.varint(300)),
                            (
                                5,
                                wire.message(
                                    (2, "c"),
                                    (4, wire.message((1, wire.message((1, "a.b/c=d"))), (4, "d"))),
                                ),
                            ),
                        ),
                    ),
                ),
            )
        ),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_messages_match_the_expected_bytes_both_ways(name: str) -> None:
    ours, text = SAME[name]
    assert ours.SerializeToString(deterministic=True) == text
    assert type(ours).FromString(text) == ours


def test_unknown_fields_from_a_newer_kubelet_are_ignored() -> None:
    text = wire.message((1, wire.message((1, "a"), (77, "new"))), (99, 5))
    assert list(P.AllocateRequest.FromString(text).container_requests[0].devices_ids) == ["a"]


def test_kubelet_messages_work_with_protobuf_4_21() -> None:
    """Debian 12 has a protobuf (4.21) without message_factory.GetMessageClass."""
    gone = "import google.protobuf.message_factory as m; del m.GetMessageClass; "
    code = f"{gone}from gpuhook.monitor import kubelet_api; "
    code += "print(kubelet_api.plugin.Device(ID='GPU-1').ID)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("GPU-1\n", "")
