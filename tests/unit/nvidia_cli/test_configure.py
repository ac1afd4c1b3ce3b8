"""nvidia-container-cli configure on a node with a gate."""

from typing import Any

import machines
import pytest

from gpuhook import inject
from gpuhook.base.config.model import Config
from gpuhook.base.errors import RequestError
from gpuhook.core.contract import Grant
from gpuhook.nvidia_cli import configure
from gpuhook.vendors.nvidia.vendor import VENDOR


@pytest.mark.protects("configure-gate", "nvidia-container-cli can't bypass a node's device gate")
def test_configure_is_refused_on_a_node_with_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """This command doesn't know the container's id, so it can't find the verdict."""
    inventory = machines.machine(machines.gpu(0, 0))
    grant = Grant(VENDOR, machines.asked("0"), inventory, inventory.devices)
    opened: list[Any] = []

    def open_container(*words: Any) -> None:
        opened.append(words)
        raise RequestError("It is opened", "None")

    monkeypatch.setattr(inject, "open_container", open_container)
    target, switches = configure.ConfigureTarget(1, "/none"), configure.DeviceSwitches(False, False)
    config = Config()
    with pytest.raises(RequestError, match="It is opened"):
        configure.configure(target, grant, config, switches)
    config.gate = True
    with pytest.raises(RequestError, match="This node has a gate"):
        configure.configure(target, grant, config, switches)
    assert len(opened) == 1
