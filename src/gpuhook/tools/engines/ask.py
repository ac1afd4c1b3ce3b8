"""What an installation is asked to do, and what an engine answers.

An installation adds to what stands in an engine's files: each engine reads there what earlier
ones have registered. What is to be taken back is named in ``Ask.without``.
"""

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from gpuhook.ground.errors import shown
from gpuhook.tools.engines.files import Change, users_folder
from gpuhook.tools.engines.prefix import below, checked
from gpuhook.tools.engines.store import Target
from gpuhook.tools.engines.swarm import Resource

# Options that can be taken back one by one.
SET_DEFAULT, ALIASES, CDI, SWARM, HOOK = "set-default", "nvidia-names", "cdi", "swarm", "hook"
NVIDIAS_NAME = "nvidia"  # the runtime that is registered with ALIASES


@dataclass(frozen=True)
class Ask:
    """What an engine is to be told.

    ``runtimes`` are (name, absolute path) pairs, of which the first may become the default
    runtime; ``also`` are more of them, to be left out where the engine has a runtime of that
    name already. ``config`` and ``drop_in`` are files to use instead of the engine's own,
    ``prefix`` a folder that stands for / . ``cdi`` has the engine take devices by CDI,
    ``cdi_setting`` says whether this version of it needs a setting for that. ``hook`` is the
    stage (prestart, precreate) at which podman is to call ``hook_path``, None for not at all.
    ``swarm`` are the devices that Docker is to offer to a swarm; none: nothing about it changes.
    ``without`` are the options of earlier installations that are to be taken back, ``known``
    the names of runtimes that are remembered as registered by them. ``default`` is found by
    ``following``: which of our runtimes is the default one. ``units`` are the files of a machine
    of nspawn, each with the lines of ours in it.
    """

    runtimes: tuple[tuple[str, str], ...]
    also: tuple[tuple[str, str], ...] = ()
    set_default: bool = False
    cdi: bool = False
    cdi_setting: bool = True
    swarm: tuple[Resource, ...] = ()
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

    @property
    def names(self) -> tuple[str, ...]:
        """The runtimes' names."""
        return tuple(name for name, _ in self.runtimes)

    def beside(self, existing: Container[str]) -> "Ask":
        """Return the same with those of ``also`` among the runtimes that don't exist."""
        more = tuple(pair for pair in self.also if pair[0] not in existing)
        return replace(self, runtimes=self.runtimes + more, also=())

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names of runtimes that are to be taken back."""
        return (NVIDIAS_NAME,) if ALIASES in self.without else ()

    def moved(self, earlier: Mapping[str, str]) -> dict[str, str]:
        """Return the programs that our names led to before, each with the one it is now.

        ``earlier`` are the programs of registered runtimes by name.
        """
        return {
            earlier[name]: program
            for name, program in self.runtimes
            if earlier.get(name, program) != program
        }

    def following(self, earlier: Mapping[str, str], default: str | None) -> "Ask":
        """Return the same with what earlier installations have registered.

        ``earlier`` are their runtimes' programs by name, ``default`` is the default runtime
        that they have set. Runtimes that led to a program of ours that is elsewhere now move
        with it.
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
        """Say which file makes another runtime the default than this asks for.

        ``later`` are the default runtimes in the files that are read after ours, in their order.
        """
        found = [(path, default) for path, default in later.items() if isinstance(default, str)]
        path, default = found[-1] if found else ("", self.default)
        if self.default in (None, default):
            return []
        said = f"{path} is read after this and makes {shown(default)} the default runtime"
        return [f"{said}: take that out, or name a file that is read later with --drop-in-config"]

    def system(self, path: str) -> str:
        """Return a path of the system below the prefix; EngineError where it leads out of it."""
        return below(self.prefix, path)

    def user(self, path: str) -> str:
        """Return a path below the user's configuration folder."""
        base = users_folder(".config", "XDG_CONFIG_HOME")
        return below(self.prefix, os.path.join(base, path))

    def found(self, pattern: str) -> list[str]:
        """Return the files of a pattern in their order; EngineError where one leads out."""
        return [checked(self.prefix, path) for path in sorted(glob.glob(pattern))]


@dataclass(frozen=True)
class Answer:
    """The files an engine wants, what to do afterwards, and what the admin should know.

    ``restart`` says that there is something new among it that no reload switches on.
    """

    targets: tuple[Target, ...]
    afterwards: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    restart: bool = False


class Engine(ABC):
    """A container engine that can be told about gpu-py; by default root's, without a daemon."""

    name: str
    has_runtimes = True  # OCI runtimes, of which gpu-py is to be one

    @abstractmethod
    def install(self, ask: Ask) -> Answer:
        """Return what tells the engine about the runtimes; change nothing."""

    @abstractmethod
    def bound(self, names: tuple[str, ...], ask: Ask) -> list[str]:
        """Return the containers that were made for one of these runtimes."""

    @abstractmethod
    def is_present(self, ask: Ask) -> bool:
        """Tell whether the engine seems to be on this machine."""

    def main_file(self, config: str) -> str:
        """Return the file that the engine reads for one that was named as its configuration."""
        return config

    def afterwards(self, config: str = "") -> str:  # noqa: ARG002
        """Return what makes the engine that reads a file see that it no longer has the runtimes."""
        return ""

    def reload(self, config: str) -> list[int] | None:  # noqa: ARG002
        """Have running daemons read ``config`` again; return their process ids.

        None: they only read it at their start, and nothing was done.
        """
        return None

    def forget(self, change: Change, names: tuple[str, ...]) -> list[int]:  # noqa: ARG002
        """Have running daemons forget the runtimes before a change takes them out of its file.

        Returns their process ids; none where no daemon runs, or where it only reads its file
        at its start. EngineError, with everything as it was, if one doesn't forget.
        """
        return []

    def unread(self, change: Change, prefix: str) -> list[str]:  # noqa: ARG002
        """Return the files that the engine reads no more with a change of its configuration."""
        return []

    def is_users(self, ask: Ask) -> bool:  # noqa: ARG002
        """Tell whether a user who isn't root has, or can have, an engine of this kind."""
        return False
