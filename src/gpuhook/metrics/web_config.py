"""TLS and passwords of the exporter in the server process, from the files that root has read.

A password's check takes long (bcrypt), so ``check`` runs in a thread.
"""

import base64
import binascii
import hashlib
import hmac
import os
import socket
import ssl
from typing import Any, NamedTuple, Self

from gpuhook.base.errors import MetricsError
from gpuhook.base.fileio import write_all
from gpuhook.metrics import web_files
from gpuhook.metrics.web_files import AUTHORITIES, CERTIFICATE, CLIENTS, KEY, VERSION, WebContent

_CLIENTS = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {
    "": ssl.TLSVersion.TLSv1_2,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_MOST = 100  # wrong passwords that are remembered
_LONGEST = 72  # bytes of a password that bcrypt uses
# The hash of no password, so that an unknown user takes as long as a wrong password; %02d is the
# cost.
_NOBODY = b"$2b$%02d$abcdefghijklmnopqrstuu1Y8pXWzPzZzzDqgZyHGgFXw4F3dWJa2"


class WebConfig:
    """TLS context and passwords; MetricsError if certificate or key can't be used."""

    def __init__(self, content: WebContent) -> None:
        self._bcrypt = _bcrypt() if content.users else None
        self._users = {name: text.encode() for name, text in content.users.items()}
        self._right: dict[str, bytes] = {}  # users' digests of correct passwords, once checked
        self._wrong: dict[bytes, None] = {}  # digests of wrong passwords, the oldest first
        costs = map(web_files.cost, content.users.values())
        # protects: unknown-user-time
        self._nobody = _NOBODY % max(costs, default=web_files.COSTS[0])
        self._context = None if content.tls is None else _context(content, content.tls)

    @property
    def scheme(self) -> str:
        """The URL scheme."""
        return "http" if self._context is None else "https"

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Return a non-blocking connection, with TLS if that is configured."""
        connection.setblocking(False)
        if self._context is None:
            return connection
        return self._context.wrap_socket(connection, True, do_handshake_on_connect=False)

    def answer(self, authorization: str) -> bool | None:
        """Tell whether a request with this header (RFC 7617) is authorized.

        None if that needs a ``check``.
        """
        if not self._users:
            return True
        said = _said(authorization)
        if said is None or said.digest in self._wrong:
            return False
        right = self._right.get(said.user, b"")
        return True if hmac.compare_digest(right, said.digest) else None

    def check(self, authorization: str) -> bool:
        """Tell whether a password is correct; takes long, and stores nothing."""
        said = _said(authorization)
        if said is None or self._bcrypt is None:
            return False
        expected = self._users.get(said.user, self._nobody)
        return bool(self._bcrypt.checkpw(said.password, expected)) and said.user in self._users

    def remember(self, authorization: str, *, right: bool) -> None:
        """Store the result of a ``check``."""
        said = _said(authorization)
        if said is None:
            return
        if right:
            self._right[said.user] = said.digest
            return
        if len(self._wrong) >= _MOST:
            del self._wrong[next(iter(self._wrong))]
        self._wrong[said.digest] = None


class _Credentials(NamedTuple):
    """The content of an Authorization header, with the password cut to bcrypt's length."""

    user: str
    password: bytes
    digest: bytes  # of both


def _said(authorization: str) -> _Credentials | None:
    """Parse a header of RFC 7617, None if it is invalid."""
    scheme, _, words = authorization.partition(" ")
    try:
        name, colon, password = base64.b64decode(words.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    # bcrypt doesn't accept NUL: it raises, or stops there and accepts a password's beginning.
    if scheme.lower() != "basic" or not colon or b"\0" in password:  # protects: password-nul
        return None
    password = password[:_LONGEST]
    digest = hashlib.sha256(name + b":" + password).digest()
    return _Credentials(name.decode("utf-8", "replace"), password, digest)


def _context(content: WebContent, tls: dict[str, str]) -> ssl.SSLContext:
    """Return the TLS context of all connections."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls[VERSION]]
    reading = CERTIFICATE
    try:
        with _Memory(content.content[CERTIFICATE]) as chain, _Memory(content.content[KEY]) as key:
            context.load_cert_chain(chain.path, key.path, _no_password)
        if AUTHORITIES in content.content:
            reading = AUTHORITIES
            with _Memory(content.content[AUTHORITIES]) as authorities:
                context.load_verify_locations(authorities.path)
    except (OSError, ssl.SSLError) as error:
        name = content.names[reading]
        raise web_files.unusable(content.path, name, str(error.strerror or error)) from None
    context.verify_mode = _CLIENTS[tls[CLIENTS]]
    return context


class _Memory:
    """A file in memory, for a library that accepts only paths."""

    def __init__(self, data: bytes) -> None:
        self._fd = os.memfd_create("gpuhook")
        write_all(self._fd, data)
        self.path = f"/proc/self/fd/{self._fd}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _no_password() -> str:
    raise ssl.SSLError(0, "it has a password")


def _bcrypt() -> Any:
    try:
        import bcrypt  # noqa: PLC0415 - only for configurations with passwords
    except ImportError:
        raise MetricsError(
            "Passwords need the Python package bcrypt, which isn't installed",
            "Install it: pip install bcrypt, with the pip next to gpuhook, or the package "
            "python3-bcrypt",
        ) from None
    return bcrypt
