"""A vendor's simulated devices: they are made, configured, and inspected in real containers."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import inside
from harness.bundles import Bundle, Spec
from harness.commands import Result, run
from harness.driver import Driver
from harness.installation import Installation

USER = 1000
MODES = pytest.mark.parametrize("mode", ["hook", "spec"])

# A node as a container sees it: the result of open, its numbers, its mode and its owner.
Seen = tuple[str, str, str, str]

_SEE = """
devopen --see node $(busybox find /dev -type c \\( PATTERNS \\))
for link in $(busybox find /dev -type l \\( PATTERNS \\)); do
    echo "link $link $(busybox readlink $link)"
done
echo "groups $(busybox id -G)"
busybox env
"""


@dataclass(frozen=True)
class Devices:
    """A vendor's simulated driver root, and the gpuhook that uses it.

    ``vendor`` is gpuhook's name for the vendor, ``made`` is the simulator's output.
    """

    installation: Installation
    vendor: str
    root: Path
    made: str

    def node(self, path: str, opened: str = "ENXIO") -> Seen:
        """Return what a container sees of a node that it has unchanged from the host."""
        status = (self.root / path.lstrip("/")).lstat()
        mode, owner = f"{status.st_mode & 0o7777:o}", f"{status.st_uid}:{status.st_gid}"
        return opened, self.numbers(path), mode, owner

    def nodes(self, *paths: str, opened: str = "ENXIO") -> dict[str, Seen]:
        """Return what a container sees of nodes that it has at the same paths as the host."""
        return {path: self.node(path, opened) for path in paths}

    def numbers(self, path: str) -> str:
        """Return a node's numbers as busybox stat prints them."""
        device = (self.root / path.lstrip("/")).lstat().st_rdev
        return f"{device >> 8:x}:{device & 0xFF:x}"

    def configured(self, config: Path, more: str = "", tail: str = "") -> Path:
        """Write the driver root and a debug log to a configuration; return the configuration.

        ``more`` are lines for the section [gpuhook], ``tail`` is text for the end.
        """
        text = config.read_text()
        roots = f'driver-roots = ["{self.vendor}={self.root}"]\n'
        text = text.replace("[gpuhook]\n", f"[gpuhook]\n{roots}{more}")
        cli = "[nvidia-container-cli]\n"
        text = text.replace(cli, f'{cli}debug = "{debug_log(config)}"\n')
        config.write_text(text + tail)
        return config

    def started(self, bundle: Bundle, config: Path) -> Result:
        """Run the bundle's container until it exits."""
        return bundle.run(self.installation.runtime, {"GPUHOOK_CONFIG": str(config)})

    def start(self, bundle: Bundle, config: Path) -> None:
        """Start the bundle's container and leave it running."""
        bundle.command("sleep", "1000")
        bundle.detach(self.installation.runtime, config)

    def refused(self, bundle: Bundle, config: Path) -> str:
        """Return gpu-py's error from a create that fails and leaves config.json unchanged."""
        before = bundle.config.read_bytes()
        words = ("create", "--bundle", bundle.path, bundle.name)
        env = {"GPUHOOK_CONFIG": str(config)}
        done = bundle.call(self.installation.runtime, *words, env=env).failed()
        assert bundle.config.read_bytes() == before
        return done.stderr

    def ask(self, config: Path, *words: str) -> Any:
        """Return the JSON that a gpuhook command prints, whatever its exit status."""
        argv: list[str | Path] = [self.installation.command, *words]
        argv += ["--config", config, "--format", "json"]
        return json.loads(run(argv).stdout)

    def hook(self, bundle: Bundle, config: Path) -> None:
        """Write the hook to config.json, as for engines that don't call gpu-py."""
        bundle.prestart(self.installation.hook, config)


@contextmanager
def devices(
    installation: Installation,
    root: Path,
    vendor: str,
    count: int,
    **settings: object,
) -> Iterator[Devices]:
    """Simulate a machine with the vendor's devices.

    ``settings`` are the simulator's settings, with _ instead of each -. The setting ``config``
    is a file that declares a vendor without code in gpuhook.
    """
    config = settings.pop("config", None)
    words = [f"--set={name.replace('_', '-')}={value}" for name, value in settings.items()]
    argv: list[str | Path] = [installation.command, "simulate", root, f"--vendor={vendor}"]
    argv += [f"--config={config}"] if config else []
    yield Devices(installation, vendor, root, run([*argv, f"--gpus={count}", *words]).ok().stdout)
    run([installation.command, "simulate", "--remove", root]).ok()


def debug_log(config: Path) -> Path:
    """Return the path of the file in ``[nvidia-container-cli] debug``."""
    return config.parent / "debug.log"


def logged(config: Path) -> Any:
    """Return the only entry of the debug log."""
    [entry] = debug_log(config).read_text().splitlines()
    return json.loads(entry)


def in_mode(config: Path, mode: str) -> None:
    """Write the mode to the configuration, whose last section is the runtime's."""
    config.write_text(f'{config.read_text()}mode = "{mode}"\n')


def as_user(spec: Spec) -> None:
    """Run the container's process as a user without privileges."""
    spec["process"]["user"] = {"uid": USER, "gid": USER}


def look(*patterns: str, driver: Driver | None = None) -> tuple[str, ...]:
    """Return the command that looks at devices from inside a container.

    ``patterns`` are path patterns of the nodes and links. With ``driver``, the command looks
    at that driver's GPUs too.
    """
    tests = " -o ".join(f"-path '{pattern}'" for pattern in patterns)
    script = _SEE.replace("PATTERNS", tests)
    if driver is not None:
        script += f"nvidia-smi -L\n{inside.look(driver.minors)[-1]}"
    return ("sh", "-c", script)


def nodes_seen(result: Result) -> dict[str, Seen]:
    """Return the nodes seen by a container that ran successfully, by path."""
    return {path: (a, b, c, d) for path, a, b, c, d in _lines(result, "node")}


def gpus_seen(result: Result, driver: Driver) -> set[int]:
    """Return the indices of the container's GPUs; check that nodes, access and output agree."""
    minors = {int(words[0]) for words in _lines(result, "by-hand") if words[1] == "ENXIO"}
    nodes = {words[0] for words in _lines(result, "gpu-node")}
    found = {gpu.index for gpu in driver.gpus if gpu.minor in minors}
    assert {gpu.index for gpu in driver.gpus if gpu.uuid in result.stdout} == found
    assert {gpu.index for gpu in driver.gpus if f"/dev/nvidia{gpu.minor}" in nodes} == found
    return found


def links_seen(result: Result) -> dict[str, str]:
    """Return the targets of the links that a container saw, by path."""
    return {words[0]: words[1] for words in _lines(result, "link")}


def groups_seen(result: Result) -> set[int]:
    """Return the groups of the container's process."""
    [groups] = _lines(result, "groups")
    return {int(group) for group in groups}


def variables_seen(result: Result, *beginnings: str) -> list[str]:
    """Return the container's variables, as NAME=value, whose names have one of these beginnings."""
    return [line for line in result.ok().stdout.splitlines() if line.startswith(beginnings)]


def _lines(result: Result, kind: str) -> list[list[str]]:
    found = [line.split() for line in result.ok().stdout.splitlines()]
    return [words[1:] for words in found if words[:1] == [kind]]


def make_and_open(found: Devices, paths: Iterable[str]) -> tuple[str, ...]:
    """Return the command that makes each of the host's nodes by mknod and opens it."""
    script = ""
    for number, path in enumerate(paths):
        major, minor = (int(part, 16) for part in found.numbers(path).split(":"))
        made = f"/by-hand-{number}"
        script += f"busybox mknod {made} c {major} {minor} && devopen {made}\n"
    return ("sh", "-c", script)


def opened(result: Result, paths: Sequence[str]) -> dict[str, str]:
    """Return the results of opening the nodes made by mknod, by the paths of the host's nodes."""
    answers = [line.split()[1] for line in result.ok().stdout.splitlines()]
    return dict(zip(paths, answers, strict=True))
