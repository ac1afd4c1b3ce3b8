"""A machine to measure on: a mount namespace of our own, simulated drivers, a root filesystem."""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]
_DISK_SIZE = 8 << 30  # bytes, of which hardly any are ever written
_DRIVER = "615.10.01"  # a driver with memory limits
_CLONE_NEWNS = 0x00020000  # include/uapi/linux/sched.h


class Machine:
    """Where everything lies: the installed gpuhook, the root filesystem, the drivers."""

    def __init__(self, folder: Path, runtime: str) -> None:
        self.folder = folder
        self.runtime = runtime
        self.bin = Path(runtime).parent
        self.lower = folder / "root"
        self.bundles = folder / "bundles"
        beside = self.bin / "python3"
        self.python = str(beside) if beside.exists() else "/usr/bin/python3"

    def build(self) -> None:
        """Build the root filesystem that all containers share."""
        run(str(_REPOSITORY / "scripts/lib/rootfs"), "debian", str(self.lower))

    def driver(self, init_seconds: float) -> str:
        """Build a simulated driver with 8 GPUs whose NVML takes so long to start."""
        root = self.folder / f"driver-{init_seconds:g}"
        if not root.exists():
            command = [str(self.bin / "gpuhook"), "simulate", str(root), "--gpus=8"]
            command += [f"--set=driver-version={_DRIVER}"]
            run(*command, f"--init-seconds={init_seconds:g}")
        return str(root)

    def config(self, name: str, init_seconds: float, mode: str, settings: str) -> str:
        """Write a config.toml into a folder of that name, older than all that is saved about it.

        The settings are lines of section [gpuhook]. Containers with different files share no
        saved inventory and no prefork server.
        """
        path = self.folder / "configs" / name / "config.toml"
        path.parent.mkdir(parents=True)
        path.write_text(
            f'[nvidia-container-cli]\nroot = "{self.driver(init_seconds)}"\n'
            f'load-kmods = false\n[nvidia-container-runtime]\nmode = "{mode}"\n'
            f'[gpuhook]\nstate-dir = "{path.parent}/state"\n{settings}'
        )
        for each in (path, path.parent):
            os.utime(each, (10**9, 10**9))
        return str(path)

    def document(self, config: str, runtime: str) -> str:
        """Write the CDI document of a configuration's driver, as old as that; return its file."""
        folder = Path(config).parent / "cdi"
        folder.mkdir()
        file = folder / "nvidia.json"
        command = [str(Path(runtime).parent / "gpuhook"), "cdi", "generate", "--config", config]
        run(*command, "--output", str(file))
        os.utime(file, (10**9, 10**9))
        return str(file)

    def use_documents(self, config: str, document: str) -> None:
        """Have the runtime read the folder of a document, and no other."""
        path = Path(config)
        text = f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{Path(document).parent}"]\n'
        path.write_text(path.read_text() + text)
        os.utime(path, (10**9, 10**9))

    def forget(self, config: str) -> None:
        """Delete the saved inventory."""
        for file in (Path(config).parent / "state").glob("inventory-*"):
            file.unlink()


def installed() -> str:
    """Install this tree with pip into an environment of its own; return its gpu-py."""
    return run(str(_REPOSITORY / "scripts/lib/installed")) + "/bin/gpu-py"


def isolate() -> None:
    """Move into a mount namespace with a /run of its own: nothing of this machine is touched."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS) failed; run this as root")
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")


@contextmanager
def new_disk() -> Iterator[Path]:
    """Give a folder on a new ext4 of its own, in a file that goes away with it.

    Before ext4 makes a file, it looks at each one that was deleted in the last minutes, so
    on the machine's own disk a measurement would tell what was done before it.
    """
    with tempfile.TemporaryDirectory(prefix="gpuhook-benchmark-", dir="/var/tmp") as name:
        folder, image = Path(name) / "disk", Path(name) / "image"
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(_DISK_SIZE)
        try:
            run("mkfs.ext4", "-q", str(image))
            run("mount", "-o", "loop,noinit_itable", str(image), str(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"No disk of its own, deleted files will tell: {error}", file=sys.stderr)
            yield folder
            return
        try:
            yield folder
        finally:
            run("umount", "--lazy", str(folder))


def run(*words: str) -> str:
    """Run a program that must succeed; return what it printed, without the last newline."""
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout.strip()
