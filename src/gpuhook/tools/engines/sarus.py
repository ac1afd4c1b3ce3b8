"""Sarus: a hook file in the ``hooksDir`` of sarus.json, which Sarus adds to each bundle.

Sarus refuses every container if a user other than root can change a hook or its folder, so such
an installation is refused here. Sources: Sarus' pages "Configuring Sarus for OCI hooks" and
"Security related".
"""

import os
import stat

from gpuhook.base import names
from gpuhook.base.errors import EngineError, shown
from gpuhook.tools.engines.ask import Answer, Ask, Engine
from gpuhook.tools.engines.files import read_json
from gpuhook.tools.engines.podman import HOOK_KEYS, hook_document
from gpuhook.tools.engines.store import Target

HOOK = "50-gpuhook.json"
_STAGE = "prestart"  # the stage of NVIDIA's hook in Sarus, too
_PLACES = ("/opt/sarus/default/etc/sarus.json", "/etc/sarus/sarus.json")
_KEY = "hooksDir"


class Sarus(Engine):
    """Sarus, configured only by root; it has no daemon."""

    name = "sarus"
    has_runtimes = False

    def install(self, ask: Ask) -> Answer:
        """Return the hook file; EngineError if Sarus would refuse containers because of it."""
        config = ask.config or next(iter(_found(ask)), ask.system(_PLACES[0]))
        folder = read_json(config).get(_KEY)
        if not isinstance(folder, str) or not os.path.isabs(folder):
            raise EngineError(
                f"{shown(config)} has no folder of hooks ({_KEY})",
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
        """Return nothing: a Sarus container ends with its command."""
        del names, ask
        return []

    def is_present(self, ask: Ask) -> bool:
        """Tell whether Sarus is in its installation folder."""
        return bool(_found(ask))


def _found(ask: Ask) -> list[str]:
    return [path for path in map(ask.system, _PLACES) if os.path.isfile(path)]


def _check(path: str, prefix: str) -> None:
    """Raise EngineError if a user other than root can change a path or a parent folder.

    Sarus makes no exception for sticky folders. With a prefix only the part below it is checked.
    """
    if prefix and not path.startswith(f"{prefix}/"):
        return
    end = prefix or "/"
    while True:
        try:
            found = os.stat(path)
        except OSError as error:
            raise EngineError(
                f"{path} can't be looked at: {error.strerror}", "Create the folder of hooks first"
            ) from None
        # protects: saruss-owners
        if found.st_uid != 0 or stat.S_IMODE(found.st_mode) & 0o022:
            raise EngineError(
                f"Users other than root can change {path}, so Sarus would refuse every container",
                f"Restrict it to root: chown root {path}; chmod go-w {path}",
            )
        if path in (end, "/"):
            return
        path = os.path.dirname(path)
