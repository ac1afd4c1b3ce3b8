"""Interface of every engine in a test: run a container of an image with some environment."""

from collections.abc import Sequence
from typing import Protocol

from harness.commands import Result


class Engine(Protocol):
    """Docker, containerd or podman, started for the tests and ready to run containers."""

    def run(
        self,
        image: str,
        *command: str,
        env: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> Result:
        """Run ``command`` in a fresh container of ``image``, which is deleted afterwards.

        ``env`` holds NAME=value settings, and ``options`` further options of the engine.
        """

    @property
    def pid(self) -> int | None:
        """The daemon, whose mount table tests also check; None for an engine without a daemon."""

    @property
    def shows_errors_of_hooks(self) -> bool:
        """Return whether the user sees the messages of a failed hook."""


def settings(flag: str, env: Sequence[str]) -> list[str]:
    """Return ``env`` as command line options."""
    return [word for setting in env for word in (flag, setting)]
