"""gpuhook-prestart precreate, podman's hook of that stage: edit config.json on its way.

podman hands the container's configuration over on standard input before it calls its
runtime, and takes the edited one from standard output (oci-hooks(5), "precreate"). So
device rules and our prestart hook get into it whatever the runtime is.

Import budget: as runtime_shim, whose edits these are.
"""

import os
import sys

from gpuhook import log, names
from gpuhook.config import Config, load
from gpuhook.errors import GpuhookError, SpecError
from gpuhook.oci import Spec
from gpuhook.prestart_hook import read_arguments
from gpuhook.runtime_shim import edit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_NAME = "The configuration on standard input"
_LIMIT = 64 << 20


def main(folder: str, argv: list[str]) -> "NoReturn":
    """Edit standard input to standard output; exit with 0, or with 1 and the reason.

    ``folder`` is where gpuhook-prestart lies; ``argv`` may hold ``--config FILE``.
    """
    config_path, _ = read_arguments(argv)
    text = _read_input()
    config = Config()
    try:
        config = load(config_path)
        if len(text) > _LIMIT:
            raise SpecError(f"{_NAME} is larger than {_LIMIT >> 20} MiB", "Make it smaller")
        spec = Spec(_NAME, text.decode("utf-8", "surrogateescape"))
        edited = edit(spec, config, folder)
    except GpuhookError as error:
        log.error(names.HOOK, str(error), config)
        sys.exit(1)
    with open(1, "wb") as output:
        output.write(text if edited is None else edited.text.encode("utf-8", "surrogateescape"))
    sys.exit(0)


def _read_input() -> bytes:
    """Read standard input to its end, so that podman's write never fails."""
    chunks = []
    size = 0
    while chunk := os.read(0, 1 << 16):
        size += len(chunk)
        if size <= _LIMIT + (1 << 16):
            chunks.append(chunk)
    return b"".join(chunks)
