"""enroot, and pyxis on top of it: our hook in hooks.d, with NVIDIA's hook disabled.

enroot runs each executable script there in the order of their names. They run as root of the
container's user namespace, after the root is mounted and before it becomes /. Source: enroot's
doc/hooks.md.
"""

import glob
import os
import shlex
import shutil

from gpuhook.tools import extensions
from gpuhook.tools.engines import whole_text
from gpuhook.tools.engines.ask import Engine, EngineChanges, EngineRequest
from gpuhook.tools.engines.files import DROP_IN_HEADER, read_text
from gpuhook.tools.engines.prefix import checked
from gpuhook.tools.engines.store import TargetFile
from gpuhook.vendors.nvidia.names import VARIABLES
from gpuhook.vendors.nvidia.variables import DRIVER_CAPABILITIES, feature_variable

HOOK = "98-gpuhook.sh"
_NVIDIAS = "98-nvidia.sh"
_SYSTEM = "/etc/enroot/hooks.d"
_USERS = "enroot/hooks.d"
_MODE = 0o755
_SHELL = "#!/usr/bin/env bash\n"
_IDLE = f"""{_SHELL}# {DROP_IN_HEADER}
#
# {HOOK} replaces this hook, for the devices of all vendors.
exit 0
"""

_DEVICES = next(iter(VARIABLES))
# The defaults are those of NVIDIA's hook for enroot: no device, and the driver's utilities.
_TEXT = f"""#
# Adds devices to an enroot container. The caller's environment takes precedence over that of the
# container. A site may set ENROOT_GPUHOOK_DEVICES in enroot.conf to select the devices otherwise:
# "slurm" selects those that Slurm has allocated to the job, and NAME those in the variable of
# that name, such as CUDA_VISIBLE_DEVICES.
set -euo pipefail

words=(--own-environment --privileged --no-undo
    --default {_DEVICES}=void --default {DRIVER_CAPABILITIES}=utility)
[[ ! -e /dev/gdrdrv ]] || words+=(--default {feature_variable("gdrcopy")}=enabled)
case "${{ENROOT_GPUHOOK_DEVICES:-}}" in
"") ;;
slurm) words+=(--slurm) ;;
[0-9]* | *[!A-Za-z0-9_]*)
    echo "ENROOT_GPUHOOK_DEVICES is neither slurm nor the name of a variable" >&2
    exit 1
    ;;
*) words+=(-e "{_DEVICES}=${{!ENROOT_GPUHOOK_DEVICES:-void}}") ;;
esac
exec PROGRAM apply --rootfs "${{ENROOT_ROOTFS}}" --environ "${{ENROOT_ENVIRON}}" "${{words[@]}}"
"""


class Enroot(Engine):
    """enroot, which has no daemon: hooks of the system, or of a user."""

    name = "enroot"
    has_runtimes = False

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Return our hook, and if NVIDIA's hook exists, one of its name that does nothing."""
        extensions.check_command("apply", ", which enroot's hook runs,")
        folder = _folder(ask)
        path = ask.config or ask.drop_in or os.path.join(folder, HOOK)
        program = os.path.join(os.path.dirname(ask.runtimes[0][1]), "gpuhook")
        text = f"{_SHELL}# {DROP_IN_HEADER}\n{_TEXT.replace('PROGRAM', shlex.quote(program))}"
        ours = TargetFile(
            self.name, path, "whole", text, path, ((whole_text.KEY,),), ours=True,
            usual=os.path.join(folder, HOOK), mode=_MODE,
        )  # fmt: skip
        nvidias = checked(ask.prefix, os.path.join(folder, _NVIDIAS))
        others = (
            [TargetFile(self.name, nvidias, "whole", _IDLE, path)] if read_text(nvidias) else []
        )
        return EngineChanges((ours, *others), warnings=tuple(_warnings(ask)))

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return nothing: enroot keeps no running containers."""
        del names, ask
        return []

    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether enroot is installed."""
        return bool(shutil.which("enroot")) or os.path.isdir(ask.system("/etc/enroot"))

    def is_users(self, ask: EngineRequest) -> bool:
        """Return True: every user can have hooks."""
        del ask
        return True


def _folder(ask: EngineRequest) -> str:
    return ask.user(_USERS) if ask.rootless else ask.system(_SYSTEM)


def _warnings(ask: EngineRequest) -> list[str]:
    """Return a warning about each hook of NVIDIA that still runs."""
    found = glob.glob(glob.escape(ask.system(_SYSTEM)) + f"/{_NVIDIAS}") if ask.rootless else []
    return [
        f"{path} still runs, too: run gpuhook install --engine enroot as root" for path in found
    ]
