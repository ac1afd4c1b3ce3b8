"""The case that every check is given: the machine, the configuration, our own programs."""

import copy
import os
import sysconfig
from functools import cached_property

from gpuhook.ground import names
from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import ConfigError
from gpuhook.start.cdi import folders
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.engines import docker_api
from gpuhook.tools.engines.docker_api import DockerInfo
from gpuhook.vendors import registry


class Case:
    """One examination.

    ``machine`` is what is looked at, ``bin`` the folder of gpu-py on it, ``config_error``
    what is wrong with the configuration (the defaults hold then). ``vendor`` is whose driver
    is examined, "" where it is none's. ``engine`` is the only engine to be looked at, "" for all.
    ``registered`` are the engines that know gpu-py, ``unseen`` the files that can't be read, as far
    as engines have been looked at.
    """

    def __init__(
        self, machine: Machine, config: Config, bin_folder: str, config_error: str = ""
    ) -> None:
        self.machine = machine
        self.config = config
        self.bin = bin_folder
        self.config_error = config_error
        self.vendor = ""
        self.engine = ""
        self.registered: list[str] = []
        self.unseen: list[str] = []

    @classmethod
    def of_this_machine(cls, config_path: str | None, program: str) -> "Case":
        """Return the case of the machine that we run on; ``program`` is our own path."""
        error = ""
        try:
            config = load(config_path)
            registry.known(config)  # what it says of vendors, only they know
        except ConfigError as problem:
            config, error = Config(config_path), str(problem)
        return cls(Machine(), config, bin_folder(program), error)

    def of_vendor(self, vendor: str) -> "Case":
        """Return the same case for a check of that vendor: below its driver root."""
        made = copy.copy(self)
        made.vendor = vendor
        made.__dict__.pop("driver", None)
        return made

    @property
    def driver_root(self) -> str:
        """The driver root as a path of the machine, / for its own."""
        return self.config.driver_root_of(self.vendor)

    @cached_property
    def driver(self) -> Machine:
        """The driver root as a machine of its own."""
        return Machine(self.machine.path(self.driver_root))

    @cached_property
    def dockers(self) -> list[DockerInfo]:
        """Every dockerd of root's or ours that runs, with what it answered."""
        return list(docker_api.asked(self.machine.processes("dockerd")))

    @cached_property
    def cdi(self) -> folders.Found:
        """What the folders of CDI documents hold, as gpu-py finds it; see ``path_on``."""
        return folders.read_folders(map(self.machine.path, self.config.cdi_spec_dirs))

    def settings(self, path: str) -> list[str]:
        """Return where an engine's settings are: in /etc, and an ordinary user's in ~/.config."""
        files = [f"/etc/{path}"]
        if os.geteuid() != 0:
            base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
            files.append(f"{base}/{path}")
        return files

    def path_on(self, path: str) -> str:
        """Return a path of ours as one of the machine."""
        return path.removeprefix(self.machine.root)

    def driver_text(self, path: str) -> str | None:
        """Return a file of /proc or /sys: below the driver root, else the machine's own."""
        text = self.driver.text(path)
        return text if text is not None else self.machine.text(path)

    def driver_names(self, folder: str) -> list[str]:
        """Return a folder's names, looked for like ``driver_text``."""
        return self.driver.names(folder) or self.machine.names(folder)

    def driver_glob(self, pattern: str) -> list[str]:
        """Return the paths that fit a shell pattern, looked for like ``driver_text``."""
        return self.driver.glob(pattern) or self.machine.glob(pattern)


def bin_folder(program: str) -> str:
    """Return the folder that gpu-py lies in: beside our own program, or where pip put it."""
    beside = os.path.dirname(os.path.abspath(program))
    if os.path.exists(os.path.join(beside, names.RUNTIME)):
        return beside
    real = os.path.dirname(os.path.realpath(program))
    return (
        real if os.path.exists(os.path.join(real, names.RUNTIME)) else sysconfig.get_path("scripts")
    )
