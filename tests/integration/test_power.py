"""Power cuts while files are written: each file is old or new, and can be written again.

The disk's content at a moment is a copy of the file behind its loop device. The file system
doesn't write a file's content when it is renamed, as ext4 otherwise does. The program that
renames the file must write it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import run
from harness.driver import simulate
from harness.installation import Installation, write_config

DAEMON = "etc/docker/daemon.json"
DOCUMENT = "etc/cdi/gpus.yaml"
# Run gpuhook, and copy the disk before the rename with the given number, or at the end if the
# number is 0. An fsync before that rename writes the file system's journal, and so all earlier
# names.
CUT = """
import os, shutil, sys
left, disk, copy, other = int(sys.argv[1]), *sys.argv[2:5]
sys.argv[:5] = ["gpuhook"]
def hook(event, arguments):
    global left
    if event == "os.rename":
        left -= 1
        if left == 0:
            with open(other, "wb") as file:
                os.fsync(file.fileno())
            shutil.copyfile(disk, copy)
sys.addaudithook(hook)
from gpuhook.tools.cli import cli
cli(standalone_mode=False)
if left <= 0 and not os.path.exists(copy):
    shutil.copyfile(disk, copy)
assert os.path.exists(copy), "it renamed fewer files"
"""


class Disk:
    """A separate ext4 filesystem, and its state after a power cut."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self._installation = installation
        self._image, self._copy = folder / "disk", folder / "copy"
        self.root = folder / "root"
        self.root.mkdir()
        with self._image.open("wb") as file:
            file.truncate(32 << 20)
        run(["mke2fs", "-q", "-t", "ext4", self._image]).ok()
        run(["mount", "-o", "loop,noauto_da_alloc", self._image, self.root]).ok()
        for name in (DAEMON, DOCUMENT):
            (self.root / name).parent.mkdir(parents=True)

    def call(self, *words: str | Path) -> None:
        """Run gpuhook."""
        run([self._installation.command, *words]).ok()

    def cut(self, number: int, *words: str | Path) -> None:
        """Cut the power while gpuhook runs, before the rename ``number`` or after gpuhook's end."""
        run(["sync", "-f", self.root]).ok()
        places = (self._image, self._copy, self.root / "other")
        python = self._installation.bin / "python"
        run([python, "-I", "-c", CUT, str(number), *places, *words]).ok()
        self.close()
        run(["mount", "-o", "loop", self._copy, self.root]).ok()

    def close(self) -> None:
        run(["umount", self.root]).ok()


@pytest.fixture
def disk(installation: Installation, workspace: Path, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(installation, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("number", [1, 2, 3, 4, 0])
def test_an_install_interrupted_by_a_power_cut_leaves_valid_files(disk: Disk, number: int) -> None:
    daemon, old = disk.root / DAEMON, '{"debug": true}'
    daemon.write_text(old)
    words = ("--engine=docker", f"--prefix={disk.root}")
    disk.cut(number, "install", *words)
    found = daemon.read_text()
    assert found == old or "gpu-py" in json.loads(found)["runtimes"]
    assert number != 0 or found != old
    for path in (disk.root / "var").rglob("[!.]*"):
        if path.is_file() and path.name != "lock":
            json.loads(path.read_text())
    disk.call("install", *words)
    assert "gpu-py" in json.loads(daemon.read_text())["runtimes"]
    disk.call("uninstall", *words)
    assert json.loads(daemon.read_text()) == json.loads(old)


@pytest.mark.parametrize("number", [1, 0])
def test_a_cdi_spec_is_old_or_new_after_a_power_cut(
    disk: Disk, number: int, installation: Installation, tmp_path: Path
) -> None:
    driver, document = tmp_path / "driver", disk.root / DOCUMENT
    simulate(installation, driver, "--gpus=1")
    config = write_config(tmp_path / "config", driver, ["runc"])
    words = ("cdi", "generate", f"--config={config}", f"--output={document}")
    disk.call(*words)
    old = document.read_text()
    simulate(installation, driver, "--gpus=2")
    disk.cut(number, *words)
    found = document.read_text()
    disk.call(*words)
    assert old != document.read_text()
    assert found == (old if number else document.read_text())
