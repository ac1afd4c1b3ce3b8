"""Sequences of install and uninstall on a host with devices, after which no file is left."""

import itertools
import shutil
from pathlib import Path

import installs
import pytest
from harness.commands import run
from harness.driver import Driver
from harness.installation import Installation
from hypothesis import HealthCheck, given, settings

VARIABLE = "NVIDIA_VISIBLE_DEVICES=0"
_numbers = itertools.count()


class Site:
    """The gpuhook command for systems below a folder, with a driver's devices."""

    def __init__(self, installation: Installation, config: Path, folder: Path) -> None:
        self._installation = installation
        self._env = {"GPUHOOK_CONFIG": str(config)}
        self._folder = folder

    def call(self, system: Path, *words: str) -> bool:
        """Run a command; return whether it succeeded."""
        more = [word.replace("PREFIX", str(system)) for word in words[1:]]
        line = [str(self._installation.command), words[0], f"--prefix={system}", *more]
        return run(line, env=self._env).status == 0

    def check(self, texts: dict[str, str], commands: list[list[str]]) -> None:
        """Check that commands on a new system with these files can be rolled back completely."""
        system = self._folder / str(next(_numbers))
        system.mkdir()
        try:
            installs.write(system, texts)
            before = installs.content(system)
            for words in commands:
                last = installs.content(system)
                if not self.call(system, *words):
                    assert installs.content(system) == last, words
            assert self.call(system, "uninstall")
            assert installs.content(system) == before
        finally:
            shutil.rmtree(system)


@pytest.fixture(scope="module")
def site(
    installation: Installation, configs: dict[str, Path], driver: Driver, workspace: Path
) -> Site:
    assert driver.root
    folder = workspace / "sequences"
    folder.mkdir()
    return Site(installation, configs["runc"], folder)


# gpuhook installs for one nspawn machine at a time; the two commands differ only in its name.
MACHINES = [
    ["install", "--engine=nspawn", f"--machine={name}", f"--env={VARIABLE}"] for name in ("a", "b")
]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(installs.systems(), installs.commands("--swarm", "--no-swarm", also=MACHINES))
def test_every_sequence_of_install_and_uninstall_restores_all_files(
    site: Site, texts: dict[str, str], commands: list[list[str]]
) -> None:
    site.check(texts, commands)


def test_uninstall_of_one_part_keeps_files_of_another_in_its_folder(site: Site) -> None:
    """The folder with the units for CDI specs was created for an nspawn machine's units."""
    docker = ["install", "--engine=docker", "--cdi"]
    site.check({}, [MACHINES[0], docker, ["uninstall", "--engine=nspawn"]])
