"""Files shipped with the programs: manual pages, completion, units, scripts, a policy module.

The Debian packages install all of them, each those of its commands. ``gpuhook files`` prints those
that an administrator can place in a folder of the local system. Sources of the folders: manpath(5),
the README of bash-completion, zshmisc(1) and Debian's zsh, "Where to put completions" of fish,
systemd.unit(5), udev(7).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from gpuhook.tools import extensions
from gpuhook.tools.cdi import units as cdi_units
from gpuhook.tools.cli import _manual as manual
from gpuhook.tools.cli import cli
from gpuhook.tools.cli.completion import script

UNIT = "unit"
SLURM = "script for Slurm"
SELINUX = "policy module"
# The units that the package enables; the administrator enables others.
ENABLED = ("gpuhook-watch.service", *cdi_units.ENABLED)
_COMPLETIONS = {"bash": "gpuhook", "zsh": "_gpuhook", "fish": "gpuhook.fish"}


def _manuals(share: str) -> dict[str, str]:
    return {f"man{section}": f"{share}/man/man{section}" for section in (1, 5, 8)}


# Kind of file -> its folder. ``install --cdi`` places the last two kinds elsewhere.
OF_PACKAGE: Mapping[str, str] = {
    **_manuals("/usr/share"),
    "bash": "/usr/share/bash-completion/completions",
    "zsh": "/usr/share/zsh/vendor-completions",
    "fish": "/usr/share/fish/vendor_completions.d",
    UNIT: "/usr/lib/systemd/system",
    SLURM: "/usr/libexec/gpuhook/slurm",
    SELINUX: "/usr/share/selinux/packages",
    "unit for CDI": "/usr/lib/systemd/system",
    "rule for CDI": "/usr/lib/udev/rules.d",
}
OF_ADMINISTRATOR: Mapping[str, str] = {
    **_manuals("/usr/local/share"),
    "bash": "/usr/local/share/bash-completion/completions",
    "zsh": "/usr/local/share/zsh/site-functions",
    "fish": "/etc/fish/completions",
    UNIT: "/etc/systemd/system",
    SLURM: "/usr/local/libexec/gpuhook/slurm",
    SELINUX: "/usr/local/share/selinux/packages",
}


@dataclass(frozen=True)
class File:
    """A shipped file; ``kind`` is a key of the folders above, ``package`` a system package."""

    kind: str
    name: str
    text: str
    package: str = extensions.MAIN

    @property
    def mode(self) -> int:
        """The file's mode: scripts for Slurm are executable."""
        return 0o755 if self.kind == SLURM else 0o644

    def path(self, folders: Mapping[str, str]) -> str | None:
        """Return the file's destination, None if its kind has no folder."""
        folder = folders.get(self.kind)
        return folder and f"{folder}/{self.name}"


def files(command: str) -> Iterator[File]:
    """Yield all files of the installed packages; units run the gpuhook at ``command``."""
    for name, text in _texts("tools/cli/man"):
        yield File(f"man{name[-1]}", name, text)
    for name, text in manual.pages().items():
        of_command = name.removeprefix("gpuhook-").removesuffix(".1")
        yield File(f"man{name[-1]}", name, text, extensions.package_of(of_command))
    for shell, name in _COMPLETIONS.items():
        yield File(shell, name, script(shell, cli))
    for folder, package in extensions.folders().items():
        for name, text in _texts(f"{folder}/units"):
            yield File(UNIT, name, cdi_units.for_command(text, command), package)
        for name, text in _texts(f"{folder}/slurm_scripts"):
            yield File(SLURM, name, text, package)
    for name, text in _texts("tools/cli/selinux"):
        yield File(SELINUX, name, text)
    for name in cdi_units.FILES:
        kind = "rule for CDI" if name.endswith(".rules") else "unit for CDI"
        yield File(kind, name, cdi_units.for_command(cdi_units.shipped(name), command))


def _texts(folder: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of the files in a folder of gpuhook's, which may be missing."""
    found = resources.files("gpuhook") / folder
    entries = found.iterdir() if found.is_dir() else ()
    for entry in sorted(entries, key=lambda each: each.name):
        yield entry.name, entry.read_text("utf-8")
