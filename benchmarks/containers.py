"""Lead containers through their whole life with any OCI runtime, and measure how long it takes."""

import itertools
import json
import os
import select
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groups import Group

_CAPABILITIES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_MKNOD", "CAP_SETGID"]
_MOUNTS = (
    ("/proc", "proc", "nosuid noexec nodev"),
    ("/dev", "tmpfs", "nosuid strictatime mode=755 size=65536k"),
    ("/dev/pts", "devpts", "nosuid noexec newinstance ptmxmode=0666 mode=0620"),
    ("/dev/shm", "tmpfs", "nosuid noexec nodev mode=1777 size=65536k"),
    ("/sys", "sysfs", "nosuid noexec nodev ro"),
)
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Container:
    """What one kind of container asks for, how it is started, and the group that counts it.

    ``document`` is the file of a CDI document whose device ``all`` is in config.json before any
    runtime is called: the engine has applied it, its hook only with ``hooks``. ``before`` is
    another kind, of which one container is started first: it leaves a prefork server.
    """

    group: Group
    runtime: str
    environ: tuple[str, ...] = ()
    config: str = ""
    hook: str = ""
    document: str = ""
    hooks: bool = True
    before: "Container | None" = None


@dataclass(frozen=True)
class Life:
    """Seconds that the parts of one container's life took."""

    create: float
    start: float
    delete: float

    @property
    def whole(self) -> float:
        """From before create to after delete, with the program's own run in it."""
        return self.create + self.start + self.delete


class Bundle:
    """A bundle on an overlay of its own, used for one container."""

    def __init__(self, container: Container, parent: Path, lower: Path) -> None:
        self.container = container
        self.name = f"benchmark-{uuid.uuid4().hex[:12]}"
        self.folder = parent / self.name
        self.lower = lower
        self.root = self.folder / "rootfs"

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Have the root filesystem and config.json as an engine would make them.

        Afterwards its files stay, because ext4 is slow where many were deleted lately.
        """
        for name in ("rootfs", "upper", "work"):
            (self.folder / name).mkdir(parents=True)
        layers = f"lowerdir={self.lower},upperdir={self.folder}/upper,workdir={self.folder}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "none", self.root], check=True)
        try:
            text = json.dumps(self._spec(), separators=(",", ":"))  # compact, as Go writes it
            (self.folder / "config.json").write_text(text)
            yield
        finally:
            subprocess.run(["umount", self.root], check=True)

    def live(self) -> Life:
        """Start a container that ends at once, from create to delete; RuntimeError if it fails."""
        config = self.container.config
        environ = {**os.environ, **({"GPUHOOK_CONFIG": config} if config else {})}
        pid_file = self.folder / "pid"
        create = ("create", "--bundle", str(self.folder), "--pid-file", str(pid_file), self.name)
        try:
            moments = [time.perf_counter()]
            self._call(create, environ)
            moments.append(time.perf_counter())
            process = os.pidfd_open(int(pid_file.read_text()))
            self._call(("start", self.name), environ)
            select.select([process], [], [])
            os.close(process)
            moments.append(time.perf_counter())
            self._call(("delete", self.name), environ)
            moments.append(time.perf_counter())
        except BaseException:
            subprocess.run(["runc", "delete", "--force", self.name], check=False)
            raise
        return Life(*(after - before for before, after in itertools.pairwise(moments)))

    def _call(self, words: Sequence[str], environ: dict[str, str]) -> None:
        runtime = self.container.runtime
        with (self.folder / "output").open("w+") as output:
            done = subprocess.run(
                [runtime, *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            )
            if done.returncode != 0:
                output.seek(0)
                raise RuntimeError(f"{runtime} {words[0]} failed: {output.read().strip()}")

    def _spec(self) -> dict[str, Any]:
        sets = ("bounding", "effective", "permitted")
        spec: dict[str, Any] = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["true"],
                "env": [_PATH, *self.container.environ],
                "cwd": "/",
                "capabilities": {name: list(_CAPABILITIES) for name in sets},
                "noNewPrivileges": True,
            },
            "root": {"path": str(self.root), "readonly": False},
            "hostname": "container",
            "mounts": [
                {"destination": point, "type": kind, "source": kind, "options": options.split()}
                for point, kind, options in _MOUNTS
            ],
            "linux": {
                "cgroupsPath": f"{self.container.group.containers}/{self.name}",
                "resources": {"devices": [{"allow": False, "access": "rwm"}]},
                "namespaces": [
                    {"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")
                ],
                "maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware"],
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
            },
        }
        if self.container.hook:
            spec["hooks"] = {"prestart": [{"path": self.container.hook}]}
        if self.container.document:
            _apply(json.loads(Path(self.container.document).read_text()), spec)
            if not self.container.hooks:
                del spec["hooks"]
        return spec


def _apply(document: dict[str, Any], spec: dict[str, Any]) -> None:
    """Give a container the device ``all`` of a document of ours, as engines do it."""
    [every] = [each for each in document["devices"] if each["name"] == "all"]
    for edits in (every["containerEdits"], document["containerEdits"]):
        spec["process"]["env"] += edits.get("env", [])
        for mount in edits.get("mounts", []):
            places = {"source": mount["hostPath"], "destination": mount["containerPath"]}
            spec["mounts"].append({**places, "options": mount["options"]})
        for node in edits.get("deviceNodes", []):
            status = os.stat(node.get("hostPath", node["path"]))
            numbers = {"major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
            device = {"path": node["path"], "type": "c", "fileMode": 0o666, **numbers}
            rule = {"allow": True, "type": "c", "access": "rwm", **numbers}
            spec["linux"].setdefault("devices", []).append(device)
            spec["linux"]["resources"]["devices"].append(rule)
        for hook in edits.get("hooks", []):
            program = {name: hook[name] for name in ("path", "args", "env")}
            spec.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(program)


def live(container: Container, parent: Path, lower: Path, rest: float) -> Life:
    """Make a bundle in a folder, rest for so many seconds, and lead its container through life."""
    bundle = Bundle(container, parent, lower)
    with bundle.prepared(), container.group.entered():
        time.sleep(rest)
        return bundle.live()
