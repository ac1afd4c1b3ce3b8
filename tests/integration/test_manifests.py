"""Manifests with whole paths, as in drivers of Fedora, RHEL and NixOS.

The image's own loader tries each of them: a program starts with the library that the manifest
names as LD_PRELOAD.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import bundles, cdi, root_folders
from harness.bundles import Bundle
from harness.commands import Result, run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.prefork import ONE, RUNTIMES

IS_X86 = os.uname().machine == "x86_64"
STORE = "/nix/store/0a1b-nvidia-x11-580.65.06"
ASK = ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all")
GLX, EGL = "libGLX_nvidia.so.0", "libEGL_nvidia.so.0"
# Paths of manifests below /usr/share -> the libraries that they name.
MANIFESTS = {
    "vulkan/icd.d/nvidia_icd.native.json": [GLX],
    "vulkan/implicit_layer.d/nvidia_layers.json": [GLX, "libnvidia-present.so.580.65.06"],
    "vulkan/explicit_layer.d/VkLayer_nv.json": [EGL],
    "vulkansc/icd.d/nvidia_icd.native.json": ["libnvidia-vksc-core.so.1"],
    "glvnd/egl_vendor.d/10_nvidia.json": [EGL],
    "egl/egl_external_platform.d/15_nvidia_gbm.json": ["libnvidia-egl-gbm.so.1"],
}
ICD = "OpenCL/vendors/nvidia.icd"
# Manifests of other vendors, which are in the image.
THEIRS = ("usr/share/vulkan/icd.d/radeon_icd.json", "usr/share/glvnd/egl_vendor.d/50_mesa.json")
RADEON = '{"ICD": {"library_path": "libc.so.6"}}'
_IN_ETC = ("vulkan", "vulkansc", "OpenCL")

_SCRIPT = r"""
for file in $(busybox find /etc/vulkan /etc/vulkansc /etc/OpenCL /usr/share/vulkan \
    /usr/share/glvnd /usr/share/egl -type f); do
    case $file in
    *.icd) paths=$(cat "$file") ;;
    *) paths=$(busybox grep -o '"library_path" *: *"[^"]*"' "$file" |
        busybox sed 's/.*"\([^"]*\)"$/\1/') ;;
    esac
    for path in $paths; do
        case $file in
        *i686*) [ -s "$path" ] && problem= || problem="no such file" ;;
        *) problem=$(LD_PRELOAD=$path /bin/true 2>&1) ;;
        esac
        echo "$file|$path|$problem"
    done
done
"""


def in_container(name: str) -> str:
    above = "/etc" if name.startswith(_IN_ETC) else "/usr/share"
    return f"{above}/{name}"


def seen(bundle: Bundle) -> Path:
    """Return the path of a bundle's root in its namespace."""
    return Path(f"/proc/{bundle.namespace.pid or 'self'}/root{bundle.root}")


def spoil(root: Path, folder: str, folder32: str) -> None:
    """Write manifests with whole paths, some of them in folders of a distribution."""
    shutil.rmtree(root / "etc/vulkan")
    shutil.rmtree(root / "etc/OpenCL")
    for part in ("glvnd", "egl"):
        shutil.rmtree(root / "usr/share" / part)
    share = root / "usr/share"
    for name, libraries in MANIFESTS.items():
        layers = [{"name": each, "library_path": f"{folder}/{each}"} for each in libraries]
        text = {"ICD": layers[0]} if len(layers) == 1 else {"layers": layers}
        put(share / name, json.dumps({"file_format_version": "1.0.1", **text}, indent=4))
    put(root / "etc" / ICD, f"{folder}/libnvidia-opencl.so.1\n")
    if folder32:
        icd = {"ICD": {"library_path": f"{folder32}/{GLX}"}}
        put(share / "vulkan/icd.d/nvidia_icd.i686.json", json.dumps(icd))


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_libraries(root: Path, folder: str) -> None:
    """Add libraries that only newer drivers have, as copies of others."""
    filler = (root / folder.strip("/") / "libnvidia-cfg.so.580.65.06").read_bytes()
    for soname in ("libnvidia-present.so.580.65.06", "libnvidia-vksc-core.so.1"):
        stem = soname.partition(".so")[0]
        name = f"{stem}.so.580.65.06"
        old = b"libnvidia-cfg.so.1\0"
        data = filler.replace(
            old + b"\0" * 20, (soname.encode() + b"\0").ljust(len(old) + 20, b"\0")
        )
        assert soname.encode() in data
        (root / folder.strip("/") / name).write_bytes(data)
        if name != soname:
            (root / folder.strip("/") / soname).symlink_to(name)


@pytest.fixture(scope="module", params=["fedora", "nixos"])
def distribution(
    request: pytest.FixtureRequest, workspace: Path, installation: Installation
) -> Iterator[Driver]:
    """A driver with the layout of a distribution."""
    path = workspace / f"driver-{request.param}"
    more = ["--compat32"] if IS_X86 else []
    made = simulate(installation, path, "--gpus=1", "--set=libdir=/usr/lib64", *more)
    add_libraries(path, "/usr/lib64")
    if request.param == "fedora":
        spoil(path, "/usr/lib64", "/usr/lib" if IS_X86 else "")
    else:
        become_nixos(path)
    yield made
    shutil.rmtree(path)


def become_nixos(root: Path) -> None:
    """Move all files to a store, with links to it, and leave no cache of the loader."""
    store = root / STORE.strip("/")
    store.mkdir(parents=True)
    (root / "usr/lib64").rename(store / "lib")
    folder32 = f"{STORE}-lib32/lib" if IS_X86 else ""
    if folder32:
        (root / folder32.strip("/")).mkdir(parents=True)
        for file in (root / "usr/lib").glob("lib*"):
            file.rename(root / folder32.strip("/") / file.name)
        links32 = root / "run/opengl-driver-32"
        links32.mkdir()
        (links32 / "lib").symlink_to(folder32)
    spoil(root, f"{STORE}/lib", folder32)
    (root / "usr/share").rename(store / "share")
    (store / "etc").mkdir()
    (root / "etc/OpenCL").rename(store / "etc/OpenCL")
    (store / "bin").mkdir()
    (root / "usr/bin/nvidia-smi").rename(store / "bin/nvidia-smi")
    (root / "run/opengl-driver").symlink_to(STORE)
    system = root / "run/current-system"
    system.mkdir()
    (system / "sw").symlink_to(STORE)
    for name in ("etc/ld.so.cache", "etc/ld.so.conf"):
        (root / name).unlink(missing_ok=True)


@pytest.fixture(params=["debian", "lib64"])
def place(
    request: pytest.FixtureRequest,
    workspace: Path,
    roots: dict[str, Path],
    low_level: tuple[str, Namespace],
) -> Iterator[Bundle]:
    """A bundle whose image has manifests of another vendor."""
    runtime, entered = low_level
    with bundles.bundle(workspace / "bundles", roots[request.param], entered, runtime) as made:
        for file in THEIRS:
            put(seen(made) / file, RADEON)
        made.environ(*ASK)
        made.command("sh", "-c", _SCRIPT)
        yield made


def check(result: Result, *, bare: bool) -> None:
    """Check that each manifest leads to a library, by a bare name where it was written so."""
    every: dict[str, list[tuple[str, str]]] = {}
    for line in result.ok().stdout.splitlines():
        file, path, problem = line.split("|")
        every.setdefault(file, []).append((path, problem))
    expected = {in_container(name): libraries for name, libraries in MANIFESTS.items()}
    expected[in_container(ICD)] = ["libnvidia-opencl.so.1"]
    theirs = {f"/{file}": ["libc.so.6"] for file in THEIRS}
    only32 = every.pop("/etc/vulkan/icd.d/nvidia_icd.i686.json", [])
    if IS_X86:
        [(path, problem)] = only32
        assert (path.startswith("/"), path.endswith(f"/{GLX}"), problem) == (True, True, "")
    assert {*every} == {*expected, *theirs}
    for file, found in every.items():
        assert [problem for _, problem in found] == [""] * len(found), (file, found)
        names = [path if bare else path.rpartition("/")[2] for path, _ in found]
        assert names == {**expected, **theirs}[file], file


def config_of(bundle: Bundle, driver: Driver, *more: str) -> dict[str, str]:
    config = write_config(bundle.path / "config", driver.root, [bundle.runtime], "\n".join(more))
    return {"GPUHOOK_CONFIG": str(config)}


@RUNTIMES
@pytest.mark.parametrize("helper", ["helper = true", "helper = false"])
def test_the_hook_writes_names_that_the_loader_finds(
    place: Bundle, distribution: Driver, installation: Installation, helper: str
) -> None:
    env = config_of(place, distribution)
    file = Path(env["GPUHOOK_CONFIG"])
    file.write_text(file.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{helper}\n"))
    check(place.run(installation.runtime, env), bare=True)


@RUNTIMES
def test_the_hook_of_another_runtime_writes_names_the_loader_finds(
    place: Bundle, distribution: Driver, installation: Installation
) -> None:
    config = Path(config_of(place, distribution)["GPUHOOK_CONFIG"])
    place.prestart(installation.hook, config)
    check(place.run(place.runtime), bare=True)


@ONE
def test_a_manifest_is_read_once_and_again_when_it_changes(
    place: Bundle, distribution: Driver, installation: Installation
) -> None:
    env = config_of(place, distribution)
    for _ in range(2):
        check(place.run(installation.runtime, env), bare=True)
    [saved] = (place.path / "config").rglob("inventory-nvidia-????????????????")
    before = saved.read_bytes()
    layers = (
        distribution.path("/run/opengl-driver") if (distribution.root / "nix").exists() else None
    )
    folder = layers or distribution.root / "usr"
    file = folder / "share/vulkan/explicit_layer.d/VkLayer_nv.json"
    text = file.read_text()
    file.write_text(text.replace("1.0.1", "1.0.2"))
    try:
        place.command("sh", "-c", "cat /etc/vulkan/explicit_layer.d/VkLayer_nv.json")
        assert "1.0.2" in place.run(installation.runtime, env).ok().stdout
        assert saved.read_bytes() != before
    finally:
        file.write_text(text)


@RUNTIMES
def test_mode_spec_mounts_libraries_where_manifests_name_them(
    place: Bundle, distribution: Driver, installation: Installation
) -> None:
    env = config_of(place, distribution, 'mode = "spec"')
    check(place.run(installation.runtime, env), bare=False)


@RUNTIMES
def test_a_cdi_spec_gives_libraries_that_manifests_name(
    place: Bundle, distribution: Driver, installation: Installation, tmp_path: Path
) -> None:
    config = Path(config_of(place, distribution)["GPUHOOK_CONFIG"])
    document = cdi.generate(installation, config, tmp_path)
    cdi.give(place, document, "0")
    check(place.run(place.runtime), bare=False)


@ONE
def test_a_cdi_spec_read_by_gpu_py_gives_libraries_that_manifests_name(
    place: Bundle, distribution: Driver, installation: Installation, tmp_path: Path
) -> None:
    folders = f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{tmp_path}"]'
    env = config_of(place, distribution, folders)
    cdi.generate(installation, Path(env["GPUHOOK_CONFIG"]), tmp_path)
    place.environ("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0")
    check(place.run(installation.runtime, env), bare=False)


@pytest.fixture
def folder(
    workspace: Path,
    roots: dict[str, Path],
    installation: Installation,
    distribution: Driver,
    tmp_path: Path,
) -> Iterator[root_folders.Folder]:
    config = write_config(tmp_path / "config", distribution.root, ["runc"])
    root, state = workspace / f"root-{distribution.root.name}", tmp_path / "state"
    with root_folders.made(roots["debian"], root, state, config, installation.command) as made:
        for file in THEIRS:
            put(made.root / file, RADEON)
        yield made


def test_apply_gives_libraries_that_manifests_name_and_undo_restores(
    folder: root_folders.Folder,
) -> None:
    before = root_folders.snapshot(folder)
    words = [word for setting in ASK for word in ("-e", setting)]
    folder.call(*words).ok()
    check(folder.inside("sh", "-c", _SCRIPT), bare=True)
    folder.call("--undo").ok()
    assert root_folders.snapshot(folder) == before


def test_fstab_lines_give_libraries_that_manifests_name(folder: root_folders.Folder) -> None:
    words = [word for setting in ASK for word in ("-e", setting)]
    lines = folder.call(*words, "--fstab=-").ok().stdout.splitlines()
    for line in lines:
        source, place, _, options = line.split()[:4]
        if not place.startswith(("/etc/", "/usr/", "/nix/")):
            continue
        target = folder.root / place.strip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        assert "x-create=file," in options
        target.touch()
        folder.namespace.run("mount", "--bind", source, target).ok()
    check(folder.inside("sh", "-c", _SCRIPT), bare=False)


# Other makers' manifests -------------------------------------------------------------------------


@RUNTIMES
def test_manifests_of_other_vendors_in_an_image_are_unchanged(
    place: Bundle, distribution: Driver, installation: Installation
) -> None:
    """A link in the image may have the name of the driver's manifest, too."""
    theirs = seen(place) / THEIRS[0]
    (seen(place) / "etc/vulkan/icd.d").mkdir(parents=True)
    link = seen(place) / "etc/vulkan/icd.d/nvidia_icd.native.json"
    link.symlink_to("/usr/share/vulkan/icd.d/radeon_icd.json")
    script = "cat /usr/share/vulkan/icd.d/radeon_icd.json /etc/vulkan/icd.d/nvidia_icd.native.json"
    place.command("sh", "-c", script)
    said = place.run(installation.runtime, config_of(place, distribution)).ok().stdout
    assert said.startswith(RADEON)
    assert f'"library_path":"{GLX}"' in said.removeprefix(RADEON)
    assert theirs.read_text() == RADEON


@ONE
def test_a_package_manager_can_replace_a_manifest(
    place: Bundle, distribution: Driver, installation: Installation
) -> None:
    """dpkg and rpm rename a new file over the old one, which fails with a mounted file."""
    files = [in_container(name) for name in (*MANIFESTS, ICD)]
    place.command("sh", "-ec", f"for file in {' '.join(files)}; do cp $file /x; mv /x $file; done")
    place.run(installation.runtime, config_of(place, distribution)).ok()


# Programs of a package that has a loader of its own -----------------------------------------------


_SMI = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (nvml == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
    int (*start)(void) = dlsym(nvml, "nvmlInit_v2");
    return printf("NVML says %d\n", start()), 0;
}
"""
GLIBC = "/nix/store/9z8y-glibc-2.40"
NIXOS = pytest.mark.parametrize("distribution", ["nixos"], indirect=True)


@pytest.fixture
def nixos_smi(distribution: Driver, tmp_path: Path) -> Iterator[None]:
    """An nvidia-smi as NixOS builds it, with its own loader, C library and search path."""
    libc = distribution.root / GLIBC.strip("/") / "lib"
    libc.mkdir(parents=True, exist_ok=True)
    found = run(["ldd", "/bin/cat"]).ok().stdout.split()
    files = [Path(word) for word in found if word.startswith("/")]
    loader = next(file for file in files if file.name.startswith("ld-"))
    for file in (*files, *(loader.parent / name for name in ("libdl.so.2", "libpthread.so.0"))):
        if file.exists():
            shutil.copy(file.resolve(), libc / file.name)
    source = tmp_path / "smi.c"
    source.write_text(_SMI)
    program = distribution.root / STORE.strip("/") / "bin/nvidia-smi"
    before = shutil.move(program, tmp_path / "nvidia-smi")
    run(
        [
            "gcc", source, "-o", program, "-ldl", f"-Wl,--dynamic-linker={GLIBC}/lib/{loader.name}",
            f"-Wl,-rpath,{STORE}/lib:{GLIBC}/lib", "-Wl,--enable-new-dtags",
        ]
    ).ok()  # fmt: skip
    yield
    shutil.move(before, program)
    shutil.rmtree(libc.parent)


@NIXOS
@pytest.mark.usefixtures("nixos_smi")
@pytest.mark.parametrize("mode", ["hook", "spec"])
@pytest.mark.parametrize("bundle", ["busybox", "debian", "lib64"], indirect=True)
@RUNTIMES
def test_nixos_programs_run_in_any_image(
    bundle: Bundle, distribution: Driver, installation: Installation, mode: str
) -> None:
    """These programs run even in an image without a C library."""
    env = config_of(bundle, distribution, f'mode = "{mode}"')
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=utility")
    bundle.command("nvidia-smi")
    assert bundle.run(installation.runtime, env).ok().stdout == "NVML says 0\n"


@NIXOS
@pytest.mark.usefixtures("nixos_smi")
@ONE
def test_nixos_programs_run_by_a_cdi_spec(
    bundle: Bundle, distribution: Driver, installation: Installation, tmp_path: Path
) -> None:
    config = Path(config_of(bundle, distribution)["GPUHOOK_CONFIG"])
    cdi.give(bundle, cdi.generate(installation, config, tmp_path), "0")
    bundle.command("nvidia-smi")
    assert bundle.run(bundle.runtime).ok().stdout == "NVML says 0\n"


@pytest.mark.protects(
    "loader-folder", "a program's own loader folder isn't mounted if other users can change it"
)
@NIXOS
@pytest.mark.usefixtures("nixos_smi")
@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o755, 12345)])
@ONE
def test_a_folder_writable_by_others_is_not_mounted_for_a_program(
    bundle: Bundle, distribution: Driver, installation: Installation, mode: int, owner: int
) -> None:
    env = config_of(bundle, distribution)
    libc = distribution.root / GLIBC.strip("/") / "lib"
    libc.chmod(mode)
    os.chown(libc, owner, owner)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=utility")
    bundle.command("test", "!", "-e", f"{GLIBC}/lib")
    bundle.run(installation.runtime, env).ok()
