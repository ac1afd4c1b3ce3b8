"""CDI specs of gpuhook, and those that name its hook.

Keeping them up to date needs a driver: see tests/integration/test_cdi_refresh.py.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
from machines import gpu, machine

from gpuhook.base.config.model import Config
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.tools.cdi.managed_specs import ManagedSpecs
from gpuhook.tools.cdi.refresh import is_ours, naming, refresh, removable
from gpuhook.tools.cdi.write import to_text
from gpuhook.vendors.nvidia import names
from gpuhook.vendors.nvidia.vendor import VENDOR

HOOK = "/opt/bin/gpuhook-cdi-hook"
Document = dict[str, Any]


@pytest.fixture
def document() -> Document:
    return generate(SpecSource(VENDOR, machine(gpu(0, 0)), Config(), HOOK)).document


def write(path: Path, document: Document) -> Path:
    path.write_text(to_text(document, "yaml"))
    return path


def kept(folder: Path) -> ManagedSpecs:
    return ManagedSpecs(str(folder), None, "yaml", ("podman",), HOOK)


def test_a_cdi_spec_is_recognised_as_ours_by_its_hook(document: Document) -> None:
    assert is_ours(document)
    theirs = copy.deepcopy(document)
    theirs["containerEdits"]["hooks"][0]["path"] = "/usr/bin/nvidia-cdi-hook"
    assert not is_ours(theirs)


def test_a_cdi_spec_without_a_hook_is_recognised_by_its_variables(document: Document) -> None:
    """Such a CDI spec is of a vendor whose devices are only nodes."""
    del document["containerEdits"]["hooks"]
    assert is_ours(document)
    document["containerEdits"]["env"].remove("NVIDIA_VISIBLE_DEVICES=void")
    assert not is_ours(document)
    assert not is_ours({"kind": names.KIND, "devices": []})


def test_only_our_own_cdi_specs_are_removed(document: Document, tmp_path: Path) -> None:
    path = write(tmp_path / "nvidia.com-gpu.yaml", document)
    write(tmp_path / "nvidia.yaml", document)
    assert [change.path for change in removable(kept(tmp_path))] == [str(path)]
    other = write(tmp_path / "other.com-npu.yaml", {**document, "kind": "other.com/npu"})
    assert [change.path for change in removable(kept(tmp_path))] == [str(path), str(other)]
    other.unlink()
    document["containerEdits"]["hooks"][0]["path"] = "/usr/bin/nvidia-cdi-hook"
    write(path, document)
    assert removable(kept(tmp_path)) == []
    path.write_text("broken: [\n")
    assert removable(kept(tmp_path)) == []
    path.unlink()
    path.mkdir()
    assert removable(kept(tmp_path)) == []


def test_cdi_specs_that_name_a_hook_are_found(document: Document, tmp_path: Path) -> None:
    hook = tmp_path / "bin/gpuhook-cdi-hook"
    hook.parent.mkdir()
    hook.touch()
    link = tmp_path / "bin/nvidia-cdi-hook"
    link.symlink_to(hook)
    folder = tmp_path / "cdi"
    folder.mkdir()
    assert naming(str(hook), [str(folder), str(tmp_path / "missing")]) == []
    hooks = document["containerEdits"].pop("hooks")
    write(folder / "none.yaml", document)
    for name, program in (("a.yaml", hook), ("b.yaml", link)):
        hooks[0]["path"] = str(program)
        document["devices"][0]["containerEdits"]["hooks"] = hooks
        write(folder / name, document)
    found = naming(str(hook), [str(folder), str(tmp_path / "missing")])
    assert found == [str(folder / "a.yaml"), str(folder / "b.yaml")]


def test_a_refresh_without_an_installation_writes_nothing(tmp_path: Path) -> None:
    assert refresh(str(tmp_path / "state")) is None
    assert list(tmp_path.iterdir()) == []
