"""The unprivileged HTTP server process of the exporter, to which any client may connect.

A client that sends nothing, or reads no response, delays no other client. Requests that arrive
while a snapshot is taken all get the next one. Passwords are checked in a thread. Every request
gets a response, and no request ends the service.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from gpuhook.base.errors import MetricsError, shown
from gpuhook.base.fileio import write_all
from gpuhook.metrics import answers, exporter, text
from gpuhook.metrics.connections import Clients, HttpConnection
from gpuhook.metrics.model import SeriesOptions
from gpuhook.metrics.web_config import WebConfig
from gpuhook.monitor import http_request
from gpuhook.monitor.http_request import Answer

_PIECE = 1 << 16
_PEERS = 1000  # whose wrong passwords are counted

Tell = Callable[[str], None]


def prepare(*, follows: bool) -> None:
    """Import modules for later, while files that only root can read may be opened."""
    if follows:
        with contextlib.suppress(ImportError):
            import bcrypt  # noqa: F401, PLC0415 - only for configurations with passwords


def serve(
    listener: socket.socket, talk: int, options: SeriesOptions, tell: Tell, *, follows: bool
) -> int:
    """Serve until the process at the other end of ``talk`` exits; return the exit status.

    With ``follows``, no client is served before that process has sent TLS and passwords.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # because systemd signals all processes
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.closing(Clients(listener, follows=follows)) as clients:
        return _ServerLoop(clients, talk, options, tell).run()


class _ServerLoop:
    """The server's loop: answers requests with data from the root process."""

    def __init__(self, clients: Clients, talk: int, options: SeriesOptions, tell: Tell) -> None:
        self._clients = clients
        self._talk = talk
        self._options = options
        self._tell = tell
        self._text = b""  # the beginning of a line
        self._number = 0
        self._files = 0  # the number of the pending question about files, 0 for none
        self._look = 0
        self._asked_for: list[HttpConnection] = []  # clients that wait for that snapshot
        self._check: _Check | None = None
        self._failed: Counter[str] = Counter()  # wrong passwords of each peer

    def run(self) -> int:
        """Serve until the root process has closed its end; return the exit status."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken, self._wakes = reader, writer
        if self._clients.follows:
            self._ask_for_files()
        else:
            self._say(ready=True)
        while True:
            self._ask()
            came = self._clients.wait((self._talk, reader))
            if self._talk in came and not self._listen():
                return 0
            if reader in came:
                os.read(reader, _PIECE)
                self._end_check()
            self._decide()

    # Authorization ------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Refuse invalid requests, and mark authorized clients."""
        for client in self._clients.whole():
            answer = http_request.refusal(client.request)
            if answer is None:
                allowed = self._allows(client)
                if allowed is None:
                    client.waits_for_check = True
                    continue
                # protects: web-password
                answer = http_request.elsewhere(client.request) if allowed else http_request.DENIAL
            client.waits_for_check = False
            if answer is None:
                client.is_allowed = True
            else:
                client.give(_written(answer, client))
        self._begin_check()

    def _allows(self, client: HttpConnection) -> bool | None:
        web = self._clients.web
        return True if web is None else web.answer(client.password)

    def _begin_check(self) -> None:
        """Start checking a password in a thread, of the peer with the fewest wrong ones."""
        waiting = [each for each in self._clients.whole() if each.waits_for_check]
        if self._check is None and self._clients.web is not None and waiting:
            chosen = min(waiting, key=lambda each: self._failed[each.peer])  # protects: fair-checks
            self._check = _Check(self._clients.web, chosen, self._wakes)

    def _end_check(self) -> None:
        """Store the result of the check, if it has ended."""
        check = self._check
        if check is None or check.right is None:
            return
        self._check = None
        check.web.remember(check.password, right=check.right)
        if not check.right:
            if len(self._failed) >= _PEERS:
                self._failed.clear()
            self._failed[check.peer] += 1

    # The root process ---------------------------------------------------------------------------

    def _ask(self) -> None:
        """Send the questions that are due and not pending yet."""
        if not self._files and self._clients.wants_files():
            self._ask_for_files()
        if not self._look:
            self._asked_for = [each for each in self._clients.whole() if each.is_allowed]
            if self._asked_for:
                self._look = self._next()
                self._say(look=self._look)

    def _ask_for_files(self) -> None:
        self._files = self._next()
        self._say(files=self._files)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _say(self, **words: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the next read returns the end of file
            write_all(self._talk, answers.line(**words))

    def _listen(self) -> bool:
        """Process received messages; return False at the end of file."""
        try:
            piece = os.read(self._talk, _PIECE)
        except ConnectionError:
            return False
        *lines, self._text = (
            (self._text + piece).split(b"\n") if b"\n" in piece else (self._text + piece,)
        )
        for line in lines:
            self._hear(json.loads(line))
        return bool(piece)

    def _hear(self, line: dict[str, Any]) -> None:
        if "web" in line:
            self._follow(line["web"])
        if line.get("files") == self._files:
            self._files = 0
            self._clients.begin()
        elif line.get("look") == self._look:
            self._look = 0
            self._answer_all(line)

    def _follow(self, values: dict[str, Any]) -> None:
        """Use new TLS and passwords; if they are invalid, keep the previous ones."""
        try:
            self._clients.follow(answers.to_web(values))
            self._say(ready=True)
        except MetricsError as error:
            self._say(error=[error.cause, error.remedy])

    def _answer_all(self, line: dict[str, Any]) -> None:
        """Answer the clients that waited for a snapshot, with one text per format."""
        metrics = functools.cache(lambda openmetrics: self._metrics(line, openmetrics))
        written = functools.cache(http_request.written)
        for client in self._asked_for:
            if client.is_allowed and not client.is_over:
                openmetrics = text.is_openmetrics(http_request.header(client.request, b"accept"))
                client.give(
                    written(metrics(openmetrics), with_body=http_request.has_body(client.request))
                )
        self._asked_for = []

    def _metrics(self, line: dict[str, Any], openmetrics: bool) -> Answer:
        if "snapshot" in line:
            try:
                snapshot = answers.to_snapshot(line["snapshot"])
                seconds = line["seconds"]
                body = exporter.text(snapshot, self._options, seconds, openmetrics=openmetrics)
            # protects: failing-text
            except Exception as error:  # noqa: BLE001 - no request ends the service
                why = shown(f"{type(error).__name__}: {error}")
                self._tell(f"The metrics couldn't be written: {why}")
            else:
                return "200 OK", text.TYPES[openmetrics], body
        return http_request.FAILURE


class _Check:
    """The check of a client's password in a thread; ``right`` is None until it has ended."""

    def __init__(self, web: WebConfig, client: HttpConnection, wakes: int) -> None:
        self.web = web
        self.password = client.password
        self.peer = client.peer
        self.right: bool | None = None
        self._wakes = wakes
        threading.Thread(target=self._run, daemon=True).start()  # protects: checks-beside

    def _run(self) -> None:
        right = False
        try:
            right = self.web.check(self.password)
        finally:
            self.right = right
            os.write(self._wakes, b"x")


def _written(answer: Answer, client: HttpConnection) -> bytes:
    return http_request.written(answer, with_body=http_request.has_body(client.request))
