"""podman-hpc: the module that stands behind its option --gpu.

A module is a YAML file of the site's, whose ``additional_args`` come behind ``podman run``. Source:
podman-hpc's etc/modules.d and podman_hpc/siteconfig.py, which names the folder.
"""

import os
import shutil

from gpuhook.tools.engines.ask import Answer, Ask, Engine
from gpuhook.tools.engines.files import DROP_IN_HEADER
from gpuhook.tools.engines.store import Target
from gpuhook.vendors.nvidia.names import VARIABLES

_MODULE = "/etc/podman_hpc/modules.d/gpu.yaml"
_DEVICES = next(iter(VARIABLES))
# An --env without a value counts where the caller has set the variable, and nowhere else.
_TEXT = f"""# {DROP_IN_HEADER}
#
# podman-hpc run --gpu: gpu-py gives the container the devices that {_DEVICES} names, all of
# them where the job has no such variable; a job's device cgroup keeps it from others.
name: gpu
cli_arg: gpu
help: Give the container the GPUs of this machine
env: ENABLE_GPU
additional_args:
  - --runtime=RUNTIME
  - --env={_DEVICES}=all
  - --env={_DEVICES}
"""


class PodmanHpc(Engine):
    """podman-hpc, whose podman has to know gpu-py: ``install --engine podman`` sees to that."""

    name = "podman-hpc"
    has_runtimes = False

    def install(self, ask: Ask) -> Answer:
        """Return the module, in the place of the one that comes with podman-hpc."""
        path = ask.config or ask.drop_in or ask.system(_MODULE)
        text = _TEXT.replace("RUNTIME", ask.runtimes[0][1])
        return Answer((Target(self.name, path, "whole", text, path),))

    def bound(self, names: tuple[str, ...], ask: Ask) -> list[str]:
        """Return nothing: podman tells of its containers."""
        del names, ask
        return []

    def is_present(self, ask: Ask) -> bool:
        """Tell whether podman-hpc is here."""
        return bool(shutil.which("podman-hpc")) or os.path.isdir(ask.system("/etc/podman_hpc"))
