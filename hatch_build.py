"""Build hook of the wheel: compile the launcher, and install it under each of its names."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging import tags

# uname -m of the machine that a wheel is for, where that isn't a wheel for this system only.
MACHINE = "GPUHOOK_MACHINE"
# The launcher is static then: every Linux of that machine runs it, whatever its C library is.
ANY_LINUX = "manylinux_2_17_{0}.manylinux2014_{0}.musllinux_1_1_{0}"


class LauncherBuildHook(BuildHookInterface[Any]):
    """Adds the launcher to a wheel, or says what is missing to compile it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it."""
        del version
        sys.path.insert(0, str(Path(self.root) / "launchers"))
        import build_launcher  # noqa: PLC0415 - it lies there

        del sys.path[0]
        machine = os.environ.get(MACHINE) or None
        self._folder = Path(tempfile.mkdtemp())
        program = self._folder / build_launcher.NAMES[0]
        try:
            build_launcher.build(program, machine)
        except build_launcher.NoCompilerError as error:
            shutil.rmtree(self._folder)
            self.app.abort(f"gpuhook: {error}")
        for name in build_launcher.NAMES[1:]:
            shutil.copy(program, self._folder / name)
        here = next(tag for tag in tags.platform_tags() if tag.startswith("linux_"))
        build_data["tag"] = f"py3-none-{ANY_LINUX.format(machine) if machine else here}"
        build_data["shared_scripts"] = {
            str(self._folder / each): each for each in build_launcher.NAMES
        }

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        del version, build_data, artifact_path
        shutil.rmtree(self._folder)
