"""podman-hpc: the module for its option --gpu.

A module is a YAML file of the site, whose ``additional_args`` are added to ``podman run``. Source:
podman-hpc's etc/modules.d and podman_hpc/siteconfig.py, which defines the folder.
"""

import os
import shutil

from gpuhook.tools.engines.ask import Answer, Ask, Engine
from gpuhook.tools.engines.files import DROP_IN_HEADER
from gpuhook.tools.engines.store import Target
from gpuhook.vendors.nvidia.names import VARIABLES

_MODULE = "/etc/podman_hpc/modules.d/gpu.yaml"
_DEVICES = next(iter(VARIABLES))
# An --env without a value takes effect only if the caller has set the variable.
_TEXT = f"""# {DROP_IN_HEADER}
#
# podman-hpc run --gpu: gpu-py adds the devices that {_DEVICES} names to the container, all of
# them if the job has no such variable; the job's device cgroup prevents access to others.
name: gpu
cli_arg: gpu
help: Add the GPUs of this host to the container
env: ENABLE_GPU
additional_args:
  - --runtime=RUNTIME
  - --env={_DEVICES}=all
  - --env={_DEVICES}
"""


class PodmanHpc(Engine):
    """podman-hpc, whose podman needs the runtime gpu-py from ``install --engine podman``."""

    name = "podman-hpc"
    has_runtimes = False

    def install(self, ask: Ask) -> Answer:
        """Return the module that replaces the one shipped with podman-hpc."""
        path = ask.config or ask.drop_in or ask.system(_MODULE)
        text = _TEXT.replace("RUNTIME", ask.runtimes[0][1])
        return Answer((Target(self.name, path, "whole", text, path),))

    def bound(self, names: tuple[str, ...], ask: Ask) -> list[str]:
        """Return nothing: the engine podman reports the containers."""
        del names, ask
        return []

    def is_present(self, ask: Ask) -> bool:
        """Tell whether podman-hpc is installed."""
        return bool(shutil.which("podman-hpc")) or os.path.isdir(ask.system("/etc/podman_hpc"))
