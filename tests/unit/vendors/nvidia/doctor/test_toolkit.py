"""Checks of NVIDIA's toolkit and its CDI specs on the host, on simulated machines."""

import pytest
from fabricated import BIN, VERSION, Tree, said

from gpuhook.tools.vendors.nvidia.doctor import toolkit
from gpuhook.tools.vendors.nvidia.program_links import LINKS

SPEC = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: all
  containerEdits:
    mounts:
    - {{hostPath: /usr/lib/{name}, containerPath: /usr/lib/{name}}}
"""


@pytest.mark.parametrize("name", [f"libcuda.so.{VERSION}", "libnvidia-ml.so.1", "libx.so.470.1.2"])
def test_cdi_specs_of_the_loaded_driver_give_no_finding(tree: Tree, name: str) -> None:
    tree.driver()
    tree.write("/etc/cdi/nvidia.json", SPEC.format(name=name))
    assert said(toolkit.cdi_versions(tree.case)) == {}


@pytest.mark.parametrize("name", ["libcuda.so.470.1.2", "libnvidia-ml.so.470.1.2"])
def test_cdi_specs_of_another_driver_version_give_a_warning(tree: Tree, name: str) -> None:
    tree.write("/etc/cdi/nvidia.json", SPEC.format(name=name))
    assert said(toolkit.cdi_versions(tree.case)) == {}  # no driver is loaded
    tree.driver()
    assert said(toolkit.cdi_versions(tree.case))["cdi-versions"] == (
        "warning",
        f"/etc/cdi/nvidia.json is stale: it is for driver 470.1.2, and {VERSION} is loaded",
    )


def test_nvidias_toolkit_beside_gpuhook_gives_a_note(tree: Tree) -> None:
    assert said(toolkit.foreign_toolkit(tree.case))["foreign-toolkit"][0] == "ok"
    tree.program("/usr/bin/nvidia-ctk", "\x7fELF")
    status, message = said(toolkit.foreign_toolkit(tree.case))["foreign-toolkit"]
    assert status == "note", "what isn't used does no harm"
    assert "/usr/bin/nvidia-ctk" in message


def test_nvidia_program_names_linked_to_gpuhook_are_ok(tree: Tree) -> None:
    gpu_py = tree.program(f"{BIN}/gpu-py")
    tree.link("/usr/bin/nvidia-container-runtime", str(gpu_py))
    (tree.root / "usr/bin/nvidia-container-runtime").chmod(0o755)
    assert said(toolkit.foreign_toolkit(tree.case))["foreign-toolkit"][0] == "ok"


def _status(tree: Tree) -> str:
    return said(toolkit.foreign_toolkit(tree.case))["foreign-toolkit"][0]


@pytest.mark.parametrize("name", [*LINKS])
@pytest.mark.parametrize("folder", ["/usr/bin", "/usr/local/nvidia/toolkit"])
def test_a_toolkit_hidden_by_gpuhooks_links_gives_a_warning(
    tree: Tree, name: str, folder: str
) -> None:
    tree.program(f"{folder}/{name}", "#!/bin/sh\n")
    assert _status(tree) != "warning"
    tree.program(f"/usr/local/bin/{name}", "#!/bin/sh\nexec gpuhook-prestart\n")
    status, message = said(toolkit.foreign_toolkit(tree.case))["foreign-toolkit"]
    assert status == "warning"
    assert f"({folder}/{name})" in message
    assert f"found first: /usr/local/bin/{name}" in message
    (tree.root / folder[1:] / name).unlink()
    assert _status(tree) != "warning"


def test_a_toolkit_found_before_gpuhooks_links_gives_no_warning(tree: Tree) -> None:
    tree.program("/usr/local/bin/nvidia-ctk", "#!/bin/sh\n")
    tree.program("/usr/bin/nvidia-ctk", "#!/bin/sh\nexec gpuhook-ctk\n")
    assert _status(tree) != "warning"
