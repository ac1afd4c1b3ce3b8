"""Sarus: a hook file in the ``hooksDir`` of sarus.json, which Sarus puts into each bundle.

Sarus takes no hook that others than root could change, nor one in a folder that they could: then no
container starts at all, so it is refused here. Sources: Sarus' pages "Configuring Sarus for OCI
hooks" and "Security related".
"""

import os
import stat

from gpuhook.ground import names
from gpuhook.ground.errors import EngineError, shown
from gpuhook.tools.engines.ask import Answer, Ask, Engine
from gpuhook.tools.engines.files import read_json
from gpuhook.tools.engines.podman import HOOK_KEYS, hook_document
from gpuhook.tools.engines.store import Target

HOOK = "50-gpuhook.json"
_STAGE = "prestart"  # at which Sarus has NVIDIA's hook called, too
_PLACES = ("/opt/sarus/default/etc/sarus.json", "/etc/sarus/sarus.json")
_KEY = "hooksDir"


class Sarus(Engine):
    """Sarus, root's alone; it has no daemon."""

    name = "sarus"
    has_runtimes = False

    def install(self, ask: Ask) -> Answer:
        """Return the hook file; EngineError where Sarus would take no container with it."""
        config = ask.config or next(iter(_found(ask)), ask.system(_PLACES[0]))
        folder = read_json(config).get(_KEY)
        if not isinstance(folder, str) or not os.path.isabs(folder):
            raise EngineError(
                f"{shown(config)} names no folder of hooks ({_KEY})",
                f"Name Sarus' configuration with --config, and set {_KEY} in it",
            )
        path = ask.system(os.path.join(folder, HOOK))
        program = os.path.join(os.path.dirname(ask.runtimes[0][1]), names.HOOK)
        for each in (os.path.dirname(path), program):
            _check(each, ask.prefix)
        text = hook_document(program, _STAGE, ask.gpuhook_config)
        target = Target(self.name, path, "json", text, config, HOOK_KEYS, ours=True, mode=0o644)
        return Answer((target,))

    def bound(self, names: tuple[str, ...], ask: Ask) -> list[str]:
        """Return nothing: a container of Sarus lives as long as its command."""
        del names, ask
        return []

    def is_present(self, ask: Ask) -> bool:
        """Tell whether Sarus is where its installation puts it."""
        return bool(_found(ask))


def _found(ask: Ask) -> list[str]:
    return [path for path in map(ask.system, _PLACES) if os.path.isfile(path)]


def _check(path: str, prefix: str) -> None:
    """Raise EngineError for what others than root may change, on the way there too.

    A sticky folder is no exception for Sarus. Below a prefix only what is there counts.
    """
    if prefix and not path.startswith(f"{prefix}/"):
        return
    end = prefix or "/"
    while True:
        try:
            found = os.stat(path)
        except OSError as error:
            raise EngineError(
                f"{path} can't be looked at: {error.strerror}", "Make the folder of hooks first"
            ) from None
        # protects: saruss-owners
        if found.st_uid != 0 or stat.S_IMODE(found.st_mode) & 0o022:
            raise EngineError(
                f"Others than root may change {path}, and Sarus would refuse every container",
                f"Have it be root's alone: chown root {path}; chmod go-w {path}",
            )
        if path in (end, "/"):
            return
        path = os.path.dirname(path)
