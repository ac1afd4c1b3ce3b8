"""A container's loader as dlprobe, ``ldconfig -p`` and ``gpuhook explain`` show it, compared."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.bundles import Bundle
from harness.commands import Result
from harness.driver import resolve_below
from harness.installation import Installation

Operation = dict[str, Any]

CACHE = "etc/ld.so.cache"
END = "=="


@dataclass(frozen=True)
class Gpuhook:
    """gpuhook as a test calls it: installed, with the environment that names its config.toml."""

    installation: Installation
    env: dict[str, str]

    def run(self, bundle: Bundle, *argv: str) -> Result:
        """Run ``argv`` in a container of the bundle; config.json is unchanged afterwards."""
        before = bundle.config.read_bytes()
        bundle.command(*argv)
        done = bundle.run(self.installation.runtime, self.env)
        bundle.config.write_bytes(before)
        return done

    def operations(self, bundle: Bundle) -> list[Operation]:
        """Return the operations that the hook will execute for a container of the bundle."""
        options = ["--bundle", str(bundle.path), "--format", "json"]
        done = bundle.call(self.installation.command, "explain", *options, env=self.env).ok()
        found: list[Operation] = json.loads(done.stdout)["operations"]
        return found


def script(*commands: str) -> tuple[str, str, str]:
    """Return one command that runs several, and separates their outputs for ``parts``."""
    return ("sh", "-c", f"; echo {END}; ".join(commands))


def parts(result: Result) -> list[list[str]]:
    """Return the lines that each of the commands of ``script`` printed."""
    return [text.splitlines() for text in result.stdout.split(f"{END}\n")]


def probed(lines: list[str]) -> dict[str, str]:
    """Return the device and inode that dlprobe found for each name, or the loader's message."""
    found = {}
    for line in lines:
        name, path, rest = line.split(" ", 2)
        assert path.startswith("/") or path == "-", line
        found[name] = rest
    return found


def listed(lines: list[str], root: Path) -> list[tuple[str, str, str]]:
    """Parse ``ldconfig -p``: name, ABI, and the path's target in the root."""
    entries = []
    for line in lines:
        if " => " in line:
            name, rest = line.strip().split(" ", 1)
            abi, path = rest.split(" => ")
            # An ldconfig before glibc 2.36 also notes which kernel a library was built for.
            abi = abi.partition(", OS ABI")[0].strip("()")
            entries.append((name, abi, path_in(root, path)))
    return entries


def path_in(root: Path, path: str) -> str:
    """Return the path of a path's target inside the root, or the path itself without a target."""
    try:
        return f"/{resolve_below(root, path).relative_to(root)}"
    except FileNotFoundError:
        return path


def names_in_cache(operations: list[Operation]) -> list[str]:
    """Return the names that the plan puts into the loader's cache."""
    return [name for op in operations if op["kind"] == "ldcache" for name in op["libraries"]]


def hosts_libraries(operations: list[Operation]) -> dict[str, str]:
    """Return the host's device and inode for each name a library has in the container."""
    found = {}
    for op in operations:
        if op["kind"] == "bind" and ".so." in op["destination"]:
            status = Path(op["source"]).stat()
            found[op["destination"]] = f"{status.st_dev}:{status.st_ino}"
    links = {op["destination"]: op["target"] for op in operations if op["kind"] == "symlink"}
    for _ in range(2):  # a link may lead to a link
        for link, target in links.items():
            path = f"{link.rpartition('/')[0]}/{target}"
            if path in found:
                found[link] = found[path]
    return {path.rpartition("/")[2]: inode for path, inode in found.items()}
