"""Checks of NVIDIA's device nodes, on simulated machines."""

import stat
from types import SimpleNamespace

import pytest
from fabricated import Tree, said

from gpuhook.tools.vendors.nvidia.doctor import nodes


def test_the_version_of_the_open_kernel_module_is_read(tree: Tree) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    tree.write("/proc/driver/nvidia/version", text)
    assert nodes.module_version(tree.case) == "580.65.06"


def test_proc_below_the_driver_root_takes_precedence(tree: Tree) -> None:
    tree.driver(module="1.2.3")
    tree.config.driver_root = "/run/nvidia/driver"
    tree.write("/run/nvidia/driver/proc/driver/nvidia/version", "NVRM version: X  550.54.15  Y")
    assert nodes.module_version(tree.case) == "550.54.15"


def test_missing_nodes_are_named(tree: Tree) -> None:
    tree.driver()
    status, message = said(nodes.device_nodes(tree.case))["device-nodes"]
    assert status == "failure"
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
        assert f"/dev/{name} is missing" in message


def test_nodes_with_wrong_numbers_and_plain_files_are_named(tree: Tree) -> None:
    tree.driver(gpus=1)
    tree.link("/dev/nvidiactl", "/dev/null")
    tree.write("/dev/nvidia0")
    message = said(nodes.device_nodes(tree.case))["device-nodes"][1]
    assert "/dev/nvidiactl is 1:3 and should be 195:255" in message
    assert "/dev/nvidia0 isn't a character device" in message


def test_a_missing_uvm_module_is_named(tree: Tree) -> None:
    tree.driver(gpus=0)
    tree.write("/proc/devices", "Character devices:\n195 nvidia\n")
    message = said(nodes.device_nodes(tree.case))["device-nodes"][1]
    assert "kernel module nvidia-uvm isn't loaded" in message


def test_device_nodes_are_not_checked_without_a_driver_module(tree: Tree) -> None:
    assert said(nodes.device_nodes(tree.case)) == {}
    assert said(nodes.dev_char_links(tree.case)) == {}


def test_missing_dev_char_links_warn_under_systemd_with_cdi_specs(tree: Tree) -> None:
    tree.driver(gpus=1)
    tree.link("/dev/nvidia0", "/dev/null")
    assert said(nodes.dev_char_links(tree.case)) == {}
    (tree.root / "run/systemd/system").mkdir(parents=True)
    made = "gpu-py links the nodes in /dev/char when it starts a container"
    assert said(nodes.dev_char_links(tree.case))["dev-char"] == ("ok", made)
    case = tree.case
    case.cdi.documents["/etc/cdi/acme.yaml"] = {"kind": "acme.com/gpu"}
    assert said(nodes.dev_char_links(case))["dev-char"] == ("ok", made)
    case.cdi.documents["/etc/cdi/nvidia.yaml"] = {"kind": "nvidia.com/gpu"}
    status, message = said(nodes.dev_char_links(case))["dev-char"]
    assert status == "warning"
    assert message.startswith("/dev/char/195:0 is missing")
    tree.link("/dev/char/195:0", "../nvidia0")
    assert said(nodes.dev_char_links(tree.case))["dev-char"][0] == "ok"


@pytest.mark.parametrize(
    ("drivers", "program", "matter"),
    [
        (["cgroupfs"], "", False),
        (["systemd"], "", True),
        (["cgroupfs", "systemd"], "", True),
        (["cgroupfs", None], "", True),
        (["cgroupfs"], "podman", True),
        (["cgroupfs"], "crio", True),
    ],
)
def test_dev_char_links_are_checked_only_with_systemd_cgroups(
    tree: Tree, drivers: list[str | None], program: str, matter: bool
) -> None:
    tree.driver(gpus=1)
    tree.link("/dev/nvidia0", "/dev/null")
    (tree.root / "run/systemd/system").mkdir(parents=True)
    if program:
        tree.write(f"/usr/bin/{program}", mode=0o755)
    case = tree.case
    case.__dict__["dockers"] = [
        SimpleNamespace(info={"CgroupDriver": driver} if driver else None) for driver in drivers
    ]
    assert ("dev-char" in said(nodes.dev_char_links(case))) == matter


def test_nodes_not_accessible_to_everyone_give_a_warning(tree: Tree) -> None:
    node = tree.write("/dev/nvidia0", mode=0o600)
    assert said(nodes._node_modes(tree.case, ["/dev/nvidia0"]))["device-modes"][0] == "warning"
    node.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IROTH | stat.S_IWOTH)
    assert said(nodes._node_modes(tree.case, ["/dev/nvidia0"])) == {}
