"""Device requests for a root folder, from the caller's options and the folder's environment.

The result is a spec like an engine's, so that the same request readers apply.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from gpuhook.base import names as grammar
from gpuhook.base.config.model import Config
from gpuhook.base.errors import FolderError, RequestError, listed, shown
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.spec import Spec
from gpuhook.tools.root_folder import user_files

STDOUT = "-"
_VISIBLE = "_VISIBLE_"  # part of the name of most variables that select devices

VendorRegistry = Mapping[str, ModuleType]


@dataclass(frozen=True)
class CallerRequest:
    """The caller's request: variables (None: not set), CDI names, and their precedence.

    ``environ`` is a file with the folder's own environment, KEY=VALUE lines, "" for none; the last
    of several lines for a key is used. ``own`` gives precedence to the vendors' variables in our
    own environment, ``defaults`` are values of unset variables. ``rootfs`` is the root folder.
    """

    settings: tuple[tuple[str, str | None], ...] = ()
    devices: tuple[str, ...] = ()
    environ: str = ""
    privileged: bool = False
    defaults: tuple[tuple[str, str], ...] = ()
    own: bool = False
    rootfs: str = ""

    def spec(self, config: Config, vendors: VendorRegistry) -> Spec:
        """Return the request as a spec; RequestError for a device of an unknown kind.

        If config.toml allows no requests by images, the file's environment is ignored, because
        it comes from the image. FolderError if it can't be read.
        """
        heard = config.accept_envvar_unprivileged
        # protects: folder-environment
        env = environment(self.environ, self.rootfs) if self.environ and heard else {}
        given = [*_own(vendors), *self.settings] if self.own else self.settings
        for name, value in given:
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        for name, value in self.defaults:
            env.setdefault(name, value)
        env.update(_variables(self.devices, env, vendors))
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


def _own(vendors: VendorRegistry) -> list[tuple[str, str]]:
    """Return the vendors' variables in our own environment, found by their prefixes."""
    every = (variable for names in vendors.values() for variable in names.VARIABLES)
    heads = {f"{variable.partition(_VISIBLE)[0]}_" for variable in every if _VISIBLE in variable}
    return [pair for pair in os.environ.items() if pair[0].startswith(tuple(heads))]


def environment(path: str, rootfs: str) -> dict[str, str]:
    """Return the variables in a file of KEY=VALUE lines, the last of each.

    FolderError if it can't be read.
    """
    if path == STDOUT:
        return {}
    try:
        text = os.fsdecode(user_files.read(path, rootfs))
    except OSError as error:
        raise FolderError(
            f"The environment file {path} can't be read: {error.strerror}",
            "Give a file of KEY=VALUE lines with --environ",
        ) from None
    pairs = (line.partition("=") for line in text.split("\n"))
    return {name: value for name, equals, value in pairs if name and equals}


def _variables(
    devices: Iterable[str], env: dict[str, str], vendors: VendorRegistry
) -> dict[str, str]:
    """Return the variables that request exactly these devices of their vendors."""
    by_kind = {names.KIND: names for names in vendors.values()}
    wanted: dict[str, list[str]] = {}
    for device in devices:
        parts = grammar.cdi_parts(device)
        kind, _, name = device.partition("=")
        if parts is None or kind not in by_kind:
            raise RequestError(
                f"gpuhook has no devices named {shown(device)}",
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

    NAME without a value has the value of our environment, None if unset, as with docker.
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
