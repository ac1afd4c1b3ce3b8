"""A podman with its own storage, which reaches gpuhook as a runtime or as a hook."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.bundles import CGROUP_PARENT
from harness.commands import Result, run
from harness.engines import settings
from harness.namespaces import Namespace


@dataclass(frozen=True)
class Podman:
    """podman with its storage in ``folder``.

    If ``runtime`` or ``hooks`` (a hooks-dir) is None, podman uses its own default.

    podman sets the runtime's environment itself, so GPUHOOK_CONFIG doesn't reach the runtime.
    """

    folder: Path
    namespace: Namespace
    runtime: Path | None
    hooks: Path | None

    @property
    def pid(self) -> int | None:
        """The process that holds podman's mount namespace; podman has no daemon."""
        return self.namespace.pid

    @property
    def shows_errors_of_hooks(self) -> bool:
        """Return whether the user sees the messages of a failed hook, which crun drops."""
        return self.runtime is None or self.runtime.name != "crun"

    def call(self, *words: str | Path, env: dict[str, str] | None = None) -> Result:
        """Run podman on this storage."""
        argv = [
            "podman",
            f"--root={self.folder}/root",
            f"--runroot={self.folder}/run",
            f"--tmpdir={self.folder}/tmp",
            "--cgroup-manager=cgroupfs",
            "--events-backend=file",
            *([f"--runtime={self.runtime}"] if self.runtime else []),
            *([f"--hooks-dir={self.hooks}"] if self.hooks else []),
        ]
        return self.namespace.run(*argv, *words, env=env)

    def run(
        self,
        image: str,
        *command: str,
        env: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> Result:
        """Run ``command`` in a container of ``image`` that is deleted afterwards.

        The limits are set because podman's defaults may be above the limits of this process.
        The capability is added because Docker and containerd give it by default and podman
        doesn't.
        """
        words = [
            "--network=none",
            "--ulimit=nofile=1024:1024",
            "--ulimit=nproc=1024:1024",
            "--pids-limit=0",
            "--cap-add=MKNOD",
        ]
        words += [f"--cgroup-parent={CGROUP_PARENT}", *settings("-e", env), *options]
        return self.call("run", "--rm", *words, image, *command)


def cdi_folder() -> Path:
    """Return the folder of CDI specs on this host.

    podman 5.4 to 5.6 reads only /etc/cdi.
    """
    major, minor = run(["podman", "--version"]).ok().stdout.split()[-1].split(".")[:2]
    return Path("/etc/cdi" if (5, 4) <= (int(major), int(minor)) <= (5, 6) else "/var/run/cdi")


@contextmanager
def podman(
    folder: Path,
    namespace: Namespace,
    runtime: Path,
    images: Path,
    *,
    hooks: Path | None = None,
) -> Iterator[Podman]:
    """Load ``images``, an archive as docker save writes, into storage below ``folder``."""
    folder.mkdir()
    client = Podman(folder, namespace, runtime, hooks)
    client.call("load", "--input", images).ok()
    try:
        yield client
    finally:
        client.call("rm", "--all", "--force", "--time=0")
        client.call("system", "reset", "--force")


def hooks_dir(folder: Path, hook: Path, *args: str, stage: str = "prestart") -> Path:
    """Write a hooks-dir whose one file makes every container call ``hook`` with ``args``."""
    folder.mkdir()
    described = {
        "version": "1.0.0",
        "hook": {"path": str(hook), "args": [hook.name, *args]},
        "when": {"always": True},
        "stages": [stage],
    }
    (folder / "gpuhook.json").write_text(json.dumps(described))
    return folder
