"""The exporter, served by a child of a test, with an observer that can be made to fail."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from timeouts import in_time

from gpuhook.base.config.loader import load
from gpuhook.metrics import serve, service
from gpuhook.metrics.model import SeriesOptions, Snapshot
from gpuhook.metrics.observer import Observer
from gpuhook.metrics.web_files import WebFiles
from gpuhook.monitor.service_metrics import listen


class Breaking(Observer):
    """An observer that fails while a file exists."""

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
    """Let this process open ``spare`` more files, whatever numbers its open files have."""
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
    """Serve metrics with at most ``spare`` more descriptors, and yield the address.

    The file ``told`` in the folder has the messages.
    """
    with listen("127.0.0.1:0") as listener:
        pid = os.fork()
        if pid == 0:
            try:
                # The serving process has only one output, standard error, so messages go there.
                os.dup2(os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                told = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - ends with us
                tell = partial(print, file=told)
                if spare is not None:
                    serve.prepare = lambda **_: allow_descriptors(spare)
                config = None if web is None else WebFiles(str(web))
                made = service.Service(Breaking(folder), SeriesOptions(), tell, config)
                made.run(listener, lambda _: None)
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
                raise
            finally:
                os._exit(0)
        try:
            yield listener.getsockname()
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        finally:
            os.kill(pid, signal.SIGTERM)
            with in_time():
                os.waitpid(pid, 0)
