"""manifests: selection of the driver's files, and their content in a container."""

import json
from typing import Any

import own
import pytest
from driver_tree import LIBS, Root
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.core.inventory.model import DriverFile
from gpuhook.vendors.nvidia import manifests
from gpuhook.vendors.nvidia.model import ALIAS, MANIFEST, MANIFEST32

GLX, EGL = "libGLX_nvidia.so.0", "libEGL_nvidia.so.0"
PLACES = {
    "vulkan/icd.d/a_icd.json": "/etc/vulkan/icd.d/a_icd.json",
    "vulkan/implicit_layer.d/a.json": "/etc/vulkan/implicit_layer.d/a.json",
    "vulkan/explicit_layer.d/a.json": "/etc/vulkan/explicit_layer.d/a.json",
    "vulkansc/icd.d/a.json": "/etc/vulkansc/icd.d/a.json",
    "glvnd/egl_vendor.d/10_a.json": "/usr/share/glvnd/egl_vendor.d/10_a.json",
    "egl/egl_external_platform.d/15_a.json": "/usr/share/egl/egl_external_platform.d/15_a.json",
}


@pytest.fixture
def driver(root: Root) -> Root:
    """A driver with libraries in /usr/lib64, and a Vulkan library of another vendor."""
    for name, soname in {"libGLX_nvidia.so": GLX, "libEGL_nvidia.so": EGL}.items():
        root.add(name, soname, "usr/lib64")
    root.add("libnvidia-opencl.so", "libnvidia-opencl.so.1", "usr/lib64")
    root.add("libnvidia-egl-gbm.so", "libnvidia-egl-gbm.so.1", "usr/lib64", version="1.1.2")
    root.add_file("usr/lib64/libvulkan_radeon.so")
    return root


def icd(library: str, **more: Any) -> str:
    ours = {"library_path": library, "api_version": "1.4.312", **more}
    return json.dumps({"file_format_version": "1.0.1", "ICD": ours}, indent=4)


def found(root: Root, kind: str = MANIFEST) -> dict[str, DriverFile]:
    return {file.target: file for file in root.find() if file.kind == kind}


def aliases(root: Root) -> set[tuple[str, str]]:
    return {(file.target, file.path) for file in root.find() if file.kind == ALIAS}


def library_of(file: DriverFile) -> str:
    path: str = json.loads(file.content)["ICD"]["library_path"]
    return path


@pytest.mark.parametrize("place", PLACES)
def test_a_manifest_naming_a_driver_library_is_found(driver: Root, place: str) -> None:
    driver.put(f"usr/share/{place}", icd(GLX))
    [file] = found(driver).values()
    assert (file.target, file.path) == (PLACES[place], f"/usr/share/{place}")
    assert (file.capability, file.content) == ("graphics", ""), "the host's file itself"
    assert aliases(driver) == set()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "text",
    [
        icd("libvulkan_radeon.so"),
        icd("/usr/lib64/libvulkan_radeon.so"),
        icd("libGLX_mesa.so.0"),
        icd(""),
        icd("/usr/lib64/"),
        "{}",
        "[]",
        '"libGLX_nvidia.so.0"',
        '{"library_path": ["libGLX_nvidia.so.0"]}',
        "libGLX_nvidia.so.0",
        "",
        "\0",
        '{"ICD": {"library_path": "libGLX_nvidia.so.0"',
        "[" * 5000,
        '{"a":' * 20 + icd(GLX) + "}" * 20,
    ],
)
def test_foreign_and_invalid_manifests_are_ignored(driver: Root, place: str, text: str) -> None:
    driver.put(f"usr/share/{place}", text)
    driver.put("usr/share/vulkan/icd.d/latin1.json", icd(GLX).encode() + b"\xe4")
    driver.put("usr/share/vulkan/icd.d/long.json", icd(GLX) + " " * (1 << 16))
    driver.put("usr/share/vulkan/icd.d/README", icd(GLX))
    driver.put("usr/share/vulkan/icd.d/old.json.bak", icd(GLX))
    assert found(driver) == {}


@pytest.mark.parametrize("text", ["", "{}", icd("libGLX_nvidia.so.1"), "not JSON"])
def test_a_manifest_with_nvidias_file_name_is_given_unchanged(driver: Root, text: str) -> None:
    driver.put("usr/share/glvnd/egl_vendor.d/10_nvidia.json", text)
    [file] = found(driver).values()
    assert (file.target, file.content) == ("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "")


PATHS = [
    "/usr/lib64/libGLX_nvidia.so.0",
    "/usr/lib64/libGLX_nvidia.so.{version}",
    "/usr/lib64/../lib64//libGLX_nvidia.so.0",
    "/usr/lib/of-an-older-package/libGLX_nvidia.so.0",
    "/lib64/libGLX_nvidia.so.0",
    "../../../lib64/libGLX_nvidia.so.0",
    "./libGLX_nvidia.so.0",
]


@pytest.mark.parametrize("path", PATHS)
def test_library_paths_become_names_that_the_loader_finds(driver: Root, path: str) -> None:
    path = path.format(version=driver.version)
    driver.link("lib64", "usr/lib64")
    driver.put("usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", icd(path, library_arch="64"))
    [file] = found(driver).values()
    assert library_of(file) == GLX
    before, after = json.loads(icd(path, library_arch="64")), json.loads(file.content)
    before["ICD"]["library_path"] = GLX
    assert after == before


def test_library_paths_in_manifests_become_aliases(driver: Root) -> None:
    library = f"/usr/lib64/libGLX_nvidia.so.{driver.version}"
    driver.put("usr/share/vulkan/icd.d/a.json", icd("/usr/lib64/libGLX_nvidia.so.0"))
    assert aliases(driver) == {("/usr/lib64/libGLX_nvidia.so.0", library)}
    driver.put("usr/share/vulkan/icd.d/a.json", icd("../../../lib64/libGLX_nvidia.so.0"))
    assert aliases(driver) == {("/lib64/libGLX_nvidia.so.0", library)}, "from /etc/vulkan/icd.d"


def test_library_paths_of_every_driver_layer_are_replaced(driver: Root) -> None:
    driver.add_file(f"usr/lib64/libnvidia-present.so.{driver.version}")
    layers = [
        {"name": "VK_LAYER_NV_optimus", "library_path": f"/usr/lib64/{GLX}"},
        {
            "name": "VK_LAYER_NV_present",
            "library_path": f"/usr/lib64/libnvidia-present.so.{driver.version}",
            "enable_environment": {"NVPRESENT_ENABLE_SMOOTH_MOTION": "1"},
        },
        {"name": "VK_LAYER_other", "library_path": "/usr/lib64/libother.so"},
    ]
    text = json.dumps({"file_format_version": "1.0.1", "layers": layers})
    driver.put("usr/share/vulkan/implicit_layer.d/nvidia_layers.json", text)
    [file] = found(driver).values()
    paths = [layer["library_path"] for layer in json.loads(file.content)["layers"]]
    assert paths == [GLX, f"libnvidia-present.so.{driver.version}", "/usr/lib64/libother.so"]


def test_a_library_named_by_a_manifest_is_included(driver: Root) -> None:
    driver.add("libnvidia-vksc-core.so", "libnvidia-vksc-core.so.1", "usr/lib64")
    driver.add("libnvidia-new.so", "libnvidia-new.so.1", "usr/lib64")
    driver.put("usr/share/vulkansc/icd.d/nvidia_icd.x86_64.json", icd("libnvidia-vksc-core.so.1"))
    by_name = {file.target.partition(".so")[0]: file.capability for file in driver.find()}
    assert by_name["libnvidia-vksc-core"] == "graphics"
    assert by_name["libnvidia-new"] == "all"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("libnvidia-opencl.so.1\n", ""),
        ("/usr/lib64/libnvidia-opencl.so.1\n", "libnvidia-opencl.so.1\n"),
        ("\n  /usr/lib64/libnvidia-opencl.so.1  \n", "\n  libnvidia-opencl.so.1  \n"),
    ],
)
def test_opencl_manifests_of_the_driver_alone_are_found_and_rewritten(
    driver: Root, text: str, expected: str
) -> None:
    driver.put("etc/OpenCL/vendors/nvidia.icd", text)
    driver.put("etc/OpenCL/vendors/pocl.icd", "libpocl.so.2\n")
    every = [file for file in driver.find() if file.kind == MANIFEST]
    assert [file.capability for file in every] == ["graphics", "compute"]
    assert {(file.target, file.content) for file in every} == {
        ("/etc/OpenCL/vendors/nvidia.icd", expected)
    }


def test_the_first_folder_with_a_manifest_name_takes_precedence(driver: Root) -> None:
    for number, folder in enumerate(("etc", "usr/local/share", "usr/share")):
        driver.put(f"{folder}/vulkan/icd.d/nvidia_icd.json", icd(GLX, api_version=folder))
        driver.put(f"{folder}/vulkan/icd.d/{number}.json", icd(EGL))
    every = found(driver)
    names = {target.rpartition("/")[2] for target in every}
    assert names == {"nvidia_icd.json", "0.json", "1.json", "2.json"}
    assert every["/etc/vulkan/icd.d/nvidia_icd.json"].path == "/etc/vulkan/icd.d/nvidia_icd.json"


# 32-bit programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["usr/lib", own.FOLDER32, "run/opengl-driver-32/lib"])
@pytest.mark.parametrize("name", ["nvidia_icd.i686.json", "nvidia_icd.json"])
def test_a_manifest_with_a_32_bit_library_serves_32_bit_programs(
    driver: Root, folder: str, name: str
) -> None:
    library = f"/{folder.strip('/')}/libGLX_nvidia.so.{driver.version}"
    driver.add_file(library, GLX, bits=32)
    driver.link(f"{folder}/{GLX}", library)
    driver.put(f"usr/share/vulkan/icd.d/{name}", icd(f"/{folder.strip('/')}/{GLX}"))
    driver.put("usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", icd(f"/usr/lib64/{GLX}"))
    [file] = found(driver, MANIFEST32).values()
    assert (file.target, library_of(file)) == (f"/etc/vulkan/icd.d/{name}", GLX)
    assert list(found(driver)) == ["/etc/vulkan/icd.d/nvidia_icd.x86_64.json"]


@pytest.mark.parametrize("word", ["i686", "i386", "x86", "armhf"])
def test_a_manifest_file_name_marks_it_as_32_bit(driver: Root, word: str) -> None:
    driver.put(f"usr/share/vulkan/icd.d/nvidia_icd.{word}.json", icd(GLX))
    assert list(found(driver, MANIFEST32)) == [f"/etc/vulkan/icd.d/nvidia_icd.{word}.json"]


@pytest.mark.parametrize("word", ["x86_64", "aarch64", "64", "amd64"])
def test_a_manifest_named_for_64_bit_serves_64_bit_programs(driver: Root, word: str) -> None:
    driver.put(f"usr/share/vulkan/icd.d/nvidia_icd.{word}.json", icd(GLX))
    assert list(found(driver)) == [f"/etc/vulkan/icd.d/nvidia_icd.{word}.json"]


# Anything that may be in a file ------------------------------------------------------------------


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("library_path"), inner),
    max_leaves=20,
)


@given(_VALUES, st.dictionaries(st.text(min_size=1), st.text()))
def test_only_library_paths_are_changed(tree: Any, names: dict[str, str]) -> None:
    """Other values of a file, and their order, are unchanged."""
    changed = manifests._replaced(tree, names)
    assert json.dumps(manifests._replaced(tree, {})) == json.dumps(tree)
    expected = [names.get(each, each) for each in manifests._texts(tree)]
    assert list(manifests._texts(changed)) == [each for each in expected if each]


@given(st.text())
def test_any_manifest_text_is_read_without_error(text: str) -> None:
    manifest = manifests._Manifest("/etc", "nvidia.json", "/etc/nvidia.json", text)
    assert all(manifest._names())


def test_manifest_libraries_are_found_through_debians_links(root: Root) -> None:
    current = f"{LIBS}/nvidia/current"
    root.add("libGLX_nvidia.so", GLX, current)
    root.link(f"{LIBS}/{GLX}", f"/etc/alternatives/{GLX}")
    root.link(f"etc/alternatives/{GLX}", f"/{current}/{GLX}")
    root.make_cache()
    root.put("usr/share/vulkan/icd.d/nvidia_icd.json", icd(f"/{LIBS}/{GLX}"))
    [file] = found(root).values()
    assert library_of(file) == GLX
    assert aliases(root) == {(f"/{LIBS}/{GLX}", f"/{current}/libGLX_nvidia.so.{root.version}")}
