"""Volumes with the driver's own folders: containers start, and nothing is made in the volumes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import declared_vendors
import pytest
from harness import cdi
from harness.bundles import Bundle
from harness.commands import Result, run
from harness.driver import Driver, lines_of_nvidia_smi, simulate
from harness.installation import Installation, write_config
from harness.prefork import ONE, RUNTIMES
from harness.sandbox import contents
from harness.vendors import debug_log

LIBS = "/usr/lib/x86_64-linux-gnu"
ASK = ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all")
LOOK = "nvidia-smi -L; for name in NAMES; do dlprobe $name; done"
MODES = pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
OPTIONS = pytest.mark.parametrize("options", ["ro", "rw"])


@pytest.fixture(scope="module")
def wsl(workspace: Path, installation: Installation) -> Iterator[Driver]:
    root = workspace / "volumes-wsl"
    yield simulate(installation, root, "--platform=wsl", "--gpus=1")
    run([installation.command, "simulate", "--remove", root]).ok()


class Scene:
    """A container with a volume, a driver root and a mode."""

    def __init__(
        self,
        bundle: Bundle,
        installation: Installation,
        root: Path,
        mode: str,
        asked: tuple[str, ...] = ASK,
    ) -> None:
        self.bundle = bundle
        self.mode = mode
        self._installation = installation
        name = "hook" if mode == "cdi" else mode
        setting = f'mode = "{name}"\n'
        self.config = write_config(bundle.path / "etc", root, [bundle.runtime], setting)
        log = f'[nvidia-container-cli]\ndebug = "{debug_log(self.config)}"\n'
        text = self.config.read_text()
        self.config.write_text(text.replace("[nvidia-container-cli]\n", log))
        (bundle.path / "cdi").mkdir()
        if mode == "cdi":
            cdi.give(bundle, cdi.generate(installation, self.config, bundle.path / "cdi"), "all")
        else:
            bundle.environ(*asked)

    def mount(self, source: Path, destination: str, options: str) -> None:
        mount = {
            "destination": destination, "source": str(source), "type": "bind",
            "options": ["rbind", "rprivate", options],
        }  # fmt: skip
        # Engines put volumes before the mounts of CDI specs.
        self.bundle.change(lambda spec: spec["mounts"].insert(5, mount))

    def start(self, script: str) -> Result:
        self.bundle.command("sh", "-c", script)
        if self.mode == "cdi":
            return self.bundle.run(self.bundle.runtime)
        env = {"GPUHOOK_CONFIG": str(self.config)}
        return self.bundle.run(self._installation.runtime, env)

    def refused(self) -> str:
        """Return the messages about a container that doesn't start.

        crun prints no messages of a hook, so the log is included.
        """
        said = self.start("true").failed().stderr
        log = debug_log(self.config)
        return said + (log.read_text() if log.exists() else "")

    def logged(self) -> list[str]:
        """Return the missing parts of the container that the log lists as a warning."""
        lines = debug_log(self.config).read_text().splitlines()
        [entry] = [entry for line in lines if (entry := json.loads(line))["level"] == "warning"]
        found: list[str] = entry.get("skipped") or entry.get("warnings")
        return found


@RUNTIMES
@MODES
@OPTIONS
@pytest.mark.parametrize("covered", ["/usr/lib/wsl", "/usr/lib/wsl/drivers", "/usr/lib/wsl/lib"])
def test_a_volume_over_wsl_folders_stays_unchanged_and_gpus_work(
    bundle: Bundle, installation: Installation, wsl: Driver, covered: str, options: str, mode: str
) -> None:
    """Microsoft's samples and docker buildx mount such volumes."""
    scene = Scene(bundle, installation, wsl.root, mode)
    source = wsl.root / covered.lstrip("/")
    scene.mount(source, covered, options)
    before = contents(source)
    names = "libcuda.so.1 libnvidia-ml.so.1 libdxcore.so"
    done = scene.start(LOOK.replace("NAMES", names)).ok().stdout.splitlines()
    assert done[0].startswith("GPU 0: ")
    assert [line.split()[0] for line in done[1:]] == names.split()
    assert contents(source) == before
    if covered != "/usr/lib/wsl/lib":
        assert any("libcuda.so.1'" in text for text in scene.logged())


def host_folder(bundle: Bundle, image: Path, driver: Driver | None, libs: str = LIBS) -> Path:
    """Return a folder as on a host, with the system's libraries and the driver's own files."""
    folder = bundle.path / "host"
    folder.mkdir()
    run(["cp", "-a", f"{image}{libs}/.", folder]).ok()
    if driver is not None:
        run(["cp", "-al", f"{driver.root}{libs}/.", folder]).ok()
    return folder


@pytest.mark.protects(
    "spec-volumes",
    "mode spec creates no files in a volume",
    instead="if False:",
    only="hosts_library_folder and spec",
)
@RUNTIMES
@MODES
@OPTIONS
def test_a_volume_of_a_hosts_library_folder_stays_unchanged_and_gpus_work(
    bundle: Bundle, installation: Installation, driver: Driver, roots: dict[str, Path],
    options: str, mode: str,
) -> None:  # fmt: skip
    """On the host, libvdpau_nvidia is in a separate folder, and some links are missing."""
    scene = Scene(bundle, installation, driver.root, mode)
    folder = host_folder(bundle, roots["debian"], driver)
    scene.mount(folder, LIBS, options)
    before = contents(folder)
    names = "libcuda.so.1 libnvidia-ml.so.1 libGLX_nvidia.so.0 libEGL_nvidia.so.0"
    done = scene.start(LOOK.replace("NAMES", names)).ok().stdout.splitlines()
    assert done[0] == lines_of_nvidia_smi(driver.gpus)[0]
    assert [line.split()[0] for line in done if line.startswith("lib")] == names.split()
    assert contents(folder) == before
    said = scene.logged()
    assert any("libGLX_indirect.so.0" in text for text in said)
    assert all("would have to be made in a volume of the container" in text for text in said)


@RUNTIMES
@pytest.mark.parametrize("mode", ["hook", "spec"])
@OPTIONS
@pytest.mark.parametrize("lacking", ["libcuda.so.", "libnvidia-ml.so."])
def test_a_volume_without_a_needed_library_is_refused_and_unchanged(
    bundle: Bundle, installation: Installation, driver: Driver, roots: dict[str, Path],
    lacking: str, options: str, mode: str,
) -> None:  # fmt: skip
    scene = Scene(bundle, installation, driver.root, mode)
    folder = host_folder(bundle, roots["debian"], driver)
    for path in folder.glob(f"{lacking}*"):
        path.unlink()
    scene.mount(folder, LIBS, options)
    before = contents(folder)
    said = scene.refused()
    assert f"'{lacking}{driver.version}' would have to be made in a volume of the container" in said
    assert contents(folder) == before


@ONE
@pytest.mark.parametrize("place", ["libcuda.so.", "glvnd/egl_vendor.d/10_nvidia.json"])
def test_a_folder_in_a_files_place_is_refused_naming_the_volume(
    bundle: Bundle, installation: Installation, driver: Driver, roots: dict[str, Path], place: str
) -> None:
    """The folder is in a volume, so the error must not name the image."""
    scene = Scene(bundle, installation, driver.root, "hook")
    if place.endswith("."):
        folder, where = host_folder(bundle, roots["debian"], driver), LIBS
        place += driver.version
        (folder / place).unlink()
    else:
        folder, where = bundle.path / "share", "/usr/share"
    (folder / place).mkdir(parents=True)
    scene.mount(folder, where, "rw")
    said = scene.refused()
    assert f"the volume has a folder at {where}/{place}, where a file has to be mounted" in said
    assert f"Remove {where}/{place} from the volume" in said
    assert "image" not in said


@ONE
def test_a_damaged_cache_in_a_volume_is_refused(
    bundle: Bundle, installation: Installation, driver: Driver
) -> None:
    scene = Scene(bundle, installation, driver.root, "hook")
    folder = bundle.path / "etc-of-the-host"
    folder.mkdir()
    (folder / "debian_version").write_text("12\n")
    (folder / "ld.so.cache").write_text("nonsense")
    scene.mount(folder, "/etc", "rw")
    said = scene.refused()
    assert "Run ldconfig in the volume, or delete the file from it" in said


@ONE
def test_circular_links_in_a_volume_are_refused(
    bundle: Bundle, installation: Installation, driver: Driver
) -> None:
    scene = Scene(bundle, installation, driver.root, "hook")
    folder = bundle.path / "share"
    (folder / "glvnd").mkdir(parents=True)
    (folder / "glvnd/egl_vendor.d").symlink_to("egl_vendor.d")
    scene.mount(folder, "/usr/share", "rw")
    said = scene.refused()
    assert "Remove the links in the volume that lead there in a circle" in said


@ONE
def test_explain_reports_volume_warnings_and_errors_before_a_start(
    bundle: Bundle, installation: Installation, driver: Driver, roots: dict[str, Path]
) -> None:
    scene = Scene(bundle, installation, driver.root, "hook")
    folder = host_folder(bundle, roots["debian"], driver)
    scene.mount(folder, LIBS, "ro")
    words: list[str | Path] = [installation.command, "explain", "--bundle", bundle.path]
    words += ["--config", scene.config]
    said = json.loads(bundle.call(*words, "--format=json").ok().stdout)
    scene.start("true").ok()
    assert [text for text in said["warnings"] if "in a volume" in text] == scene.logged()
    (folder / f"libcuda.so.{driver.version}").unlink()
    said = json.loads(bundle.call(*words, "--format=json").stdout)
    assert said["error"]["code"] == "volume"


MAKER = (
    declared_vendors.tables()["maker"]
    + 'present = "driver:maker_npu"\nlibraries = ["/usr/lib/maker/libmaker.so*"]\n'
)


@RUNTIMES
@pytest.mark.parametrize("mode", ["hook", "spec"])
@OPTIONS
def test_a_declared_vendors_library_in_a_volume_is_found(
    bundle: Bundle, installation: Installation, roots: dict[str, Path], workspace: Path,
    options: str, mode: str,
) -> None:  # fmt: skip
    """The host has the library only under its file's name; the loader still finds it."""
    table = workspace / f"volume-{bundle.name}.toml"
    table.write_text(MAKER)
    root = workspace / f"volume-{bundle.name}"
    run([installation.command, "simulate", root, "--config", table, "--vendor=maker"]).ok()
    library = root / "usr/lib/maker/libmaker.so.1.2"
    library.parent.mkdir(parents=True)
    source = bundle.path / "maker.c"
    source.write_text("int maker(void) { return 1; }\n")
    run(["gcc", "-shared", "-nostdlib", "-Wl,-soname,libmaker.so.1", "-o", library, source]).ok()
    try:
        folder = host_folder(bundle, roots["debian"], None)
        os.link(library, folder / "libmaker.so.1.2")
        scene = Scene(bundle, installation, root, mode, ("MAKER_VISIBLE_DEVICES=0",))
        text = scene.config.read_text()
        roots_of = f'[gpuhook]\ndriver-roots = ["maker={root}"]\n'
        scene.config.write_text(f"{text.replace('[gpuhook]', roots_of.rstrip(), 1)}\n{MAKER}")
        scene.mount(folder, LIBS, options)
        before = contents(folder)
        done = scene.start("dlprobe libmaker.so.1 || true").ok().stdout
        if mode == "hook":
            assert done.split()[:2] == ["libmaker.so.1", f"{LIBS}/libmaker.so.1.2"]
        assert contents(folder) == before
        assert any("libmaker.so.1" in text for text in scene.logged())
    finally:
        run([installation.command, "simulate", "--remove", root]).ok()
