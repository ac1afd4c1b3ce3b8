"""The commands of docs/tutorial/simulated.md, run one after the other."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.commands import Result, daemon, run
from harness.docker import ALONE, options
from harness.images import REPOSITORY, image
from harness.installation import Installation

PAGE = REPOSITORY / "docs/tutorial/simulated.md"
# A block of commands, and the output if the page shows it.
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
FIRST = "## 2. Eight GPUs"  # the text before it is about installation, which the fixture does
# Commands that must fail: docker run with an unknown or lost GPU, and the doctor with a lost GPU.
FAILING = ("VISIBLE_DEVICES=99", "VISIBLE_DEVICES=2 ", "gpuhook doctor")


RESTART = "systemctl restart docker"


@dataclass
class Machine:
    """A host with Docker, on which nothing else is installed, and a shell's environment."""

    env: dict[str, str]
    folder: Path
    running: contextlib.AbstractContextManager[object] | None = None

    def restart(self) -> None:
        """Restart Docker as systemd does."""
        self.stop()
        config, socket = Path("/etc/docker/daemon.json"), Path("/run/docker.sock")
        words = [word for word in options(self.folder, config) if not word.startswith("--host")]
        argv = [*ALONE, "dockerd", f"--host=unix://{socket}", *words]
        running = daemon(argv, self.folder / "log", self._answers, self.env)
        running.__enter__()
        self.running = running

    def stop(self) -> None:
        if self.running is not None:
            self.running.__exit__(None, None, None)
            self.running = None

    def _answers(self) -> bool:
        return run(["docker", "info"], env=self.env).status == 0

    def perform(self, command: str) -> Result:
        """Run a command of the page, with the links to programs in a folder of the test."""
        if command == RESTART:
            self.restart()
            return run(["true"])
        command = command.replace("/srv/gpus", self.env["GPUS"]).replace(" /opt/gpuhook", "")
        if command.startswith("gpuhook install"):
            command = command.replace("--gpus", f"--gpus --bin-dir={self.folder}/names")
        return run(["sh", "-c", command], env=self.env)


@pytest.fixture
def machine(workspace: Path, installation: Installation, archive: Path) -> Iterator[Machine]:
    folder = workspace / "tutorial"
    folder.mkdir()
    config = Path("/etc/docker/daemon.json")
    settings, kept = Path("/etc/gpuhook"), Path("/etc/gpuhook.kept")
    if settings.exists():  # a configuration of other tests, with a link to shared files
        settings.rename(kept)
    config.parent.mkdir(exist_ok=True)
    config.write_text("{}\n")
    path = f"{installation.bin}:{folder}/names:/usr/sbin:/usr/bin:/sbin:/bin"
    made = Machine({"PATH": path, "GPUS": str(folder / "gpus")}, folder)
    try:
        made.restart()
        run(["docker", "load", "--input", archive], env=made.env).ok()
        run(["docker", "tag", image("debian"), "debian:12"], env=made.env).ok()
        yield made
    finally:
        made.stop()
        shutil.rmtree(config.parent)
        shutil.rmtree(settings, ignore_errors=True)
        if kept.exists():
            kept.rename(settings)


def steps() -> Iterator[tuple[str, str]]:
    """Yield each command after the installation, with the output that the page shows for it."""
    for commands, printed in BLOCK.findall(PAGE.read_text().partition(FIRST)[2]):
        *before, last = commands.splitlines()
        yield from ((each, "") for each in before)
        yield last, printed


def test_each_tutorial_step_prints_the_documented_output(machine: Machine) -> None:
    done, was_there = 0, Path("/run/gpuhook").exists()  # exists if gpuhook is installed
    for command, printed in steps():
        result = machine.perform(command)
        assert (result.status != 0) == any(each in command for each in FAILING), str(result)
        pattern = ".*".join(re.escape(part) for part in printed.strip().split("..."))
        assert re.search(pattern, result.stdout + result.stderr, re.DOTALL), str(result)
        done += 1
    assert done >= 15
    assert not Path(machine.env["GPUS"]).exists()
    assert not (machine.folder / "names").exists()
    assert was_there or not Path("/run/gpuhook").exists()
    links = [os.readlink(link) for link in Path("/dev/char").glob("*") if link.is_symlink()]
    assert not [link for link in links if link.startswith(machine.env["GPUS"])]
    assert Path("/etc/docker/daemon.json").read_text() == "{}\n"
