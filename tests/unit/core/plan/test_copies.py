"""Copies of the driver's manifests, in a plan and in formats that can only mount files."""

from typing import Any

import own
import pytest
from machines import FILES, VERSION, asked, gpu, granted, machine

from gpuhook.base.config.model import Config
from gpuhook.base.loader import layout
from gpuhook.base.oci.spec import Spec
from gpuhook.core.cdi.generate import CdiWriter, SpecSource, generate
from gpuhook.core.cdi.hook import HookWork, by_mounts
from gpuhook.core.inventory.model import DriverFile
from gpuhook.core.plan import spec_edits
from gpuhook.core.plan.image import Image
from gpuhook.core.plan.operations import Operation, Plan
from gpuhook.core.planner import make_plan
from gpuhook.vendors.nvidia.edits import WriteCopy
from gpuhook.vendors.nvidia.model import NvidiaInventory
from gpuhook.vendors.nvidia.variables import CAPABILITIES
from gpuhook.vendors.nvidia.vendor import VENDOR

GLX = "libGLX_nvidia.so.0"
FILE = f"libGLX_nvidia.so.{VERSION}"
ICD, ICD32 = "/etc/vulkan/icd.d/nvidia_icd.x86_64.json", "/etc/vulkan/icd.d/nvidia_icd.i686.json"
TEXT = f'{{"ICD":{{"library_path":"{GLX}"}}}}\n'
# A driver as Fedora has it: libraries in /usr/lib64 and /usr/lib, full paths in its manifests.
FEDORA = (
    *(each for each in FILES if "GLX" not in each.target and "vulkan" not in each.target),
    DriverFile("library", f"/usr/lib64/{FILE}", FILE, "graphics", GLX),
    DriverFile("library32", f"/usr/lib/{FILE}", FILE, "graphics", GLX),
    DriverFile("manifest", "/usr/share/v/x.json", ICD, "graphics", content=TEXT),
    DriverFile("alias", f"/usr/lib64/{FILE}", f"/usr/lib64/{GLX}", "graphics"),
    DriverFile("manifest32", "/usr/share/v/i.json", ICD32, "graphics", content=TEXT),
    DriverFile("alias", f"/usr/lib/{FILE}", f"/usr/lib/{GLX}", "graphics"),
)
MACHINE = machine(gpu(0, 0))
DEBIAN = Image(layout.debian(own.MACHINE))
LIB64 = Image(layout.Layout("/usr/lib64", "/usr/lib", uses_cache=True))
MUSL = Image(layout.Layout("/usr/lib", None, uses_cache=False))


def fedora(root: str = "/") -> NvidiaInventory:
    facts = MACHINE.driver_version, MACHINE.cuda_version, MACHINE.gpus, MACHINE.nodes
    return NvidiaInventory(root, *facts, FEDORA)


def plan(image: Image, *capabilities: str, root: str = "/") -> Plan:
    wanted = capabilities or CAPABILITIES
    return make_plan([granted(asked("0", capabilities=tuple(wanted)), fedora(root))], image)


def copies(made: Plan) -> dict[str, WriteCopy]:
    return {op.destination: op for op in made.operations if isinstance(op, WriteCopy)}


def written(made: Plan) -> spec_edits.SpecWriter:
    return spec_edits.SpecWriter().write(made.operations)


def sources(operations: list[Operation]) -> dict[str, str]:
    steps = [op.to_json() for op in operations]
    return {op["destination"]: op["source"] for op in steps if op["kind"] == "bind"}


@pytest.mark.parametrize(
    ("image", "folder32"), [(DEBIAN, own.FOLDER32), (LIB64, "/usr/lib")], ids=["debian", "lib64"]
)
def test_a_manifest_copy_names_libraries_as_the_loader_finds_them(
    image: Image, folder32: str
) -> None:
    found = copies(plan(image))
    assert found[ICD].content == TEXT
    assert found[ICD32].content == TEXT.replace(GLX, f"{folder32}/{GLX}")
    assert found[ICD].to_json()["source"] == "/usr/share/v/x.json"
    assert found[ICD].optional


@pytest.mark.parametrize(
    ("image", "capabilities"),
    [(DEBIAN, ("graphics", "compute")), (MUSL, CAPABILITIES), (DEBIAN, ("compat32", "graphics"))],
)
def test_a_32_bit_manifest_copy_comes_only_with_32_bit_libraries(
    image: Image, capabilities: tuple[str, ...]
) -> None:
    has_them = "compat32" in capabilities and image is not MUSL
    assert set(copies(plan(image, *capabilities))) == ({ICD, ICD32} if has_them else {ICD})
    assert copies(plan(image, "compute", "utility")) == {}


def test_config_json_mounts_the_manifest_and_its_libraries() -> None:
    """Mode spec, fstab lines and systemd units can mount files, but not write copies."""
    made = plan(DEBIAN)
    found = sources(written(made).steps)
    assert found[ICD] == "/usr/share/v/x.json"
    assert found[f"/usr/lib64/{GLX}"] == f"/usr/lib64/{FILE}"
    assert found[f"/usr/lib/{GLX}"] == f"/usr/lib/{FILE}"
    assert found[f"{own.FOLDER}/{GLX}"] == f"/usr/lib64/{FILE}"
    assert not [op for op in written(made).unwritten if isinstance(op, WriteCopy)]
    spec = spec_edits.apply(Spec("/b/config.json", "{}"), written(made)).data
    mounts = [mount["destination"] for mount in spec["mounts"]]
    assert {ICD, ICD32, f"/usr/lib64/{GLX}", f"/usr/lib/{GLX}"} < set(mounts)
    assert len(mounts) == len(set(mounts))


def test_an_image_with_the_hosts_folders_has_no_mount_twice() -> None:
    steps = written(plan(LIB64)).steps
    places = [op.to_json()["destination"] for op in steps if "destination" in op.to_json()]
    assert len(places) == len(set(places))


def test_another_driver_root_does_not_appear_in_manifest_copies() -> None:
    found = copies(plan(DEBIAN, root="/run/nvidia/driver"))
    assert found[ICD].content == TEXT
    assert found[ICD].to_json()["source"] == "/run/nvidia/driver/usr/share/v/x.json"


# CDI documents -----------------------------------------------------------------------------------


def mounts(edits: dict[str, Any]) -> dict[str, str]:
    found = {each["containerPath"]: each["hostPath"] for each in edits["mounts"]}
    assert len(found) == len(edits["mounts"])
    return found


def test_a_cdi_spec_has_manifests_unchanged_and_libraries_at_their_paths() -> None:
    made = generate(SpecSource(VENDOR, fedora(), Config(), "/x"), ("index",)).document
    found = mounts(made["containerEdits"])
    assert found[ICD] == "/usr/share/v/x.json"
    assert found[f"/usr/lib64/{FILE}"] == f"/usr/lib64/{FILE}"
    links = {op.to_json()["destination"] for op in hook_steps(made) if op.kind == "symlink"}
    assert {f"/usr/lib64/{GLX}", f"/usr/lib/{GLX}"} < links
    assert not [op for op in hook_steps(made) if isinstance(op, WriteCopy)]


def hook_steps(document: dict[str, Any], files: tuple[DriverFile, ...] = FEDORA) -> list[Operation]:
    common = document["containerEdits"]["mounts"]
    spec = {
        "linux": {"devices": []},
        "mounts": [
            {"destination": each["containerPath"], "source": each["hostPath"]} for each in common
        ],
    }
    inventory = NvidiaInventory("/", VERSION, "13.0", MACHINE.gpus, MACHINE.nodes, files)
    work = HookWork(spec, [], VENDOR, inventory, Config(), by_mounts(spec, "/b"))
    return work.plan(DEBIAN).operations


def test_the_hook_links_library_paths_that_a_manifest_names_elsewhere() -> None:
    """The driver of a distribution may have links in the folder that its manifests name."""
    alias = DriverFile("alias", f"/usr/lib64/{FILE}", f"/opt/nvidia/lib/{GLX}", "graphics")
    files = (*FEDORA, alias)
    inventory = NvidiaInventory("/", VERSION, "13.0", MACHINE.gpus, MACHINE.nodes, files)
    made = generate(SpecSource(VENDOR, inventory, Config(), "/x"), ("index",)).document
    steps = [op.to_json() for op in hook_steps(made, files) if op.kind == "symlink"]
    links = [(op["destination"], op["target"]) for op in steps]
    assert links.count((f"/opt/nvidia/lib/{GLX}", f"/usr/lib64/{FILE}")) == 1
    assert len({place for place, _ in links}) == len(links)


def test_a_manifest_may_name_the_librarys_own_path() -> None:
    alias = DriverFile("alias", f"/usr/lib64/{FILE}", f"/usr/lib64/{FILE}", "graphics")
    files = (*FEDORA, alias)
    inventory = NvidiaInventory("/", VERSION, "13.0", MACHINE.gpus, MACHINE.nodes, files)
    made = generate(SpecSource(VENDOR, inventory, Config(), "/x"), ("index",)).document
    steps = hook_steps(made, files)
    places = [op.to_json()["destination"] for op in steps if op.kind == "symlink"]
    assert f"/usr/lib64/{FILE}" not in places
    [wanted] = [granted(asked("0", capabilities=CAPABILITIES), inventory)]
    mounted = sources(written(make_plan([wanted], LIB64)).steps)
    assert mounted[f"/usr/lib64/{FILE}"] == f"/usr/lib64/{FILE}"


def test_a_cdi_spec_without_a_hook_mounts_all_manifest_paths() -> None:
    alias = DriverFile("alias", f"/usr/lib64/{FILE}", f"/opt/nvidia/lib/{GLX}", "graphics")
    facts = MACHINE.driver_version, MACHINE.cuda_version, MACHINE.gpus, MACHINE.nodes
    inventory = NvidiaInventory("/", *facts, (*FEDORA, alias))
    source = SpecSource(VENDOR, inventory, Config(), "/x", without_hook=True)
    found = mounts(generate(source, ("index",)).document["containerEdits"])
    assert found[ICD] == "/usr/share/v/x.json"
    assert found[f"/opt/nvidia/lib/{GLX}"] == f"/usr/lib64/{FILE}"
    assert found[f"/usr/lib64/{GLX}"] == f"/usr/lib64/{FILE}"


def test_a_cdi_spec_mounts_the_original_of_a_copy() -> None:
    [copy] = copies(plan(DEBIAN, "graphics")).values()
    [mount] = CdiWriter(()).write([copy]).edits["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == ("/usr/share/v/x.json", ICD)
