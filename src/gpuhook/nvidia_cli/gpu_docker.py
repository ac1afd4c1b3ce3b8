"""gpu-docker: a docker wrapper with nvidia-docker's interface, for existing scripts and habits.

``run`` and ``create`` get ``--runtime=gpu-py``, and the GPUs that NV_GPU names; every other
command line is passed to docker unchanged.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from gpuhook import __version__
from gpuhook.base import names

_NOT_FOUND = 127  # as in a shell

# docker's options before the command that take a value (cli/flags in docker/cli).
_WITH_VALUE = (
    "--config", "--context", "--host", "--log-level", "--tlscacert", "--tlscert", "--tlskey",
)  # fmt: skip
_SHORT_WITH_VALUE = "cHl"


def main() -> NoReturn:
    """Execute docker in this process."""
    argv = command_line(sys.argv[1:], os.environ)
    if sys.argv[1:] == ["version"]:
        print(f"gpu-docker: {__version__}", flush=True)  # noqa: T201 - as nvidia-docker does
    if os.environ.get("NV_DEBUG"):
        sys.stderr.write(f"+ {shlex.join(argv)}\n")
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - docker replaces this process
    except OSError as error:
        sys.stderr.write(
            f"gpu-docker: {argv[0]} can't be started: {error.strerror}. "
            "Install Docker, or set NV_DOCKER to its command.\n"
        )
        sys.exit(_NOT_FOUND)


def command_line(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command line to execute for gpu-docker's arguments.

    ``environment`` may have NV_DOCKER (docker's command, quoted as for a shell)
    and NV_GPU (indices or UUIDs, separated by blanks or commas).
    """
    docker = _split(environment.get("NV_DOCKER", "")) or ["docker"]
    at = position(words)
    if at is None:
        return [*docker, *words]
    return [*docker, *words[:at], *_options(environment.get("NV_GPU", "")), *words[at:]]


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()  # an unclosed quote: as in nvidia-docker


def _options(gpus: str) -> list[str]:
    chosen = [name for name in re.split(r"[\s,]+", gpus) if name]
    setting = ["-e", f"NVIDIA_VISIBLE_DEVICES={','.join(chosen)}"] if chosen else []
    return [f"--runtime={names.RUNTIME}", *setting]


def position(words: Sequence[str]) -> int | None:
    """Return the index where options of ``run`` or ``create`` start, None for another command.

    The command is the first word that is neither an option nor an option's value.
    """
    at = _skip_options(words, 0)
    if at < len(words) and words[at] == "container":
        at = _skip_options(words, at + 1)
    return at + 1 if at < len(words) and words[at] in ("run", "create") else None


def _skip_options(words: Sequence[str], at: int) -> int:
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        at += 2 if _takes_next(words[at]) else 1
    return at


def _takes_next(word: str) -> bool:
    """Tell whether an option's value is the next word, as pflag reads options."""
    if word.startswith("--"):
        return word in _WITH_VALUE
    for number, letter in enumerate(word[1:], 2):
        if letter in _SHORT_WITH_VALUE:
            return number == len(word)  # else the rest of the word is its value
        if word[number : number + 1] == "=":
            return False
    return False


if __name__ == "__main__":
    main()
