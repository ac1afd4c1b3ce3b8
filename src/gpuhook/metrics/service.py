"""The exporter's root process: reads devices, and supervises the server process.

The server process speaks HTTP and TLS with clients, checks passwords and writes the series, without
any privilege. It may request a snapshot, and ask whether the TLS and password files have changed
(``answers``). Only the root process opens those files and the drivers.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpuhook.base.cgroup.access import in_first_user_namespace
from gpuhook.base.container import kernel
from gpuhook.base.errors import MetricsError, shown
from gpuhook.metrics import answers
from gpuhook.metrics.model import SeriesOptions, Snapshot
from gpuhook.metrics.observer import Observer
from gpuhook.metrics.web_files import WebContent, WebFiles
from gpuhook.monitor.host.child import Tell
from gpuhook.monitor.host.state_worker import StateWorker
from gpuhook.monitor.telemetry import PATIENCE

IDLE = 120.0  # seconds without a request after which the drivers are released
AWAY = 30.0  # seconds for which they are released on SIGHUP
_STARTING = 60.0  # seconds for the server process to become ready
_NOBODY = 65534  # the user nobody without rights of its own, and its group
_LONGEST = 500  # characters of a sentence of the server process


class Service:
    """The exporter's service, which runs until SIGTERM or SIGINT; SIGHUP releases the drivers.

    ``web`` has TLS and passwords, None for neither. ``renewed`` returns another observer if the
    settings have changed.
    """

    def __init__(
        self,
        observer: Observer,
        options: SeriesOptions,
        tell: Tell,
        web: WebFiles | None = None,
        renewed: Callable[[], Observer | None] = lambda: None,
    ) -> None:
        self._observer = observer
        self._renewed = renewed
        self._options = options
        self._tell = tell
        self._web = web
        self._content: WebContent | None = None  # in use
        self._news: WebContent | None = None  # read, and not yet confirmed to be valid
        self._given: WebContent | None = None  # sent last to the server process
        self._problems: tuple[str, ...] = ()
        self._ends = False
        self._lets_go = False
        self._prepares = False  # whether the next snapshot is to be prepared
        self._last: float | None = None  # the time of the last snapshot, None with no driver open

    def run(self, listener: socket.socket, ready: Callable[[str], None]) -> None:
        """Serve until SIGTERM or SIGINT; call ``ready`` with the scheme first.

        MetricsError if the server process can't start.
        """
        if self._web is not None:
            self._news = self._web.read()
        with _signals(self._note) as woken:
            server = _Server(listener, self._options, self._web is not None, self._tell)
            try:
                self._begin(server)
                tls = self._content is not None and self._content.tls is not None
                ready("https" if tls else "http")
                self._prepare(PATIENCE)
                while not self._ends:
                    self._go_on(server, woken)
                self._observer.let_go()
            finally:
                server.end()

    def _begin(self, server: "_Server") -> None:
        """Start the server process, and wait until it is ready."""
        end = time.monotonic() + _STARTING
        server.tend()
        while time.monotonic() < end and not self._ends:
            is_ready = False
            for line in server.lines():
                if "error" in line:
                    raise _error(line)
                is_ready |= "ready" in line
                self._hear(server, line)
            if is_ready:
                return
            if server.fileno() < 0:
                break
            select.select([server.fileno()], [], [], max(0.0, end - time.monotonic()))
        if not self._ends:
            raise MetricsError(
                "The process that serves the metrics ended at once, or wasn't ready in time",
                "Check its messages above, and whether the host has enough free memory",
            )

    def _go_on(self, server: "_Server", woken: int) -> None:
        """Do the work that is due, or wait for more."""
        if server.tend():
            self._given = None
        for line in server.lines():
            self._hear(server, line)
        if self._prepares and server.wants() < 0:  # no client has to wait for that
            self._prepares = False
            self._prepare()
        now = time.monotonic()
        if self._lets_go:
            self._lets_go, self._last = False, None
            self._observer.let_go(AWAY)
        elif self._last is not None and now >= self._last + IDLE:
            self._last = None
            self._observer.let_go()
        ends = [end for end in (server.deadline(), self._last and self._last + IDLE) if end]
        patience = max(0.0, min(ends) - time.monotonic()) if ends else None
        if self._ends or self._lets_go:
            return
        writers = [server.wants()] if server.wants() >= 0 else []
        readers = [woken, *([server.fileno()] if server.fileno() >= 0 else [])]
        select.select(readers, writers, [], patience)
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1 << 10)

    def _hear(self, server: "_Server", line: dict[str, Any]) -> None:
        if "error" in line:
            self._note_wrong(_error(line))
        elif "ready" in line:
            self._note_right()
        else:
            self._answer(server, line)

    def _answer(self, server: "_Server", line: dict[str, Any]) -> None:
        """Answer a question, and ignore anything else."""
        files, look = line.get("files"), line.get("look")
        if isinstance(files, int):
            server.answer(answers.line(files=files, **self._changes()))
        elif isinstance(look, int):
            self._follow()
            server.answer(answers.line(look=look, **self._changes(), **self._look()))
            self._last, self._prepares = time.monotonic(), True

    def _follow(self) -> None:
        """Replace the observer if the settings have changed."""
        other = self._renewed()
        if other is not None:  # protects: metrics-settings
            self._observer.let_go()
            self._observer = other

    # Devices ------------------------------------------------------------------------------------

    def _look(self) -> dict[str, Any]:
        """Return a snapshot and its duration, or {}; log problems that have changed."""
        before = time.monotonic()
        with self._told_of_failures("The devices couldn't be read"):
            snapshot: Snapshot = self._observer.take()
            self._tell_news((*snapshot.problems, *snapshot.notes))
            seconds = time.monotonic() - before
            return {"snapshot": answers.from_snapshot(snapshot), "seconds": seconds}
        return {}

    def _prepare(self, patience: float = 0.0) -> None:
        with self._told_of_failures("The next snapshot couldn't be prepared"):
            self._observer.prepare(patience)

    @contextlib.contextmanager
    def _told_of_failures(self, what: str) -> Iterator[None]:
        """Log failures, and continue: the next request may succeed."""
        try:
            yield
        # protects: failing-request
        except Exception as error:  # noqa: BLE001 - no request ends the service
            self._tell_news((f"{what}: {shown(f'{type(error).__name__}: {error}')}",))

    def _tell_news(self, problems: tuple[str, ...]) -> None:
        if problems != self._problems:
            for problem in problems:
                self._tell(problem)
            self._problems = problems

    # TLS and passwords --------------------------------------------------------------------------

    def _changes(self) -> dict[str, Any]:
        """Return the files' content if the server process doesn't have it yet."""
        if self._web is None:
            return {}
        if self._web.has_changed():  # protects: web-config-followed
            self._news = None
            try:
                self._news = self._web.read()
            except MetricsError as error:
                self._tell(f"{error}; its previous content stays in use")
        content = self._news or self._content
        if content is None or content is self._given:
            return {}
        self._given = content
        return {"web": answers.from_web(content)}

    def _note_right(self) -> None:
        if self._news is not None and self._given is self._news:
            self._content, self._news = self._news, None

    def _note_wrong(self, error: MetricsError) -> None:
        """Log what is wrong; after a change of the files, their previous content stays in use."""
        is_change = self._news is not None and self._given is self._news
        self._tell(f"{error}; its previous content stays in use" if is_change else str(error))
        if is_change:
            self._news = None

    def _note(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._lets_go = True
        elif number != signal.SIGCHLD:
            self._ends = True


class _Server(StateWorker):
    """The server process."""

    def __init__(
        self, listener: socket.socket, options: SeriesOptions, follows: bool, tell: Tell
    ) -> None:
        def serve(talk: int) -> int:
            # TLS and Prometheus' classes, with their imports, are imported only in this process.
            from gpuhook.metrics import serve  # noqa: PLC0415

            serve.prepare(follows=follows)
            rootless = not in_first_user_namespace()
            kernel.give_up_root(_NOBODY, _NOBODY, rootless=rootless)  # protects: metrics-nobody
            return serve.serve(listener, talk, options, tell, follows=follows)

        super().__init__(
            serve, "The process that serves the metrics", "gpuhook-http", tell, time.monotonic,
            (listener.fileno(),), answers.QUESTION,
        )  # fmt: skip


def _error(line: dict[str, Any]) -> MetricsError:
    """Return the server process's error message as an exception."""
    said = line["error"]
    words = [str(each)[:_LONGEST] for each in said] if isinstance(said, list) else []
    return MetricsError(*[*words, "The metrics can't be served", "See the log"][:2])


@contextlib.contextmanager
def _signals(note: Callable[[int], None]) -> Iterator[int]:
    """Call ``note`` with each signal; yield a descriptor that becomes readable then."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    handlers = {each: signal.signal(each, lambda number, _: note(number)) for each in numbers}
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
