"""OCI bundles to start runc and crun with: a base config.json that each test changes."""

import errno
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ran

from harness.commands import Result, run, wait_until
from harness.installation import Installation
from harness.namespaces import Namespace

CAPABILITIES = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_SETGID",
    "CAP_SETUID",
]
# A cgroup for everything that this session starts. Other sessions may run at the same time.
_CGROUP = "gpuhook-test-"
CGROUP_PARENT = f"/{_CGROUP}{uuid.uuid4().hex[:12]}"
_FORGOTTEN_S = 24 * 3600.0
# The folders in which runc and crun, run by root, have a folder for their containers.
_RUN = ("/run", os.environ.get("XDG_RUNTIME_DIR", "/run"))

Spec = dict[str, Any]


def base_config(root: Path, *command: str) -> Spec:
    """Return the config.json of a container that runs ``command`` on the root ``root``.

    It has the same content as Docker's, including the cgroup rule that denies all devices, and
    nothing about GPUs.
    """
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(command) or ["true"],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {name: list(CAPABILITIES) for name in sets},
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": False},
        "hostname": "container",
        "mounts": _mounts(),
        "linux": {
            "cgroupsPath": "",
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
        },
    }


def _mounts() -> list[Spec]:
    rows = [
        ("/proc", "proc", "proc", "nosuid noexec nodev"),
        ("/dev", "tmpfs", "tmpfs", "nosuid strictatime mode=755 size=65536k"),
        ("/dev/pts", "devpts", "devpts", "nosuid noexec newinstance ptmxmode=0666 mode=0620"),
        ("/dev/shm", "tmpfs", "shm", "nosuid noexec nodev mode=1777 size=65536k"),
        ("/sys", "sysfs", "sysfs", "nosuid noexec nodev ro"),
    ]
    return [
        {"destination": point, "type": kind, "source": source, "options": options.split()}
        for point, kind, source, options in rows
    ]


@dataclass(frozen=True)
class Bundle:
    """A bundle: its folder, its container's id and root filesystem, and its mount namespace.

    ``runtime`` is the low-level runtime.
    """

    path: Path
    name: str
    root: Path
    namespace: Namespace
    runtime: str

    @property
    def config(self) -> Path:
        """The bundle's config.json."""
        return self.path / "config.json"

    def spec(self) -> Spec:
        """Return the current content of config.json."""
        spec: Spec = json.loads(self.config.read_bytes())
        return spec

    def change(self, mutate: Callable[[Spec], None]) -> None:
        """Let ``mutate`` change config.json."""
        spec = self.spec()
        mutate(spec)
        self.config.write_text(json.dumps(spec))

    def environ(self, *settings: str) -> None:
        """Append NAME=value ``settings`` to the container's environment."""
        self.change(lambda spec: spec["process"]["env"].extend(settings))

    def command(self, *argv: str) -> None:
        """Set the container's command to ``argv``."""
        self.change(lambda spec: spec["process"].update(args=list(argv)))

    def prestart(self, program: Path, config: Path, stage: str = "prestart") -> None:
        """Make ``program`` the only hook in config.json, as for engines that don't call gpu-py."""
        args = [program.name, "--config", str(config), "prestart"]
        hook = {"path": str(program), "args": args, "env": ["PATH=/usr/bin:/bin"]}
        self.change(lambda spec: spec.update(hooks={stage: [hook]}))

    def call(
        self, *argv: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> Result:
        """Run ``argv`` in the bundle's namespace, with the bundle as working directory."""
        return self.namespace.run(*argv, env=env, cwd=cwd or self.path)

    def run(self, runtime: str | Path, env: dict[str, str] | None = None) -> Result:
        """Run the container from create to delete with ``runtime``."""
        return self.call(runtime, "run", "--bundle", self.path, self.name, env=env)

    def detach(self, runtime: str | Path, config: Path, name: str = "") -> None:
        """Start the container, by another name if one is given, and leave it running."""
        quiet = ("sh", "-c", 'exec "$@" </dev/null >/dev/null 2>&1', "sh")
        words = (runtime, "run", "--detach", "--bundle", self.path, name or self.name)
        self.call(*quiet, *words, env={"GPUHOOK_CONFIG": str(config)}).ok()

    def live(
        self,
        create: Sequence[str | Path],
        runtime: Sequence[str | Path],
        name: str,
        env: dict[str, str] | None = None,
    ) -> Result:
        """Create, start and delete a container, as engines do.

        ``create`` is the whole command line that creates the container ``name``. ``runtime``
        is the command line of the other verbs, up to the verb. The result has the exit status
        of create, and the container's output or the error message of create.
        """
        output = self.path / "output"
        argv = self.namespace.enter(*create, cwd=self.path)
        status = _run_into(output, argv, self.path, env)
        try:
            if status == 0:
                self.call(*runtime, "start", name, env=env).ok()
                wait_until(lambda: self._stopped(runtime, name, env), f"{name} stopped")
        finally:
            self.call(*runtime, "delete", "--force", name, env=env)
        return Result(tuple(argv), status, output.read_text(), "")

    def _stopped(
        self, runtime: Sequence[str | Path], name: str, env: dict[str, str] | None
    ) -> bool:
        state = json.loads(self.call(*runtime, "state", name, env=env).ok().stdout)
        return bool(state["status"] == "stopped")


@dataclass(frozen=True)
class GpuBundle(Bundle):
    """A bundle whose container is started with the gpu-py and the configuration named here."""

    installation: Installation
    settings: Path

    @property
    def gpu_py(self) -> Path:
        """The OCI runtime."""
        return self.installation.runtime

    @property
    def env(self) -> dict[str, str]:
        """The environment in which gpu-py finds its configuration and the low-level runtime."""
        return {"GPUHOOK_CONFIG": str(self.settings)}

    def by_hook(self, config: Path | None = None, stage: str = "prestart") -> None:
        """Make our hook the only one in config.json, as ``prestart`` does."""
        self.prestart(self.installation.hook, config or self.settings, stage)

    def start(self, config: Path | None = None) -> Result:
        """Run the container from create to delete, with another configuration if one is given."""
        return self.run(self.gpu_py, {"GPUHOOK_CONFIG": str(config or self.settings)})


def _run_into(output: Path, argv: list[str], cwd: Path, env: dict[str, str] | None) -> int:
    """Run ``argv`` with a file as its output; return the exit status.

    A pipe wouldn't do, because a created container keeps it open.
    """
    ran.note(argv, env)
    with output.open("wb") as file:
        return subprocess.run(
            argv,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        ).returncode


@contextmanager
def bundle(parent: Path, lower: Path, namespace: Namespace, runtime: str) -> Iterator[Bundle]:
    """Make a bundle whose root is a fresh overlay on ``lower``; delete all of it at the end.

    ``runtime`` is the low-level runtime that deletes the container if it still exists.
    """
    name = f"gpuhook-{uuid.uuid4().hex[:12]}"
    path = parent / name
    root = path / "rootfs"
    for folder in (root, path / "upper", path / "work"):
        folder.mkdir(parents=True)
    layers = f"lowerdir={lower},upperdir={path / 'upper'},workdir={path / 'work'}"
    namespace.run("mount", "-t", "overlay", "-o", layers, "overlay", root).ok()
    made = Bundle(path, name, root, namespace, runtime)
    spec = base_config(root)
    spec["linux"]["cgroupsPath"] = f"{CGROUP_PARENT}/{name}"
    made.config.write_text(json.dumps(spec))
    try:
        yield made
    finally:
        seen = f"/proc/{namespace.pid or 'self'}/root"
        if any(Path(f"{seen}{folder}/{runtime}/{name}").exists() for folder in _RUN):
            namespace.run(runtime, "delete", "--force", name)
        # Processes that are killed with the container may take a moment to exit.
        wait_until(lambda: namespace.run("umount", root).status == 0, f"{root} isn't used")
        run(["rm", "-rf", "--one-file-system", path]).ok()


def remove_cgroups() -> None:
    """Remove this session's cgroups from every hierarchy, and kill the processes in them."""
    # glob would fail if another session removed its own cgroups meanwhile.
    every = [Path(path) for path, _, _ in os.walk("/sys/fs/cgroup")]
    for folder in (path for path in every if path.name == CGROUP_PARENT.strip("/")):
        below = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
        for each in [*below, folder]:
            with suppress(FileNotFoundError, ProcessLookupError):  # conmon removes its own cgroup
                for pid in (each / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            wait_until(partial(_remove_cgroup, each), f"{each} could be removed")


def remove_forgotten_cgroups() -> None:
    """Remove the cgroups of test runs that were killed over a day ago, if nothing runs in them."""
    for folder in Path("/sys/fs/cgroup").glob(f"*/{_CGROUP}*"):
        if time.time() - folder.stat().st_mtime > _FORGOTTEN_S:
            below = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
            for each in [*below, folder]:
                with suppress(OSError):
                    each.rmdir()


def _remove_cgroup(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True
