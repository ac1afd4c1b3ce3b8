"""What is asked for a root folder: by the caller's words, and by its own environment.

The answer is a spec, as an engine's would be, so that whatever reads requests reads this one.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from gpuhook.ground import names as grammar
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import FolderError, RequestError, listed, shown
from gpuhook.ground.oci import jsontext
from gpuhook.ground.oci.spec import Spec
from gpuhook.tools.apply import callers

STDOUT = "-"
_VISIBLE = "_VISIBLE_"  # in the names of most variables that name devices

Known = Mapping[str, ModuleType]


@dataclass(frozen=True)
class Asked:
    """What the caller says: variables (None: not set), CDI names, and who may ask for what.

    ``environ`` is a file with the folder's own environment, KEY=VALUE lines, "" for none; of
    several lines for one key the last counts. ``own`` has the vendors' variables in our own
    environment count more than that, ``defaults`` are of those that nobody sets. ``rootfs`` is the
    root folder.
    """

    settings: tuple[tuple[str, str | None], ...] = ()
    devices: tuple[str, ...] = ()
    environ: str = ""
    privileged: bool = False
    defaults: tuple[tuple[str, str], ...] = ()
    own: bool = False
    rootfs: str = ""

    def spec(self, config: Config, known: Known) -> Spec:
        """Return the request as a spec; RequestError for a device of an unknown kind.

        Where config.toml lets no image ask, the file's environment doesn't count, because
        the image wrote it. FolderError where it can't be read.
        """
        heard = config.accept_envvar_unprivileged
        # protects: folder-environment
        env = environment(self.environ, self.rootfs) if self.environ and heard else {}
        given = [*_own(known), *self.settings] if self.own else self.settings
        for name, value in given:
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        for name, value in self.defaults:
            env.setdefault(name, value)
        env.update(_variables(self.devices, env, known))
        bounding = [] if heard and not self.privileged else ["CAP_SYS_ADMIN"]
        data = {
            "ociVersion": "1.0.2",
            "process": {
                "env": [f"{name}={value}" for name, value in env.items()],
                "capabilities": {"bounding": bounding},
            },
            "linux": {"namespaces": [{"type": "mount"}]},
        }
        return Spec("The request", jsontext.dumps(data))


def _own(known: Known) -> list[tuple[str, str]]:
    """Return the variables of vendors in our own environment, by what their names begin with."""
    every = (variable for names in known.values() for variable in names.VARIABLES)
    heads = {f"{variable.partition(_VISIBLE)[0]}_" for variable in every if _VISIBLE in variable}
    return [pair for pair in os.environ.items() if pair[0].startswith(tuple(heads))]


def environment(path: str, rootfs: str) -> dict[str, str]:
    """Return the variables in a file of KEY=VALUE lines, the last of each.

    FolderError where it can't be read.
    """
    if path == STDOUT:
        return {}
    try:
        text = os.fsdecode(callers.read(path, rootfs))
    except OSError as error:
        raise FolderError(
            f"The environment file {path} can't be read: {error.strerror}",
            "Give a file of KEY=VALUE lines with --environ",
        ) from None
    pairs = (line.partition("=") for line in text.split("\n"))
    return {name: value for name, equals, value in pairs if name and equals}


def _variables(devices: Iterable[str], env: dict[str, str], known: Known) -> dict[str, str]:
    """Return the variables that ask for these devices and for nothing else of their vendors."""
    by_kind = {names.KIND: names for names in known.values()}
    wanted: dict[str, list[str]] = {}
    for device in devices:
        parts = grammar.cdi_parts(device)
        kind, _, name = device.partition("=")
        if parts is None or kind not in by_kind:
            raise RequestError(
                f"gpuhook has no devices called {shown(device)}",
                f"Give KIND=NAME, where KIND is one of {listed([*by_kind])}",
            )
        wanted.setdefault(kind, []).append(name)
    found = {}
    for kind, chosen in wanted.items():
        variables = [*by_kind[kind].VARIABLES]
        for variable in variables:
            env.pop(variable, None)
        found[variables[0]] = ",".join(chosen)
    return found


def settings(words: Iterable[str]) -> tuple[tuple[str, str | None], ...]:
    """Return the names and values of -e NAME=VALUE; RequestError for a word without a name.

    NAME alone has the value of our own environment, None where it isn't set, as with docker.
    """
    found: list[tuple[str, str | None]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise RequestError(
                f"-e takes NAME=VALUE or NAME, not {shown(word)}", "Name the variable before ="
            )
        found.append((name, value if equals else os.environ.get(name)))
    return tuple(found)
