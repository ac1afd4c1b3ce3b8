"""A launcher installed in a folder, with a Python and a low-level runtime that only tell."""

import os
import subprocess
import time
from pathlib import Path

from gpuhook.standby import launcher_files

LAUNCHER = Path(__file__).parents[2] / "launchers/gpu-py"
FUNCTIONS = LAUNCHER.read_text().partition("\ngp_self=$0")[0]
PYTHON = """\
#!/bin/sh
shift 5
echo python "$1" >{log}
"""


class Installed:
    """A launcher in a virtual environment whose Python and low-level runtime only tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved = folder / "run/gpuhook/launcher"
        self.config = folder / "etc/config.toml"
        self.log = folder / "log"
        self.bin = folder / "venv/bin"
        self.path = folder / "path"
        self.bundle = folder / "bundle"
        for made in (self.bin, self.path, self.bundle, self.config.parent):
            made.mkdir(parents=True)
        (folder / "venv/pyvenv.cfg").touch()
        package = folder / "venv/lib/python3.11/site-packages/gpuhook"
        package.mkdir(parents=True)
        (package / "_start.py").touch()
        script = LAUNCHER.read_text().replace("/run/gpuhook/launcher", str(self.saved))
        self.program(self.bin / "gpu-py", script)
        self.program(self.bin / "python3", PYTHON.format(log=self.log))
        self.program(self.bin / "gpuhook-prestart", "#!/bin/sh\n")
        self.runtime("runc")

    def program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)
        os.utime(path, (time.time() - 10,) * 2)

    def runtime(self, name: str) -> None:
        lines = f'echo {name} "$@" >{self.log}', f"cat /proc/$$/environ >{self.log}.env"
        self.program(self.path / name, "\n".join(("#!/bin/sh", *lines, "")))

    def configure(self, text: str = "") -> None:
        """Write the configuration, a while ago, and what Python saves of it."""
        self.config.write_text(text)
        past = time.time() - 10
        os.utime(self.config, (past, past))
        os.utime(self.config.parent, (past, past))
        launcher_files.save(str(self.config))

    def run(self, *argv: str, env: dict[str, str] | None = None) -> str:
        environ = {"PATH": f"{self.path}:/usr/bin:/bin", "GPUHOOK_CONFIG": str(self.config)}
        self.log.unlink(missing_ok=True)
        subprocess.run([self.bin / "gpu-py", *argv], env=environ | (env or {}), check=True)
        return self.log.read_text().strip()

    def create(self, text: str) -> str:
        (self.bundle / "config.json").write_text(text)
        return self.run("create", "--bundle", str(self.bundle), "ID").split()[0]
