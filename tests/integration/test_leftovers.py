"""Leftovers in an image from earlier starts and other programs: links to another driver version."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import cdi
from harness.bundles import Bundle
from harness.commands import run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.prefork import ONE, RUNTIMES
from harness.root_folders import Folder, snapshot

LIBS = "/usr/lib/x86_64-linux-gnu"
OLD = "570.86.15"
ASK = ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all")
# Each link that programs expect -> the driver's library that it leads to.
LINKS = {
    "libcuda.so": "libcuda.so",
    "libcuda.so.1": "libcuda.so",
    "libGLX_indirect.so.0": "libGLX_nvidia.so",
    "libGLX_nvidia.so.0": "libGLX_nvidia.so",
    "libnvidia-opticalflow.so": "libnvidia-opticalflow.so",
    "gbm/nvidia-drm_gbm.so": "libnvidia-allocator.so",
}
MESA = "libGLX_mesa.so.0.0.0"
SUMS = f"cd {LIBS}; for link in {' '.join(LINKS)}; do busybox md5sum $link; done"


@pytest.fixture(scope="module")
def drivers(workspace: Path, installation: Installation) -> Iterator[dict[str, Driver]]:
    """The same simulated machine before and after an upgrade of its driver."""
    made = {
        "old": simulate(installation, workspace / "upgraded-old", f"--driver-version={OLD}"),
        "new": simulate(installation, workspace / "upgraded-new"),
    }
    yield made
    for driver in made.values():
        run([installation.command, "simulate", "--remove", driver.root]).ok()


def sums(driver: Driver) -> list[str]:
    """Return the output of SUMS if each link leads to this driver's library."""
    files = [driver.library(f"{stem}.{driver.version}") for stem in LINKS.values()]
    found = [run(["md5sum", file]).ok().stdout.split()[0] for file in files]
    return [f"{digest}  {link}" for digest, link in zip(found, LINKS, strict=True)]


class Machine:
    """A container that persists while its host's driver changes."""

    def __init__(
        self, bundle: Bundle, installation: Installation, drivers: dict[str, Driver]
    ) -> None:
        self.bundle = bundle
        self.drivers = drivers
        self.folder = bundle.path / f"upper{LIBS}"
        self._installation = installation
        self._plain = bundle.config.read_bytes()
        self._starts = 0

    def start(self, version: str, mode: str, script: str = SUMS) -> list[str]:
        """Start the container with a driver; return its output.

        ``mode`` is a mode of gpu-py, or cdi for a CDI spec.
        """
        bundle, driver = self.bundle, self.drivers[version]
        bundle.config.write_bytes(self._plain)  # engines write it again for each start
        bundle.command("sh", "-c", script)
        name = "hook" if mode == "cdi" else mode
        self._starts += 1
        folder = bundle.path / f"start-{self._starts}"
        config = write_config(folder, driver.root, [bundle.runtime], f'mode = "{name}"\n')
        if mode == "cdi":
            cdi.give(bundle, cdi.generate(self._installation, config, folder), "0")
            return bundle.run(bundle.runtime).ok().stdout.splitlines()
        bundle.environ(*ASK)
        env = {"GPUHOOK_CONFIG": str(config)}
        return bundle.run(self._installation.runtime, env).ok().stdout.splitlines()

    def image(self, files: dict[str, str], links: dict[str, str]) -> None:
        """Put files and links into the image's library folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        for name, target in links.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).symlink_to(target)


@pytest.fixture
def kept(bundle: Bundle, installation: Installation, drivers: dict[str, Driver]) -> Machine:
    return Machine(bundle, installation, drivers)


@RUNTIMES
@pytest.mark.parametrize("after", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("before", ["hook", "spec", "cdi"])
def test_a_container_kept_over_a_driver_change_gets_the_current_driver(
    kept: Machine, before: str, after: str
) -> None:
    assert kept.start("old", before) == sums(kept.drivers["old"])
    assert kept.start("new", after) == sums(kept.drivers["new"])
    assert kept.start("old", before) == sums(kept.drivers["old"]), "and back"


# Leftovers that an image may have in place of the links: files, and links.
LEFT: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "links to files that are gone": (
        {},
        {
            "libcuda.so": "libcuda.so.535.1",
            "libGLX_indirect.so.0": f"{LIBS}/libGLX_nvidia.so.535.1",
            "gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.535.1",
            "libnvidia-opticalflow.so": "/usr/lib/nvidia/current/libnvidia-opticalflow.so.1",
        },
    ),
    "links to empty files": (
        {"libcuda.so.535.1": "", "libGLX_nvidia.so.535.1": "", "libnvidia-allocator.so.535.1": ""},
        {
            "libcuda.so": "libcuda.so.535.1",
            "libGLX_indirect.so.0": "libGLX_nvidia.so.535.1",
            "gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.535.1",
        },
    ),
    "the files of another version": (
        {
            "libcuda.so.535.1": "535",
            "libGLX_nvidia.so.535.1": "535",
            "libnvidia-allocator.so.9": "9",
        },
        {
            "libcuda.so": "libcuda.so.535.1",
            "libcuda.so.1": "libcuda.so.535.1",
            "libGLX_indirect.so.0": "libGLX_nvidia.so.535.1",
            "gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.9",
        },
    ),
    "a chain of links, as Debian's alternatives": (
        {"deep/libGLX_nvidia.so.0": "535"},
        {
            "libGLX_indirect.so.0": "alternatives",
            "alternatives": "deep/libGLX_nvidia.so.0",
            "libcuda.so": "stubs/libcuda.so",
        },
    ),
    "empty files in the links' own places": (
        {"libcuda.so": "", "libGLX_indirect.so.0": "", "gbm/nvidia-drm_gbm.so": ""},
        {},
    ),
    "links that are right already": (
        {},
        {
            "libcuda.so": "libcuda.so.1",
            "libGLX_indirect.so.0": "libGLX_nvidia.so.0",
            "gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.1",
        },
    ),
}


@RUNTIMES
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("left", LEFT)
def test_links_to_another_driver_version_resolve_to_the_host_driver(
    kept: Machine, left: str, mode: str
) -> None:
    kept.image(*LEFT[left])
    assert kept.start("new", mode) == sums(kept.drivers["new"])


# Files and links that aren't the driver's, the path at which a container reads one, and its text.
OTHERS: dict[str, tuple[dict[str, str], dict[str, str], str, str]] = {
    "Mesa's": ({MESA: "mesa"}, {"libGLX_indirect.so.0": MESA}, "libGLX_indirect.so.0", "mesa"),
    "Mesa's by a chain": (
        {f"mesa/{MESA}": "mesa"},
        {"libGLX_indirect.so.0": "libGLX_mesa.so.0", "libGLX_mesa.so.0": f"mesa/{MESA}"},
        "libGLX_indirect.so.0",
        "mesa",
    ),
    "a link of Mesa's to nothing": ({}, {"libGLX_indirect.so.0": MESA}, "libGLX_indirect.so.0", ""),
    "a file": ({"libcuda.so": "a stub"}, {}, "libcuda.so", "a stub"),
    "another GBM": (
        {"dri_gbm.so": "mesa"}, {"gbm/nvidia-drm_gbm.so": "../dri_gbm.so"},
        "gbm/nvidia-drm_gbm.so", "mesa",
    ),
}  # fmt: skip


@RUNTIMES
@pytest.mark.parametrize("mode", ["hook", "spec", "cdi"])
@pytest.mark.parametrize("other", OTHERS)
def test_files_and_links_of_other_vendors_are_unchanged(
    kept: Machine, other: str, mode: str
) -> None:
    files, links, name, text = OTHERS[other]
    kept.image(files, links)
    assert kept.start("new", mode, f"cat {LIBS}/{name} || true") == ([text] if text else [])
    for link, target in links.items():
        assert str((kept.folder / link).readlink()) == target
    for file, content in files.items():
        assert (kept.folder / file).read_text() == content


@ONE
def test_a_committed_container_gets_the_current_driver(kept: Machine) -> None:
    """After docker commit, the container's placeholders are files of the image."""
    kept.start("old", "hook")
    assert kept.start("new", "hook") == sums(kept.drivers["new"])
    placeholders = [each for each in kept.folder.iterdir() if not each.is_symlink()]
    written = [each for each in placeholders if each.is_file() and not each.stat().st_size]
    assert len(written) > 40
    assert {each.stat().st_nlink for each in written} == {1}, "writing one changes one"


@pytest.mark.parametrize("left", LEFT)
def test_leftovers_in_a_folder_are_replaced_and_restored_by_undo(
    folder: Folder, driver: Driver, left: str
) -> None:
    """gpuhook apply replaces the leftovers, and --undo restores them."""
    files, links = LEFT[left]
    libs = folder.root / LIBS.lstrip("/")
    for name, text in files.items():
        (libs / name).parent.mkdir(parents=True, exist_ok=True)
        (libs / name).write_text(text)
    for name, target in links.items():
        (libs / name).parent.mkdir(parents=True, exist_ok=True)
        (libs / name).symlink_to(target)
    before = snapshot(folder)
    folder.call("-e", ASK[0], "-e", ASK[1]).ok()
    done = folder.inside("sh", "-c", SUMS).ok().stdout.splitlines()
    assert done == sums(driver)
    folder.call("--undo").ok()
    assert snapshot(folder) == before
