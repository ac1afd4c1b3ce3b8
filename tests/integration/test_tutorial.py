"""The commands of docs/tutorial/simulated.md do what it says, one after the other."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import Result, daemon, run
from harness.docker import ALONE, options
from harness.images import REPOSITORY, image
from harness.installation import Installation

PAGE = REPOSITORY / "docs/tutorial/simulated.md"
# A block of commands, and what is printed where the page shows it.
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
FIRST = "## 2. Eight GPUs"  # before it stands how to install, as the fixture has done
# Commands that are to fail: Docker's of a container that isn't started, the doctor's of a lost GPU.
FAILING = ("VISIBLE_DEVICES=99", "VISIBLE_DEVICES=2 ", "gpuhook doctor")


@pytest.fixture
def machine(workspace: Path, installation: Installation, archive: Path) -> Iterator[dict[str, str]]:
    """The environment of somebody at a machine with Docker, in which nothing else is installed."""
    folder = workspace / "tutorial"
    folder.mkdir()
    config, socket = Path("/etc/docker/daemon.json"), Path("/run/docker.sock")
    settings, kept = Path("/etc/gpuhook"), Path("/etc/gpuhook.kept")
    if settings.exists():  # other tests', with a link to what they share
        settings.rename(kept)
    config.parent.mkdir(exist_ok=True)
    config.write_text("{}\n")
    words = [word for word in options(folder, config) if not word.startswith("--host")]
    env = {"PATH": f"{installation.bin}:/usr/sbin:/usr/bin:/sbin:/bin"}

    def answers() -> bool:
        return run(["docker", "info"], env=env).status == 0

    argv = [*ALONE, "dockerd", f"--host=unix://{socket}", *words]
    try:
        with daemon(argv, folder / "log", answers, env):
            run(["docker", "load", "--input", archive], env=env).ok()
            run(["docker", "tag", image("debian"), "debian:12"], env=env).ok()
            yield {**env, "GPUS": str(folder / "gpus")}
    finally:
        shutil.rmtree(config.parent)
        shutil.rmtree(settings, ignore_errors=True)
        if kept.exists():
            kept.rename(settings)


def steps() -> Iterator[tuple[str, str]]:
    """Yield the commands that follow the installation, each with what it is to print last."""
    for commands, printed in BLOCK.findall(PAGE.read_text().partition(FIRST)[2]):
        *before, last = commands.splitlines()
        yield from ((each, "") for each in before)
        yield last, printed


def perform(command: str, env: dict[str, str]) -> Result:
    command = command.replace("/srv/gpus", env["GPUS"]).replace(" /opt/gpuhook", "")
    return run(["sh", "-c", command], env=env)


def test_each_step_does_what_the_page_says(machine: dict[str, str]) -> None:
    done = 0
    for command, printed in steps():
        result = perform(command, machine)
        assert (result.status != 0) == any(each in command for each in FAILING), str(result)
        pattern = ".*".join(re.escape(part) for part in printed.strip().split("..."))
        assert re.search(pattern, result.stdout + result.stderr, re.DOTALL), str(result)
        done += 1
    assert done >= 15
    assert not Path(machine["GPUS"]).exists()
    assert Path("/etc/docker/daemon.json").read_text() == "{}\n"
