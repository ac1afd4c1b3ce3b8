"""Archive of the images that the tests on a booted machine load, with their probes.

usage: carried_images.py ARCHIVE
"""

import sys
import tempfile
from pathlib import Path

from harness import images

_KINDS = ("busybox", "debian")


def main() -> None:
    """Write the archive from this host's packages, for its architecture."""
    with tempfile.TemporaryDirectory() as folder:
        roots = images.build(Path(folder, "roots"), images.compile_probes(Path(folder, "probes")))
        images.save({kind: roots[kind] for kind in _KINDS}, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
