"""The packages, and copies of this Debian to install them into.

A copy is an overlay. Its upper layer has the installed files and the files that are left
behind. The package is installed once. Tests that begin with it installed have another layer
above this one.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuhook import __version__
from gpuhook.tools.extensions import PACKAGES
from harness.commands import Result, run
from harness.images import REPOSITORY

# Folders in which dpkg itself and its triggers write.
OF_DPKG = ("var/lib/dpkg", "var/log", "var/cache", "var/lib/systemd")
MAINTAINER, ADDRESS = "Ada Lovelace", "ada@engine.example.org"
# Makes two builds identical, whoever builds.
BUILT_BY = {"SOURCE_DATE_EPOCH": "1700000000", "DEBFULLNAME": MAINTAINER, "DEBEMAIL": ADDRESS}
# The packages in an order in which they can be purged. The last one has the programs.
ADDITIONS = (*PACKAGES.values(), "gpuhook-simulate")
EVERY = (*ADDITIONS, "gpuhook")
# A unit that the package gpuhook had before there were additions -> the addition that has it now.
UNITS = {
    "gpuhook-device-plugin.service": "gpuhook-kubernetes",
    "gpuhook-metrics.service": "gpuhook-metrics",
    "gpuhook-nri.service": "gpuhook-kubernetes",
}
INIT = "/usr/lib/gpuhook/gpuhook/__init__.py"


@dataclass(frozen=True)
class Debian:
    """A Debian system that tests may change."""

    root: Path
    upper: Path

    def call(self, *argv: str, fails: bool = False) -> Result:
        """Run a command in this system, with an environment as after login."""
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        words = ["env", "-i", *(f"{name}={value}" for name, value in env.items())]
        done = run(["chroot", self.root, *words, *argv])
        return done.failed() if fails else done.ok()

    def changed(self) -> set[str]:
        """Return the files that differ from the Debian that was copied."""
        found = set()
        for folder, _, names in os.walk(self.upper):
            for name in names:
                path = str(Path(folder, name).relative_to(self.upper))
                if not path.startswith(OF_DPKG):
                    found.add(path)
        return found


def released() -> tuple[str, Path]:
    """Return the output of scripts/release for these sources, and the folder of its results.

    It takes half a minute, so it runs again only after a file has changed.
    """
    work = REPOSITORY / ".work"
    work.mkdir(exist_ok=True)
    said = work / "release.said"
    with (work / "release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may do the same
        key, _, text = said.read_text().partition("\n") if said.exists() else ("", "", "")
        if key != _digest():
            command = REPOSITORY / "scripts/release"
            text = (
                run([command, "--dry-run", "--without-image"], env=BUILT_BY, timeout=600.0)
                .ok()
                .stdout
            )
            said.write_text(f"{_digest()}\n{text}")
    [line] = [line for line in text.splitlines() if line.startswith("== in ")]
    return text, Path(line.removeprefix("== in ").removesuffix(":"))


def debs() -> dict[str, Path]:
    """Return the Debian packages that scripts/release built, by their names."""
    folder = released()[1]
    architecture = run(["dpkg", "--print-architecture"]).ok().stdout.strip()
    return {
        name: folder / f"{name}_{__version__}_{architecture if name == 'gpuhook' else 'all'}.deb"
        for name in EVERY
    }


def as_one(packages: Iterable[Path], folder: Path) -> Path:
    """Build an older Debian package with the files of gpuhook and its additions; return it.

    Its maintainer scripts handle the additions' units, as those of the former single package
    did.
    """
    tree, old = folder / "tree", folder / "gpuhook_0.1.0.deb"
    folder.mkdir(parents=True)
    by_name = {path.name.partition("_")[0]: path for path in packages}
    run(["dpkg-deb", "--raw-extract", by_name["gpuhook"], tree]).ok()
    for name in PACKAGES.values():
        run(["dpkg-deb", "--extract", by_name[name], tree]).ok()
        run(["rm", "-r", tree / "usr/share/doc" / name]).ok()
        (tree / f"usr/share/python3/runtime.d/{name}.rtupdate").unlink()
    control = tree / "DEBIAN/control"
    control.write_text(re.sub("(?m)^Version: .*", "Version: 0.1.0", control.read_text()))
    script = tree / "DEBIAN/postinst"
    text, count = re.subn("(?m)^check_moved .*\n", "", script.read_text())
    text, updates = re.subn("(update-state|restart) (.*)(gpuhook-mps.service)",
                            rf"\1 \2\3 {' '.join(UNITS)}", text)  # fmt: skip
    assert (count, updates) == (len(UNITS), 2)
    script.write_text(text)
    run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, old]).ok()
    return old


def _digest() -> str:
    """Return a digest of all files that git doesn't ignore."""
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
                 cwd=REPOSITORY).ok()  # fmt: skip
    digest = hashlib.sha256()
    for name in sorted(set(listed.stdout.split("\0")) - {""}):
        path = REPOSITORY / name
        text = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


@contextmanager
def layer(folder: Path, *below: Path) -> Iterator[Debian]:
    """Yield a Debian whose changes go to the new ``folder``.

    ``below`` has the layers below it, topmost first.
    """
    parts = {name: folder / name for name in ("upper", "work", "root")}
    for part in parts.values():
        part.mkdir(parents=True)
    lower = ":".join(map(str, [*below, "/"]))
    layers = f"lowerdir={lower},upperdir={parts['upper']},workdir={parts['work']}"
    run(["mount", "-t", "overlay", "-o", layers, "overlay", parts["root"]]).ok()
    run(["mount", "-t", "proc", "proc", parts["root"] / "proc"]).ok()
    run(["mount", "--bind", "/dev", parts["root"] / "dev"]).ok()
    run(["mount", "-t", "tmpfs", "tmpfs", parts["root"] / "run"]).ok()
    try:
        yield Debian(parts["root"], parts["upper"])
    finally:
        for path in ("run", "dev", "proc", ""):
            run(["umount", parts["root"] / path]).ok()


def without_gpuhook(folder: Path, files: Mapping[str, Path]) -> Path:
    """Make a layer without this host's gpuhook and with ``files`` in the root; return it."""
    with layer(folder) as made:
        (made.root / "var/lib/dpkg/info/gpuhook.prerm").unlink(missing_ok=True)
        made.call("dpkg", "--purge", *EVERY)
        # Without prerm, the files that Python compiled stay.
        left = ("usr/lib/gpuhook", "etc/gpuhook", "etc/docker/daemon.json", "var/lib/gpuhook")
        for path in left:
            run(["rm", "-rf", made.root / path]).ok()
        # Without this file, dpkg doesn't make man-db read all of the host's manual pages each time.
        (made.root / "var/lib/man-db/auto-update").unlink(missing_ok=True)
        for name, built in files.items():
            run(["cp", built, made.root / name]).ok()
    return made.upper


def leave_stale_module(system: Debian) -> None:
    """Compile an older version of a module, with the time and size of the current source."""
    source = system.root / "usr/lib/gpuhook/gpuhook/__init__.py"
    now, status = source.read_bytes(), source.stat()
    older = now.replace(__version__.encode(), b"0" * len(__version__))
    source.write_bytes(older)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    system.call(
        "/usr/bin/python3", "-c", "import py_compile; py_compile.compile(" + repr(INIT) + ")"
    )
    source.write_bytes(now)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert f"version {'0' * len(__version__)}" in system.call("gpuhook", "--version").stdout
