"""Error texts in docs/troubleshooting.md, each of which users can really get.

A heading of the page is the text that a user searches for; ``...`` in it stands for the part
that varies. For each heading about an error of gpuhook, this module has a way to provoke the
error. An error without a heading has a remedy that needs no page.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from harness import bundles
from harness.bundles import Bundle
from harness.commands import Result, run
from harness.containerd import Containerd
from harness.docker import Docker, dockerd
from harness.driver import Driver, simulate
from harness.images import REPOSITORY, image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.podman import Podman

DOCUMENT = REPOSITORY / "docs/troubleshooting.md"
DEBIAN = image("debian")


@dataclass(frozen=True)
class Scene:
    """A simulated driver and a bundle, which a test breaks in some way."""

    bundle: Bundle
    installation: Installation
    driver: Driver
    folder: Path

    def start(
        self,
        *settings: str,
        root: Path | None = None,
        config: Path | None = None,
        runtime: Path | None = None,
    ) -> Result:
        """Start the container with environment ``settings``."""
        if config is None:
            config = write_config(self.folder / "config", root or self.driver.root, ["runc"])
        self.bundle.environ(*settings)
        env = {"GPUHOOK_CONFIG": str(config)}
        return self.bundle.run(runtime or self.installation.runtime, env)

    def broken_driver(self, *options: str) -> Path:
        """Return the root of another simulated driver, which the test may break."""
        return simulate(self.installation, self.folder / "driver", "--gpus=2", *options).root

    def config(self, text: str) -> Path:
        path = self.folder / "config.toml"
        path.write_text(text)
        return path


ALL = "NVIDIA_VISIBLE_DEVICES=all"
Provocation = Callable[[Scene], Result]


def no_driver(scene: Scene) -> Result:
    (scene.folder / "empty").mkdir()
    return scene.start(ALL, root=scene.folder / "empty")


def hung_driver(scene: Scene) -> Result:
    root = scene.broken_driver("--init-seconds=5")
    config = write_config(scene.folder / "config", root, ["runc"])
    text = config.read_text().replace("[gpuhook]", "[gpuhook]\nnvml-timeout = 0.3")
    return scene.start(ALL, config=scene.config(text))


def slow_files(scene: Scene) -> Result:
    """Start a container with a timeout of 1 ms, which is too short for any driver.

    This has the effect of a file that hangs.
    """
    root = simulate(scene.installation, scene.folder / "amd", "--vendor=amd", "--gpus=2").root
    config = write_config(scene.folder / "config", scene.driver.root, ["runc"])
    settings = f'[gpuhook]\nnvml-timeout = 0.001\ndriver-roots = ["amd={root}"]'
    text = config.read_text().replace("[gpuhook]", settings)
    return scene.start("AMD_VISIBLE_DEVICES=all", config=scene.config(text))


def forbidden_capability(word: str, scene: Scene) -> Result:
    config = write_config(scene.folder / "config", scene.driver.root, ["runc"])
    text = 'supported-driver-capabilities = "utility"\n' + config.read_text()
    return scene.start(ALL, f"NVIDIA_DRIVER_CAPABILITIES={word}", config=scene.config(text))


def closed_nodes(scene: Scene) -> Path:
    """Return the root of a driver whose nodes only root may open."""
    root = scene.broken_driver()
    for node in (root / "dev").glob("nvidia*"):
        if node.is_char_device():
            node.chmod(0o600)
    return root


def half_driver(scene: Scene, *missing: str) -> Result:
    """Start a container on a driver without the files and nodes that these patterns name."""
    root = scene.broken_driver()
    for pattern in missing:
        for path in root.glob(pattern):
            path.unlink()
    return scene.start(ALL, root=root)


def somebodys_libraries(scene: Scene) -> Result:
    root = scene.broken_driver()
    [folder] = root.glob("usr/lib/*-linux-gnu")
    folder.chmod(0o777)
    return scene.start(ALL, root=root)


def nvml_of_another_version(scene: Scene) -> Result:
    root = scene.broken_driver()
    [library] = root.glob("usr/lib/*/libnvidia-ml.so.5*")
    other = library.rename(library.with_name("libnvidia-ml.so.999.99"))
    link = library.with_name("libnvidia-ml.so.1")
    link.unlink()
    link.symlink_to(other.name)
    return scene.start(ALL, root=root)


def crashing_driver(scene: Scene) -> Result:
    root = scene.broken_driver()
    [library] = root.glob("usr/lib/*/libnvidia-ml.so.5*")
    source = scene.folder / "crash.c"
    source.write_text("void __attribute__((constructor)) crash(void) { __builtin_trap(); }\n")
    run(["gcc", "-shared", "-fPIC", "-o", library, source]).ok()
    return scene.start(ALL, root=root)


def glued_option(scene: Scene) -> Result:
    scene.bundle.environ(ALL)
    config = write_config(scene.folder / "config", scene.driver.root, ["runc"])
    words = ["create", f"-b={scene.bundle.path}", scene.bundle.name]
    return scene.bundle.call(
        scene.installation.runtime, *words, env={"GPUHOOK_CONFIG": str(config)}
    )


def no_hook(scene: Scene) -> Result:
    bin_folder = scene.folder / "venv/bin"
    shutil.copytree(scene.installation.bin.parent, bin_folder.parent, symlinks=True)
    (bin_folder / "gpuhook-prestart").unlink()
    return scene.start(ALL, runtime=bin_folder / "gpu-py")


def folder_in_a_files_place(scene: Scene) -> Result:
    library = scene.driver.library("libcuda.so.1")
    place = scene.bundle.root / library.relative_to(scene.driver.root)
    scene.bundle.call("mkdir", "-p", place).ok()
    return scene.start(ALL)


def damaged_cache(scene: Scene) -> Result:
    cache = scene.bundle.root / "etc/ld.so.cache"
    scene.bundle.call("sh", "-c", f"echo nonsense >{cache}").ok()
    return scene.start(ALL)


def volume(scene: Scene, *options: str) -> Path:
    """Mount a folder at the place of the driver's libraries, and return the folder."""
    folder = scene.folder / "volume"
    folder.mkdir()
    place = scene.driver.library("libcuda.so.1").relative_to(scene.driver.root).parent
    scene.bundle.change(
        lambda spec: spec["mounts"].append(
            {
                "destination": f"/{place}",
                "type": "bind",
                "source": str(folder),
                "options": ["rbind", *options],
            }
        )
    )
    return folder


def volume_over_libraries(scene: Scene) -> Result:
    volume(scene, "rprivate")
    return scene.start(ALL)


def shared_volume(scene: Scene) -> Result:
    folder = volume(scene, "rshared")
    scene.bundle.change(lambda spec: spec["linux"].update(rootfsPropagation="rshared"))
    for library in scene.driver.library("libcuda.so.1").parent.glob("lib*"):
        (folder / library.name).touch()
    return scene.start(ALL)


def exclusive(scene: Scene) -> Path:
    config = write_config(scene.folder / "config", scene.driver.root, ["runc"])
    text = config.read_text()
    return scene.config(text.replace("[gpuhook]", '[gpuhook]\nexclusive = ["nvidia.com/gpu"]'))


def held_device(scene: Scene) -> Result:
    config, first = exclusive(scene), f"{scene.bundle.name}-first"
    env = {"GPUHOOK_CONFIG": str(config)}
    scene.bundle.environ(ALL)
    command = scene.bundle.spec()["process"]["args"]
    scene.bundle.command("sleep", "1000")
    scene.bundle.detach(scene.installation.runtime, config, first)
    try:
        scene.bundle.command(*command)
        return scene.start(ALL, config=config)
    finally:
        scene.bundle.call(scene.installation.runtime, "delete", "--force", first, env=env).ok()


def no_place_for_a_lease(scene: Scene) -> Result:
    config = exclusive(scene)
    state = scene.folder / "config/state"
    state.mkdir()
    state.chmod(0o777)  # any user could write a record there
    return scene.start(ALL, config=config)


def two_values(scene: Scene) -> Result:
    config = write_config(scene.folder / "config", scene.driver.root, ["runc"])
    tables = "".join(
        f"""
        [[gpuhook.vendors]]
        name = "{name}"
        kind = "{name}.example/npu"
        variable = "{name.upper()}_VISIBLE_DEVICES"
        nodes = ["/dev/nvidia{{n}}"]
        environment = ["NPUS={name}"]
        """
        for name in ("one", "two")
    )
    text = config.read_text() + tables
    return scene.start(
        "ONE_VISIBLE_DEVICES=all", "TWO_VISIBLE_DEVICES=all", config=scene.config(text)
    )


OURS: dict[str, Provocation] = {
    "...=... is in use by ..., and ... is exclusive here": held_device,
    "The record that the container has ... can't be written": no_place_for_a_lease,
    "... need different values of the variable ...": two_values,
    "There is no NVIDIA driver ...: libnvidia-ml.so.1 is not there": no_driver,
    "The driver root ... can't be opened": lambda scene: scene.start(
        ALL, root=scene.folder / "none"
    ),
    "NVML failed: Driver Not Loaded": lambda scene: scene.start(
        ALL, root=scene.broken_driver("--fail=not-loaded")
    ),
    "NVML failed: RM has detected an NVML/RM version mismatch": lambda scene: scene.start(
        ALL, root=scene.broken_driver("--fail=version-mismatch")
    ),
    "NVML failed: Insufficient Permissions": lambda scene: scene.start(
        ALL, root=closed_nodes(scene)
    ),
    "... can't be read: a file of it didn't respond within ... seconds": slow_files,
    "NVML didn't answer within ... seconds": hung_driver,
    "NVML ended with ... instead of listing the GPUs": crashing_driver,
    "This host has no GPU or MIG device '...'": lambda scene: scene.start(
        "NVIDIA_VISIBLE_DEVICES=9"
    ),
    "GPU ... has fallen off the bus (lost)": lambda scene: scene.start(
        "NVIDIA_VISIBLE_DEVICES=1", root=scene.broken_driver("--lost=1")
    ),
    "there is no device node ...nvidia-uvm, without which CUDA doesn't work": (
        lambda scene: half_driver(scene, "dev/nvidia-uvm")
    ),
    "No file from ... is passed to containers: ...": somebodys_libraries,
    "libcuda.so... isn't installed, without which CUDA doesn't work": (
        lambda scene: half_driver(scene, "usr/lib/*/libcuda.so*")
    ),
    "libnvidia-ml.so... isn't installed, without which nvidia-smi doesn't work": (
        nvml_of_another_version
    ),
    "The container requires '...' and this host has ...": lambda scene: scene.start(
        ALL, "NVIDIA_REQUIRE_CUDA=cuda>=99.0"
    ),
    "NVIDIA_DRIVER_CAPABILITIES asks for '...'": partial(forbidden_capability, "video"),
    "'...' isn't a driver capability: there are ...": partial(forbidden_capability, "magic"),
    "CUDA_VERSION is '...', which is not a version number": lambda scene: scene.start(
        ALL, "CUDA_VERSION=nonsense"
    ),
    "This host has no IMEX channel ...": lambda scene: scene.start(ALL, "NVIDIA_IMEX_CHANNELS=5"),
    "These CDI devices can't be used: ...": lambda scene: scene.start(
        "NVIDIA_VISIBLE_DEVICES=maker.example/card=0",
        config=scene.config('gpuhook.cdi-kinds-from-environment = ["maker.example/card"]\n'),
    ),
    "The container's environment names '...', and '...' isn't a kind of CDI devices ...": (
        lambda scene: scene.start("NVIDIA_VISIBLE_DEVICES=k8s.gpu.nvidia.com/claim=another-pods")
    ),
    "... is not valid TOML": lambda scene: scene.start(
        ALL, config=scene.config("[nvidia-container-cli\n")
    ),
    "...: disable-require must be true or false, not '1'": lambda scene: scene.start(
        ALL, config=scene.config("disable-require = 1\n")
    ),
    "The configuration file ... does not exist": lambda scene: scene.start(
        ALL, config=scene.folder / "none.toml"
    ),
    "None of the low-level runtimes ... was found": lambda scene: scene.start(
        ALL, config=scene.config('[nvidia-container-runtime]\nruntimes = ["no-such-runc"]\n')
    ),
    "It isn't clear what ... means to the low-level runtime in this command line": glued_option,
    "The hook ... doesn't exist next to gpu-py": no_hook,
    "the image has ... at ..., where ... has to be mounted": folder_in_a_files_place,
    "... is damaged or not a loader cache": damaged_cache,
    "'...' would have to be made in a volume of the container": volume_over_libraries,
    "what is mounted on ... in the container would show up on the host": shared_volume,
}
# Errors whose message already says what to do, so the page has no heading for them.
REMEDIES = {
    "...=... is in use by ..., and ... is exclusive here": (
        "Stop that container, or request another device"
    ),
    "The record that the container has ... can't be written": (
        "Set state-dir in [gpuhook] to a folder that only the user who runs gpuhook can use"
    ),
    "... need different values of the variable ...": (
        "Request only the devices of one of the two vendors"
    ),
    "The driver root ... can't be opened": (
        "Start the driver container, or correct [nvidia-container-cli] root"
    ),
    "... can't be read: a file of it didn't respond within ... seconds": (
        "Look for the driver in dmesg, and load it again or reboot"
    ),
    "NVML ended with ... instead of listing the GPUs": "Make nvidia-smi work on the host first",
    "No file from ... is passed to containers: ...": (
        "Keep files for containers in folders that only root can change"
    ),
    "libnvidia-ml.so... isn't installed, without which nvidia-smi doesn't work": (
        "Install the driver's libraries of exactly version"
    ),
    "The container requires '...' and this host has ...": (
        "Update the driver, use an image made for CUDA ... or older, or set "
        "NVIDIA_DISABLE_REQUIRE=true"
    ),
    "NVIDIA_DRIVER_CAPABILITIES asks for '...'": (
        "Remove it from NVIDIA_DRIVER_CAPABILITIES, or allow it with supported-driver-capabilities"
    ),
    "'...' isn't a driver capability: there are ...": "Correct NVIDIA_DRIVER_CAPABILITIES",
    "CUDA_VERSION is '...', which is not a version number": "Correct CUDA_VERSION in the image",
    "This host has no IMEX channel ...": (
        "Request one that `ls /dev/nvidia-caps-imex-channels` shows"
    ),
    "These CDI devices can't be used: ...": (
        "List the devices, and the files that engines refuse, with gpuhook cdi list"
    ),
    "The container's environment names '...', and '...' isn't a kind of CDI devices ...": (
        "Add the kind there if every image may have such devices, or have the engine give the "
        "device (--device"
    ),
    "... is not valid TOML": "Correct it; `gpuhook config validate` checks it again",
    "...: disable-require must be true or false, not '1'": (
        "Correct it; `gpuhook config validate` checks it again"
    ),
    "The configuration file ... does not exist": (
        "Create it (`gpuhook config default` prints one), or unset GPUHOOK_CONFIG"
    ),
    "None of the low-level runtimes ... was found": (
        "Install runc or crun, or name one in [nvidia-container-runtime] runtimes of config.toml"
    ),
    "It isn't clear what ... means to the low-level runtime in this command line": (
        "Write options in full, before the id"
    ),
    "The hook ... doesn't exist next to gpu-py": (
        "Reinstall gpuhook, so that both are in the same folder"
    ),
    "the image has ... at ..., where ... has to be mounted": "Remove ... from the image",
    "'...' would have to be made in a volume of the container": (
        "Mount that volume elsewhere, or put the file into it"
    ),
    "what is mounted on ... in the container would show up on the host": (
        "Use the propagation rprivate or rslave for that volume"
    ),
}


def gone(engine: Docker) -> Result:
    return engine.call("run", "--rm", "--network=none", "--runtime=gone", DEBIAN, "true")


def by_runc(engine: Docker, *words: str) -> Result:
    return engine.call("run", "--rm", "--network=none", *words)


DOCKERS: dict[str, Callable[[Docker], Result]] = {
    "exec /usr/bin/nvidia-smi: no such file or directory": lambda engine: by_runc(
        engine, "--volume=/usr/bin/true:/usr/bin/nvidia-smi", image("busybox"), "nvidia-smi"
    ),
    'could not select device driver "" with capabilities: [[gpu]]': lambda engine: by_runc(
        engine, "--gpus=all", DEBIAN, "true"
    ),
    "fork/exec .../gpu-py: no such file or directory": gone,
    'exec: "nvidia-smi": executable file not found in $PATH': lambda engine: by_runc(
        engine, DEBIAN, "nvidia-smi"
    ),
    "libcuda.so.1: cannot open shared object file: No such file or directory": (
        lambda engine: by_runc(engine, DEBIAN, "gpuhook-cuda-probe")
    ),
}
# The error for a CDI name depends on whether client and daemon know CDI, or only the client does.
CDI = {
    'could not select device driver "cdi" with capabilities: []',
    "unresolvable CDI devices nvidia.com/gpu=0",
    "docker: nvidia.com/gpu=0 is not an absolute path",
}
# The error for a missing runtime depends on the daemon's version.
RUNTIME = {"Unknown runtime specified gpu-py", "unknown or invalid runtime name: gpu-py"}
OTHERS = {
    'default OCI runtime "gpu-py" not found: invalid argument',
    'exec: "nvidia-container-cli": executable file not found in $PATH',
    "No devices were found",
    "Failed to initialize NVML: ...",
    "AMD CDI spec not found",
    "unresolvable CDI devices ...",
    "sh: 0: getcwd() failed: No such file or directory",
}
# Headings below this one aren't messages of a program.
WITHOUT_TEXT = "## Without a message"


def headings() -> set[str]:
    text = DOCUMENT.read_text().partition(WITHOUT_TEXT)[0]
    return set(re.findall(r"^### `(.*)`$", text, re.MULTILINE))


def assert_says(done: Result, text: str) -> None:
    """Assert that a program that failed printed the text, with anything for each ``...``."""
    done.failed()
    pattern = ".*".join(re.escape(part) for part in text.split("..."))
    assert re.search(pattern, done.stderr + done.stdout), str(done)


@pytest.fixture
def scene(
    workspace: Path,
    roots: dict[str, Path],
    host: Namespace,
    installation: Installation,
    driver: Driver,
) -> Iterator[Scene]:
    parent = workspace / "troubleshooting"
    with bundles.bundle(parent, roots["debian"], host, "runc") as made:
        folder = parent / f"{made.name}-scene"
        folder.mkdir()
        yield Scene(made, installation, driver, folder)
        run(["rm", "-rf", folder]).ok()


@pytest.fixture(scope="module")
def bare(workspace: Path, host: Namespace, archive: Path) -> Iterator[Docker]:
    """A dockerd with only one runtime, whose program doesn't exist."""
    runtimes = {"gone": Path("/nonexistent/gpu-py")}
    folder = workspace / "troubleshooting-docker"
    with dockerd(folder, host, runtimes, archive, {"PATH": "/usr/sbin:/usr/bin"}) as engine:
        yield engine


def test_the_troubleshooting_page_has_exactly_the_tested_headings() -> None:
    assert REMEDIES.keys() <= OURS.keys()
    ours = OURS.keys() - REMEDIES.keys()
    assert headings() == ours | DOCKERS.keys() | CDI | RUNTIME | OTHERS


@pytest.mark.parametrize("heading", OURS)
def test_documented_gpuhook_errors_occur(scene: Scene, heading: str) -> None:
    said = f"{heading}...{REMEDIES[heading]}" if heading in REMEDIES else heading
    assert_says(OURS[heading](scene), said)


@pytest.mark.parametrize("heading", DOCKERS)
def test_documented_docker_errors_occur(bare: Docker, heading: str) -> None:
    assert_says(DOCKERS[heading](bare), heading)


def test_the_documented_docker_error_for_a_cdi_name_occurs(bare: Docker) -> None:
    done = by_runc(bare, "--device=nvidia.com/gpu=0", DEBIAN, "true").failed()
    assert [text for text in CDI if text in done.stderr], str(done)


def test_the_documented_docker_error_for_an_unknown_runtime_occurs(bare: Docker) -> None:
    done = by_runc(bare, "--runtime=gpu-py", DEBIAN, "true").failed()
    assert [text for text in RUNTIME if text in done.stderr], str(done)


def test_the_documented_podman_error_for_an_unknown_runtime_occurs(podman_runtime: Podman) -> None:
    done = podman_runtime.namespace.run("podman", "--runtime=gpu-py", "run", "IMAGE")
    assert_says(done, 'default OCI runtime "gpu-py" not found: invalid argument')


def test_the_documented_podman_error_for_an_unknown_cdi_name_occurs(podman_runtime: Podman) -> None:
    done = podman_runtime.run(DEBIAN, "true", options=("--device=maker.example/card=0",))
    assert_says(done, "unresolvable CDI devices ...")


def test_the_documented_ctr_error_for_the_gpus_option_occurs(containerd_runc: Containerd) -> None:
    done = containerd_runc.call("run", "--rm", "--gpus=0", DEBIAN, "troubleshooting", "true")
    containerd_runc.call("container", "rm", "troubleshooting")
    if containerd_runc.takes_cdi:
        assert_says(done, "no known GPU vendor detected in CDI specs")
    else:
        assert_says(done, 'exec: "nvidia-container-cli": executable file not found in $PATH')


def test_a_deleted_working_directory_gives_the_documented_shell_message(
    installation: Installation, tmp_path: Path
) -> None:
    """Only dash prints this message, and the command still works."""
    text = "sh: 0: getcwd() failed: No such file or directory"
    script = f'mkdir "$0" && cd "$0" && rmdir "$0" && exec {installation.command} --version'
    done = run(["sh", "-c", script, tmp_path / "gone"]).ok()
    assert text in done.stderr
    assert "version" in done.stdout


def test_a_request_for_no_gpu_gives_the_documented_nvidia_smi_message(docker: Docker) -> None:
    done = docker.run(DEBIAN, "nvidia-smi", env=["NVIDIA_VISIBLE_DEVICES=none"])
    assert_says(done, "No devices were found")


def test_inaccessible_device_nodes_give_the_documented_nvml_message(scene: Scene) -> None:
    config = write_config(scene.folder / "config", closed_nodes(scene), ["runc"])
    text = config.read_text().replace("load-kmods", 'user = "root"\nload-kmods')
    scene.bundle.change(lambda spec: spec["process"].update(user={"uid": 1000, "gid": 1000}))
    scene.bundle.command("nvidia-smi", "-L")
    done = scene.start(ALL, config=scene.config(text))
    assert_says(done, "Failed to initialize NVML: ...")
