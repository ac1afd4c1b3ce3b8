"""A root folder for gpuhook apply, in a mount namespace of its own."""

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.commands import Result
from harness.namespaces import HOLD, Namespace, held
from harness.sandbox import contents

OWNER = 1000  # a user whose only rights are those to the folder


def killed(call: str, times: int) -> tuple[str, ...]:
    """Return a command prefix that kills a command in its nth call, before the call is done."""
    traced = ("strace", "-f", "-o", "/dev/null", "-e", f"trace={call}")
    return (*traced, "-e", f"inject={call}:signal=KILL:when={times}")


@dataclass(frozen=True)
class Folder:
    """A root folder, and gpuhook in a mount namespace that lasts as long as the test."""

    root: Path
    state: Path
    config: Path
    command: Path
    namespace: Namespace

    def call(self, *words: str | Path, before: tuple[str, ...] = (), verb: str = "apply") -> Result:
        """Run a gpuhook command on the folder."""
        state = () if verb == "explain" else (f"--state-dir={self.state}",)
        return self.namespace.run(
            *before, self.command, verb, f"--rootfs={self.root}", *state, *words,
            env={"GPUHOOK_CONFIG": str(self.config)},
        )  # fmt: skip

    def owner(self, script: str) -> Result:
        """Run a shell script in the folder, as its owner, who has no other rights."""
        user = ("setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups")
        return self.namespace.run(*user, "sh", "-ec", script, cwd=self.root)

    def inside(self, *words: str) -> Result:
        """Run a program with the folder as its root."""
        return self.namespace.run("chroot", self.root, *words)

    def mounts(self) -> list[str]:
        """Return the mount points in the folder, one for each mount."""
        return [point for point in self.everywhere() if point.startswith(f"{self.root}/")]

    def everywhere(self) -> list[str]:
        """Return the mount points in the namespace, one for each mount."""
        table = Path(f"/proc/{self.namespace.pid}/mountinfo").read_text().splitlines()
        return [line.split()[4] for line in table]

    def give_away(self) -> None:
        """Make OWNER the owner of the folder and of everything in it."""
        for path in (self.root, *self.root.rglob("*")):
            os.chown(path, OWNER, OWNER, follow_symlinks=False)


@contextmanager
def made(image: Path, root: Path, state: Path, config: Path, command: Path) -> Iterator[Folder]:
    """Yield a folder with an image's files until the end of the block."""
    shutil.copytree(image, root, symlinks=True)
    with held(["unshare", "--mount", "--propagation=private", "sh", "-c", HOLD]) as namespace:
        yield Folder(root, state, config, command, namespace)
    shutil.rmtree(root)


def snapshot(folder: Folder) -> dict[str, tuple[object, ...]]:
    """Return the folder's state, with checksums of the contents so that a diff is readable."""
    return {
        name: (*status, zlib.crc32(data)) for name, (*status, data) in contents(folder.root).items()
    }
