"""Settings of ``gpuhook install --for-training``: limits for programs that train across GPUs.

They are written as ``gpuhook config set`` does. A limit that config.toml sets already stays.

Sources: NCCL's and PyTorch's manuals on /dev/shm; NVIDIA's advice for its deep learning images
(--ulimit memlock=-1 --ulimit stack=67108864); tmpfs(5) has half of the memory as its default.
"""

import contextlib

from gpuhook.base.config.loader import loads
from gpuhook.base.config.source import read_text
from gpuhook.tools.cli import config as settings
from gpuhook.tools.cli._output import say
from gpuhook.tools.config.edit import set_value
from gpuhook.tools.config.render import value_of
from gpuhook.tools.engines.prefix import below

RESOURCE_LIMITS = {
    "gpuhook.containers.memlock": "unlimited",
    "gpuhook.containers.stack": "64MiB",
    "gpuhook.containers.shm-size": "50%",
}


def raise_resource_limits(prefix: str, *, dry_run: bool) -> list[str]:
    """Set the limits that config.toml lacks, and print and return them, as KEY=VALUE.

    ConfigError if the file has an error or can't be written.
    """
    path = below(prefix, settings.chosen_file(None))
    with contextlib.nullcontext() if dry_run else settings.changing(path):
        try:
            text = read_text(path)
        except FileNotFoundError:
            text = settings.default_text()
        present = loads(text)
        missing = {
            key: value for key, value in RESOURCE_LIMITS.items() if not value_of(present, key)
        }
        for key, value in missing.items():
            text = set_value(text, key, value)
        if missing and not dry_run:
            settings.save(path, text)
    found = [f"{key}={value}" for key, value in missing.items()]
    for each in found:
        say(f"would set {each} in {path}" if dry_run else f"set {each} in {path}")
    return found
