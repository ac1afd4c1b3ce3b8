"""Input of every check: the host, the configuration and our programs."""

import copy
import os
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from gpuhook.base import names
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.errors import ConfigError
from gpuhook.core.cdi import folders
from gpuhook.tools.doctor.finding import Finding
from gpuhook.tools.doctor.machine import Machine
from gpuhook.tools.engines import docker_api
from gpuhook.tools.engines.docker_api import DockerInfo
from gpuhook.vendors import registry


class Case:
    """The input of an examination.

    ``machine`` is the examined host, ``bin`` the folder of gpu-py on it, ``config_error`` an
    error in the configuration (then the defaults are used). ``vendor`` is the vendor whose driver
    is examined, "" for none. ``engine`` is the only engine to examine, "" for all. ``registered``
    are the engines with gpu-py, ``unseen`` the unreadable files, among engines examined so far.
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
        """Return the case of this host; ``program`` is our own path."""
        error = ""
        try:
            config = load(config_path)
            registry.all_vendors(config)  # vendors check their own settings
        except ConfigError as problem:
            config, error = Config(config_path), str(problem)
        return cls(Machine(), config, bin_folder(program), error)

    def of_vendor(self, vendor: str) -> "Case":
        """Return a copy for a check of a vendor, below its driver root."""
        made = copy.copy(self)
        made.vendor = vendor
        made.__dict__.pop("driver", None)
        return made

    @property
    def driver_root(self) -> str:
        """The driver root as a path on the host, / for the host's root."""
        return self.config.driver_root_of(self.vendor)

    @cached_property
    def driver(self) -> Machine:
        """The driver root as a separate machine."""
        return Machine(self.machine.path(self.driver_root))

    @cached_property
    def dockers(self) -> list[DockerInfo]:
        """All running dockerds of root or the current user, with their answers."""
        return list(docker_api.asked(self.machine.processes("dockerd")))

    @cached_property
    def cdi(self) -> folders.FolderContent:
        """The CDI specs in the configured folders, as gpu-py finds them; see ``path_on``."""
        return folders.read_folders(map(self.machine.path, self.config.cdi_spec_dirs))

    def settings(self, path: str) -> list[str]:
        """Return the paths of an engine's settings: in /etc, and for other users in ~/.config."""
        files = [f"/etc/{path}"]
        if os.geteuid() != 0:
            base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
            files.append(f"{base}/{path}")
        return files

    def path_on(self, path: str) -> str:
        """Convert one of our paths to a path on the host."""
        return path.removeprefix(self.machine.root)

    def driver_text(self, path: str) -> str | None:
        """Return a file of /proc or /sys, below the driver root if it exists there, else /."""
        text = self.driver.text(path)
        return text if text is not None else self.machine.text(path)

    def driver_names(self, folder: str) -> list[str]:
        """Return a folder's names, found as by ``driver_text``."""
        return self.driver.names(folder) or self.machine.names(folder)

    def driver_glob(self, pattern: str) -> list[str]:
        """Return the paths that match a shell pattern, found as by ``driver_text``."""
        return self.driver.glob(pattern) or self.machine.glob(pattern)


def bin_folder(program: str) -> str:
    """Return the folder of gpu-py: next to our program, or where pip installed it."""
    folder = os.path.dirname(os.path.abspath(program))
    if os.path.exists(os.path.join(folder, names.RUNTIME)):
        return folder
    real = os.path.dirname(os.path.realpath(program))
    return (
        real if os.path.exists(os.path.join(real, names.RUNTIME)) else sysconfig.get_path("scripts")
    )


Check = Callable[[Case], Iterable[Finding]]

# A second name for a failure of any vendor's driver.
DRIVER = "driver"


@dataclass(frozen=True)
class CheckStep:
    """A check, and its conditions.

    ``needs`` are names of findings: if one of them was a failure, the check is skipped, because
    it would only report the same cause again. ``part`` is a second name for its own failures.
    ``engine`` is the only engine that the check concerns, "" for none.
    """

    check: Check
    needs: tuple[str, ...] = ()
    part: str = ""
    engine: str = ""

    @property
    def name(self) -> str:
        """The check's name if it has no findings."""
        return getattr(self.check, "__name__", "unnamed").replace("_", "-")


@dataclass(frozen=True)
class VendorChecks:
    """A vendor's part of the doctor: ``CHECKS`` of the module ``doctor`` in its folder.

    ``driver`` checks run before all others except the configuration's, ``host`` checks after them.
    ``report_files`` are paths and shell patterns of texts in /proc and /sys without settings of
    users' programs, ``report_nodes`` are patterns of nodes.
    """

    driver: tuple[Check | CheckStep, ...]
    host: tuple[Check | CheckStep, ...] = ()
    report_files: tuple[str, ...] = ()
    report_nodes: tuple[str, ...] = ()


def step_of(check: "Check | CheckStep") -> CheckStep:
    """Return a check as a step; a check without needs may be a plain function."""
    return check if isinstance(check, CheckStep) else CheckStep(check)
