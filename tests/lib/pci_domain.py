"""Simulated machines whose devices are in one PCI domain, in the kernel's spelling everywhere."""

import os
from pathlib import Path

_USUAL = "0000:"


def move(root: Path, domain: str) -> None:
    """Move all devices in /sys of a driver root to a domain of four digits or more."""
    for folder, folders, files in os.walk(root / "sys", topdown=False):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink():
                target = str(path.readlink()).replace(_USUAL, f"{domain}:")
                path.unlink()
                path.symlink_to(target)
            elif path.is_file() and (text := path.read_text()):
                path.chmod(0o644)
                # KFD's properties have the domain as a decimal number.
                text = text.replace("\ndomain 0\n", f"\ndomain {int(domain, 16)}\n")
                path.write_text(text.replace(_USUAL, f"{domain}:"))
            if _USUAL in name:
                path.rename(path.with_name(name.replace(_USUAL, f"{domain}:")))
