"""Annotations by which NVIDIA's plugin adds CDI devices to pods: here they add none."""

from dataclasses import replace
from typing import Any

import pytest

from gpuhook.cluster.nri.answer import InjectionMode, edits
from gpuhook.cluster.nri.asked import ContainerRequest


@pytest.mark.vectors("nri", "nri.requests")
@pytest.mark.parametrize("gate", [True, False])
def test_an_annotation_gives_no_device_the_kubelet_has_not_allocated(
    case: dict[str, Any], gate: bool, way: InjectionMode
) -> None:
    """Otherwise a user who may annotate a pod would get every device of the node."""
    given = case["input"]
    annotations = tuple(given["annotations"].items())
    asked = ContainerRequest(
        given["pod_namespace"], "pod", given["container"], "", (), (), annotations
    )
    assert edits(asked, replace(way, given=(lambda *_: []) if gate else None)) == {}
