"""The checks of what NVIDIA's toolkit brought to the host, on machines made of files."""

import pytest
from fabricated import BIN, VERSION, Tree, said

from gpuhook.tools.vendors.nvidia.doctor import toolkit

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
def test_cdi_specs_of_this_driver(tree: Tree, name: str) -> None:
    tree.driver()
    tree.write("/etc/cdi/nvidia.json", SPEC.format(name=name))
    assert said(toolkit.cdi_versions(tree.case)) == {}


@pytest.mark.parametrize("name", ["libcuda.so.470.1.2", "libnvidia-ml.so.470.1.2"])
def test_cdi_specs_of_another_driver(tree: Tree, name: str) -> None:
    tree.write("/etc/cdi/nvidia.json", SPEC.format(name=name))
    assert said(toolkit.cdi_versions(tree.case)) == {}  # no driver is loaded
    tree.driver()
    assert said(toolkit.cdi_versions(tree.case))["cdi-versions"] == (
        "warning",
        f"/etc/cdi/nvidia.json is stale: it is for driver 470.1.2, and {VERSION} is loaded",
    )


def test_nvidias_toolkit_beside_us(tree: Tree) -> None:
    assert said(toolkit.foreign_toolkit(tree.case))["foreign-toolkit"][0] == "ok"
    tree.program("/usr/bin/nvidia-ctk", "\x7fELF")
    status, message = said(toolkit.foreign_toolkit(tree.case))["foreign-toolkit"]
    assert status == "note", "what isn't used does no harm"
    assert "/usr/bin/nvidia-ctk" in message


def test_nvidias_names_that_lead_to_us(tree: Tree) -> None:
    gpu_py = tree.program(f"{BIN}/gpu-py")
    tree.link("/usr/bin/nvidia-container-runtime", str(gpu_py))
    (tree.root / "usr/bin/nvidia-container-runtime").chmod(0o755)
    assert said(toolkit.foreign_toolkit(tree.case))["foreign-toolkit"][0] == "ok"
