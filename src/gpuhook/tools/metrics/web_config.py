"""TLS and passwords of the exporter, by the file that Prometheus' own exporters read.

https://prometheus.io/docs/prometheus/latest/configuration/https/ has its form. What would change
who may read the metrics, and isn't known here, is refused. The file and those that it names are
read again when they have changed, as a certificate does that is renewed.
"""

import base64
import binascii
import hashlib
import hmac
import os
import re
import socket
import ssl
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from gpuhook.ground.errors import MetricsError, shown
from gpuhook.ground.host import files
from gpuhook.start.cdi import tree

_TLS = "tls_server_config"
_USERS = "basic_auth_users"
# http_server_config is about HTTP/2, which isn't spoken here.
_SECTIONS = (_TLS, _USERS, "http_server_config")
_FILES = ("cert_file", "key_file", "client_ca_file")
_KEYS = (*_FILES, "client_auth_type", "min_version")
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
_REMEDY = "Correct it; docs/metrics.md lists what it may hold"
_HASH = re.compile(r"\$2[abxy]\$[0-9]{2}\$[./A-Za-z0-9]{53}", re.ASCII)
_COSTS = (4, 15)  # with 15 a password takes two seconds, and nobody is served meanwhile
_MOST = 100  # wrong passwords that are remembered
_LONGEST = 72  # bytes of a password that bcrypt looks at
# Of no user, so that an unknown name takes as long as a wrong password; with the cost in it.
_NOBODY = b"$2b$%02d$abcdefghijklmnopqrstuu1Y8pXWzPzZzzDqgZyHGgFXw4F3dWJa2"

Tables = dict[str, dict[str, str]]


class Web:
    """What the file says now; MetricsError where that is wrong at the beginning.

    ``tell`` gets a sentence where a change is wrong: what was right before counts on then.
    """

    def __init__(self, path: str, tell: Callable[[str], None]) -> None:
        self._path = path
        self._tell = tell
        self._bcrypt: Any = None
        self._files = [path]
        self._seen: list[object] = []
        self._context: ssl.SSLContext | None = None
        self._users: dict[str, bytes] = {}
        self._nobody = b""
        self._right: dict[str, bytes] = {}  # a digest of each user's password, once it was checked
        self._wrong: dict[bytes, None] = {}  # digests; the oldest are first
        self._read()

    @property
    def scheme(self) -> str:
        """What an address begins with."""
        return "http" if self._context is None else "https"

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Return a connection that never waits, which speaks TLS where that is asked for."""
        self._follow()  # protects: web-config-followed
        connection.setblocking(False)
        if self._context is None:
            return connection
        return self._context.wrap_socket(connection, True, do_handshake_on_connect=False)

    def remembers(self, authorization: str) -> bool:
        """Tell whether ``allows`` knows its answer without a check, for which all others wait."""
        said = _said(authorization) if self._users else None
        return said is None or self._is_right(said) or said.digest in self._wrong

    def allows(self, authorization: str) -> bool:
        """Tell whether a request with this header (RFC 7617) may have an answer."""
        if not self._users:
            return True
        said = _said(authorization)
        if said is None or said.digest in self._wrong:
            return False
        if self._is_right(said):
            return True
        expected = self._users.get(said.user, self._nobody)
        if self._bcrypt.checkpw(said.password, expected) and said.user in self._users:
            self._right[said.user] = said.digest
            return True
        if len(self._wrong) >= _MOST:
            del self._wrong[next(iter(self._wrong))]
        self._wrong[said.digest] = None
        return False

    def _is_right(self, said: "_Said") -> bool:
        return hmac.compare_digest(self._right.get(said.user, b""), said.digest)

    def _follow(self) -> None:
        if self._seen != [*map(_identity, self._files)]:
            try:
                self._read()
            except MetricsError as error:
                self._seen = [*map(_identity, self._files)]
                self._tell(f"{error}; what it said before counts on")

    def _read(self) -> None:
        seen_of_file = _identity(self._path)
        tables = _tables(self._path)
        tls, users = tables.get(_TLS, {}), tables.get(_USERS, {})
        if users:
            self._bcrypt = _bcrypt()
        hashes = {name: self._hash(name, text) for name, text in users.items()}
        folder = os.path.dirname(os.path.abspath(self._path))
        named = {key: os.path.join(folder, tls[key]) for key in _FILES if tls.get(key)}
        paths = [self._path, *named.values()]
        seen = [seen_of_file, *map(_identity, paths[1:])]
        context = self._made(tls, named) if _TLS in tables else None
        self._files, self._seen = paths, seen
        self._context, self._users = context, hashes
        self._right, self._wrong = {}, {}
        # protects: unknown-user-time
        self._nobody = _NOBODY % max(map(_cost, users.values()), default=_COSTS[0])

    def _hash(self, name: str, text: str) -> bytes:
        if not _HASH.fullmatch(text) or not _COSTS[0] <= _cost(text) <= _COSTS[1]:
            raise MetricsError(
                f"{self._path}: the password of {shown(name)} in {_USERS} isn't a hash of bcrypt "
                f"with a cost of {_COSTS[0]} to {_COSTS[1]}",
                "Make one: htpasswd -nBC 10 '' | tr -d ':\\n'",
            )
        return text.encode()

    def _made(self, tls: dict[str, str], named: dict[str, str]) -> ssl.SSLContext:
        """Return what connections are made with."""
        for key, values in (("client_auth_type", _CLIENTS), ("min_version", _VERSIONS)):
            if tls.get(key, "") not in values:
                known = ", ".join(filter(None, values))
                raise MetricsError(
                    f"{self._path}: {key} is {shown(tls[key])} and must be one of {known}", _REMEDY
                )
        verifies = _CLIENTS[tls.get("client_auth_type", "")]
        lacking = [key for key in _FILES[:2] if key not in named]
        lacking += ["client_ca_file"] if verifies and "client_ca_file" not in named else []
        if lacking:
            raise MetricsError(f"{self._path}: {_TLS} has no {lacking[0]}", _REMEDY)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[tls.get("min_version", "")]
        reading = named["cert_file"]
        try:
            context.load_cert_chain(named["cert_file"], named["key_file"], _no_password)
            if "client_ca_file" in named:
                reading = named["client_ca_file"]
                context.load_verify_locations(reading)
        except (OSError, ssl.SSLError) as error:
            raise MetricsError(
                f"{self._path}: {reading}, or its key, can't be used: {error.strerror or error}",
                "Give cert_file and key_file that belong together, in PEM and without a password",
            ) from None
        context.verify_mode = verifies
        return context


class _Said(NamedTuple):
    """What an Authorization header says, as far as bcrypt looks at the password."""

    user: str
    password: bytes
    digest: bytes  # of both


def _said(authorization: str) -> _Said | None:
    """Return what a header of RFC 7617 says, None where it is none."""
    scheme, _, words = authorization.partition(" ")
    try:
        name, colon, password = base64.b64decode(words.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    if scheme.lower() != "basic" or not colon or b"\0" in password:
        return None
    password = password[:_LONGEST]
    digest = hashlib.sha256(name + b":" + password).digest()
    return _Said(name.decode("utf-8", "replace"), password, digest)


def _cost(text: str) -> int:
    """Return the cost of a hash of bcrypt; each more doubles the time that a check takes."""
    return int(text[4:6])


def _no_password() -> str:
    raise ssl.SSLError(0, "it has a password")


def _identity(path: str) -> object:
    """Return what changes when a file is written or another takes its place."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _bcrypt() -> Any:
    try:
        import bcrypt  # noqa: PLC0415 - for who has passwords
    except ImportError:
        raise MetricsError(
            "Passwords need the Python package bcrypt, which isn't installed",
            "Install it: pip install bcrypt, with the pip beside gpuhook, or the package "
            "python3-bcrypt",
        ) from None
    return bcrypt


def _tables(path: str) -> Tables:
    """Return the sections of the file, with their values as text."""
    try:
        root = tree.read(files.read(path))
    except OSError as error:
        raise MetricsError(
            f"The file {path} of --web-config can't be read: {error.strerror or error}",
            "Name a file that is there, or leave the option out",
        ) from None
    except tree.TreeError as error:
        raise _wrong(path, error.line, error.sentence) from None
    sections = {} if root is None else _table(path, root, "the file", _SECTIONS)
    tls = sections.get(_TLS)
    found: Tables = {}
    if tls is not None:
        found[_TLS] = _texts(path, _table(path, tls, _TLS, _KEYS))
    if _USERS in sections:
        found[_USERS] = _texts(path, _table(path, sections[_USERS], _USERS, None))
    return found


def _table(
    path: str, node: tree.Node, where: str, known: Collection[str] | None
) -> dict[str, tree.Node]:
    if node.is_scalar and tree.scalar(node) is None:
        return {}
    if not node.is_table:
        raise _wrong(path, node.line, f"{where} must be a table, not {node.kind}")
    found: dict[str, tree.Node] = {}
    for key, value in zip(node.items[::2], node.items[1::2], strict=True):
        name = key.text or ""
        if name in found:
            raise _wrong(path, key.line, f"{shown(name)} comes twice")
        if known is not None and name not in known:  # protects: web-config-known
            sentence = f"{shown(name)} of {where} isn't known here, which has {', '.join(known)}"
            raise _wrong(path, key.line, sentence)
        found[name] = value
    return found


def _texts(path: str, table: dict[str, tree.Node]) -> dict[str, str]:
    for name, node in table.items():
        if not node.is_scalar:
            raise _wrong(path, node.line, f"{shown(name)} must be a text, not {node.kind}")
    return {name: node.text or "" for name, node in table.items()}


def _wrong(path: str, line: int | None, sentence: str) -> MetricsError:
    at = f", line {line}" if line else ""
    return MetricsError(f"{path}{at}: {sentence}", _REMEDY)
