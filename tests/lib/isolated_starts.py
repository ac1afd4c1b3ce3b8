"""Results of a start for a request, and its imports, in an isolated interpreter."""

import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
START = """
import sys
sys.path.append(sys.argv[1])
{before}
from gpuhook.base.config.model import Config
from gpuhook.base.errors import GpuhookError
from gpuhook.core.resolve import resolve
from gpuhook.vendors.registry import all_vendors
config = Config()
config.state_dir, root, *env = sys.argv[2:]
config.driver_root = "/nonexistent"
config.driver_roots = (root,)
spec = {{"process": {{"env": env}}, "linux": {{"namespaces": [{{"type": "mount"}}]}}}}
try:
    found = resolve(spec, config, all_vendors(config), save=False)
    print(*(found.ids if found else ()))
except GpuhookError as error:
    print("refused:", error)
print(*sys.modules)
"""


def started(state: str, root: str, *env: str, before: str = "") -> tuple[str, set[str]]:
    """Return the answer to an environment, and the modules that are loaded by then.

    ``root`` is an entry of driver-roots, and ``before`` is code that runs before the request.
    """
    words = [sys.executable, "-I", "-S", "-c", START.format(before=before), str(SOURCES)]
    argv = [*words, state, root, *env]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    answer, modules = done.stdout.splitlines()
    return answer, set(modules.split())
