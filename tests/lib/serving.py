"""The exporter, served by a child of a test, with an observer that can be made to fail."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from limits import in_time

from gpuhook.ground.config.loader import load
from gpuhook.tools.metrics import exporter, serve
from gpuhook.tools.metrics.model import Snapshot
from gpuhook.tools.metrics.observer import Observer
from gpuhook.tools.metrics.web_config import Web


class Breaking(Observer):
    """An observer that fails whenever a file is there."""

    def __init__(self, folder: Path) -> None:
        config = folder / "config.toml"
        config.write_text(f'[gpuhook]\nstate-dir = "{folder}/state"\n')
        super().__init__(load(str(config)), pod_resources=f"{folder}/none")
        self.breaks = folder / "breaks"

    def take(self) -> Snapshot:
        if self.breaks.exists():
            raise ValueError("a \x1b[31mmachine\n that nobody thought of")
        return super().take()

    def prepare(self, patience: float = 0.0) -> None:
        if self.breaks.exists():
            raise RecursionError
        super().prepare(patience)


def allow_descriptors(spare: int) -> None:
    """Let this process open so many files more, whatever numbers its open ones have."""
    highest = max(int(each) for each in os.listdir("/proc/self/fd"))
    for number in range(highest):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.dup2(2, number)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, limits[1]))


@contextlib.contextmanager
def serving(
    folder: Path, spare: int | None = None, web: Path | None = None
) -> Iterator[tuple[str, int]]:
    """Serve with at most ``spare`` more descriptors, and give where; a file has what is told."""
    with serve.listen("127.0.0.1:0") as listener:
        pid = os.fork()
        if pid == 0:
            try:
                with open(folder / "told", "w", buffering=1) as told:
                    tell = partial(print, file=told)
                    if spare is not None:
                        allow_descriptors(spare)
                    config = None if web is None else Web(str(web), tell)
                    service = serve.Service(
                        Breaking(folder), exporter.SeriesOptions(), tell, config
                    )
                    service.run(listener)
            finally:
                os._exit(0)
        try:
            yield listener.getsockname()
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        finally:
            os.kill(pid, signal.SIGTERM)
            with in_time():
                os.waitpid(pid, 0)
