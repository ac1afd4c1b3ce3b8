"""Installation requests, engines' answers, and the base class of engines.

An installation adds to the existing settings: each engine reads from its files what earlier
installations have registered. ``EngineRequest.without`` names the options to remove.
"""

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from gpuhook.base.errors import shown
from gpuhook.tools.engines.files import Change, users_folder
from gpuhook.tools.engines.prefix import below, checked
from gpuhook.tools.engines.store import TargetFile
from gpuhook.tools.engines.swarm import SwarmResource

# Options that can be removed one by one.
SET_DEFAULT, ALIASES, CDI, SWARM, HOOK = "set-default", "gpus", "cdi", "swarm", "hook"
NVIDIAS_NAME = "nvidia"  # the runtime that is registered with ALIASES


@dataclass(frozen=True)
class EngineRequest:
    """The settings requested for an engine.

    ``runtimes`` are (name, absolute path) pairs, of which the first may become the default
    runtime; ``also`` are further ones, omitted if the engine has a runtime of that name.
    ``config`` and ``drop_in`` are files to use instead of the engine's default files, ``prefix``
    a folder to use as / . ``cdi`` enables CDI in the engine, ``cdi_setting`` says whether its
    version needs a setting for that. ``hook`` is the stage (prestart, precreate) at which podman
    calls ``hook_path``, None for no hook. ``swarm`` are the devices that Docker offers to a
    swarm; if empty, its swarm settings don't change. ``without`` are options of earlier
    installations to remove, ``known`` the names of runtimes recorded by them. ``default``, set by
    ``following``, is our runtime that is the default. ``units`` are the files of an nspawn
    machine, each with our lines in it. ``leads`` says whether other runtimes of a program that
    has moved follow it. ``links`` are paths of links to gpu-py with NVIDIA's name for it.
    """

    runtimes: tuple[tuple[str, str], ...]
    also: tuple[tuple[str, str], ...] = ()
    set_default: bool = False
    cdi: bool = False
    cdi_setting: bool = True
    swarm: tuple[SwarmResource, ...] = ()
    config: str | None = None
    drop_in: str | None = None
    prefix: str = ""
    hook: str | None = None
    hook_path: str = ""
    gpuhook_config: str | None = None
    rootless: bool = False
    without: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    default: str | None = None
    units: tuple[tuple[str, str], ...] = ()
    leads: bool = True
    links: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The runtimes' names."""
        return tuple(name for name, _ in self.runtimes)

    def beside(self, existing: Container[str]) -> "EngineRequest":
        """Return a copy with the runtimes of ``also`` that don't exist yet."""
        more = tuple(pair for pair in self.also if pair[0] not in existing)
        return replace(self, runtimes=self.runtimes + more, also=())

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names of runtimes to remove."""
        return (NVIDIAS_NAME,) if ALIASES in self.without else ()

    def moved(self, earlier: Mapping[str, str]) -> dict[str, str]:
        """Return our programs that have moved: old path -> new path.

        ``earlier`` maps registered runtimes to their programs. The runtime ``nvidia`` moves no
        other one: it may have been NVIDIA's, and nvidia-ctk may register any program for it.
        """
        if not self.leads:
            return {}
        return {
            earlier[name]: program
            for name, program in self.runtimes
            if name != NVIDIAS_NAME and earlier.get(name, program) != program
        }

    def following(self, earlier: Mapping[str, str], default: str | None) -> "EngineRequest":
        """Return a copy that includes the runtimes registered by earlier installations.

        ``earlier`` maps their runtimes to programs, ``default`` is the default runtime that they
        set. Runtimes of a program of ours that has moved get its new path.
        """
        moved = self.moved(earlier)
        runtimes = {
            name: moved.get(program, program)
            for name, program in earlier.items()
            if name not in self.dropped
        }
        runtimes.update(self.runtimes)
        if self.set_default:
            default = self.names[0]
        elif SET_DEFAULT in self.without or default not in runtimes:
            default = None
        return replace(self, runtimes=tuple(runtimes.items()), default=default)

    def unheeded(self, later: Mapping[str, object]) -> list[str]:
        """Return a warning about a file that overrides the requested default runtime.

        ``later`` are the default runtimes in the files read after ours, in this order.
        """
        found = [(path, default) for path, default in later.items() if isinstance(default, str)]
        path, default = found[-1] if found else ("", self.default)
        if self.default in (None, default):
            return []
        said = f"{path} is read after this and makes {shown(default)} the default runtime"
        return [f"{said}: remove that, or name a file that is read later with --drop-in-config"]

    def system(self, path: str) -> str:
        """Return a system path below the prefix; EngineError if it leads out of it."""
        return below(self.prefix, path)

    def user(self, path: str) -> str:
        """Return a path below the user's configuration folder."""
        base = users_folder(".config", "XDG_CONFIG_HOME")
        return below(self.prefix, os.path.join(base, path))

    def found(self, pattern: str) -> list[str]:
        """Return the files of a pattern, sorted; EngineError if one leads out of the prefix."""
        return [checked(self.prefix, path) for path in sorted(glob.glob(pattern))]


@dataclass(frozen=True)
class EngineChanges:
    """An engine's target files, remaining steps, and warnings.

    ``restart`` means that some change takes effect only after a restart.
    """

    targets: tuple[TargetFile, ...]
    afterwards: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    restart: bool = False


class Engine(ABC):
    """A container engine that can use gpu-py; by default for root only, without a daemon."""

    name: str
    has_runtimes = True  # supports OCI runtimes, such as gpu-py

    @abstractmethod
    def install(self, ask: EngineRequest) -> EngineChanges:
        """Return the changes that register the runtimes; change nothing."""

    @abstractmethod
    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return the containers created for one of these runtimes."""

    @abstractmethod
    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether the engine seems to be installed on this host."""

    def main_file(self, config: str) -> str:
        """Return the file that the engine reads for a named configuration file."""
        return config

    def afterwards(self, config: str = "") -> str:  # noqa: ARG002
        """Return the step that makes the engine of a file drop the removed runtimes."""
        return ""

    def reload(self, config: str) -> list[int] | None:  # noqa: ARG002
        """Make running daemons reload ``config``; return their process ids.

        None if they read it only at start-up, and nothing was done.
        """
        return None

    def forget(self, change: Change, names: tuple[str, ...]) -> list[int]:  # noqa: ARG002
        """Make running daemons drop the runtimes before a change removes them from the file.

        Return their process ids; none if no daemon runs, or if it reads its file only at
        start-up. EngineError, with everything unchanged, if a daemon keeps them.
        """
        return []

    def unread(self, change: Change, prefix: str) -> list[str]:  # noqa: ARG002
        """Return the files that the engine no longer reads after a change."""
        return []

    def is_users(self, ask: EngineRequest) -> bool:  # noqa: ARG002
        """Tell whether a non-root user has, or can have, an engine of this kind."""
        return False
