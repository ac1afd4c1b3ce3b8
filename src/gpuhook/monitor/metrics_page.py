"""The unprivileged HTTP server of a service's own metrics, to which any client may connect.

It answers with the newest text that the service sent: a line with a JSON string. A client that
sends nothing, or reads no response, delays no other one.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket

from gpuhook.monitor import http_request

TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLIENTS = 64  # at once
_PATIENCE = 5.0  # seconds for a request and its response
_PIECE = 1 << 16


def serve(listener: socket.socket, fd: int) -> int:
    """Serve until the service closes the other end of ``fd``; return the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # because systemd signals all processes
    asyncio.run(_PageServer(fd).run(listener))
    return 0


class _PageServer:
    """The server's loop: reads texts from its parent, and answers clients with the newest."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self._page = b""
        self._clients = 0
        self._end = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until the parent closes the connection."""
        os.set_blocking(self._fd, False)
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        async with await asyncio.start_server(
            self._answer, sock=listener, limit=http_request.MAX_BYTES
        ):
            await self._end.wait()

    def _read(self) -> None:
        try:
            piece = os.read(self._fd, _PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._end.set()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if lines:
            self._page = json.loads(lines[-1]).encode()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a client's one request; one that is slow, or one too many, is disconnected."""
        self._clients += 1
        try:
            if self._clients <= _CLIENTS:
                async with asyncio.timeout(_PATIENCE):
                    await self._answer_to(reader, writer)
        except (OSError, TimeoutError):
            pass
        finally:
            self._clients -= 1
            with contextlib.suppress(OSError):
                writer.transport.abort() if writer.is_closing() else writer.close()

    async def _answer_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = b""
        while not http_request.is_whole(request):
            piece = await reader.read(http_request.MAX_BYTES)
            if not piece:
                return
            request += piece
        wrong = http_request.refusal(request) or http_request.elsewhere(request)
        answer = wrong or ("200 OK", TYPE, self._page)
        has_body = http_request.has_body(request)
        writer.write(http_request.written(answer, with_body=has_body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()
