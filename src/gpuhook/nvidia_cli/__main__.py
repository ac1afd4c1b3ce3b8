"""Entry point of gpuhook-container-cli's launcher: an isolated interpreter, as for gpu-py."""

import os
import sys
from typing import NoReturn

from gpuhook.base import names
from gpuhook.monitor.host import streams
from gpuhook.nvidia_cli import argp
from gpuhook.nvidia_cli import main as program


def main() -> NoReturn:
    """Run the command line after the launcher's own two arguments."""
    os.umask(names.UMASK)
    streams.run(argp.PROGRAM, lambda: program.main(sys.argv[3:]))


if __name__ == "__main__":
    main()
