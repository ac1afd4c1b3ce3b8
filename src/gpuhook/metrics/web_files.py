"""The exporter's TLS and password file, read by root, and the files that it names.

https://prometheus.io/docs/prometheus/latest/configuration/https/ describes its format. Unknown keys
are refused, because they could restrict access to the metrics. The content is passed to the server
process (``web_config``), which can't open these files. All are read again when one has changed, for
instance a renewed certificate.
"""

import os
import re
from collections.abc import Collection
from typing import NamedTuple

from gpuhook.base.errors import MetricsError, shown
from gpuhook.base.host import files
from gpuhook.core.cdi import yaml_reader

_TLS = "tls_server_config"
_USERS = "basic_auth_users"
# http_server_config is about HTTP/2, which isn't supported.
_SECTIONS = (_TLS, _USERS, "http_server_config")
FILES = CERTIFICATE, KEY, AUTHORITIES = "cert_file", "key_file", "client_ca_file"
CLIENTS, VERSION = "client_auth_type", "min_version"
_KEYS = (*FILES, CLIENTS, VERSION)
VALUES = {
    CLIENTS: ("", "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"),
    VERSION: ("", "TLS12", "TLS13"),
}
_REMEDY = "Correct it; docs/metrics.md lists what it may hold"
_HASH = re.compile(r"\$2[abxy]\$[0-9]{2}\$[./A-Za-z0-9]{53}", re.ASCII)
COSTS = (4, 15)

Tables = dict[str, dict[str, str]]


class WebContent(NamedTuple):
    """The content of the file and of the files that it names.

    ``tls`` has values by key, None without TLS, and ``content`` the files' bytes by key. ``users``
    have bcrypt hashes. ``names`` are the files' paths by key.
    """

    path: str
    tls: dict[str, str] | None
    content: dict[str, bytes]
    users: dict[str, str]
    names: dict[str, str]


class WebFiles:
    """The file and the files that it names; ``read`` them again if one has changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._named = [path]
        self._seen: list[object] | None = None

    def has_changed(self) -> bool:
        """Tell whether a file has changed since it was read."""
        return self._seen != [*map(_identity, self._named)]

    def read(self) -> WebContent:
        """Return their content; MetricsError if it is invalid."""
        self._named = [self._path]
        self._seen = [_identity(self._path)]
        tables = _tables(self._path)
        tls, users = tables.get(_TLS), tables.get(_USERS, {})
        for name, text in users.items():
            _check_hash(self._path, name, text)
        folder = os.path.dirname(os.path.abspath(self._path))
        names = {
            key: os.path.join(folder, tls[key]) for key in FILES if tls is not None and tls.get(key)
        }
        self._named += names.values()
        self._seen += map(_identity, names.values())
        if tls is not None:
            _check_tls(self._path, tls)
        content = {key: _content(self._path, name) for key, name in names.items()}
        words = None if tls is None else {key: tls.get(key, "") for key in VALUES}
        return WebContent(self._path, words, content, users, names)


def cost(text: str) -> int:
    """Return the cost of a bcrypt hash; each increment doubles the time of a check."""
    return int(text[4:6])


def _check_hash(path: str, name: str, text: str) -> None:
    if not _HASH.fullmatch(text) or not COSTS[0] <= cost(text) <= COSTS[1]:
        raise MetricsError(
            f"{path}: the password of {shown(name)} in {_USERS} isn't a bcrypt hash "
            f"with a cost of {COSTS[0]} to {COSTS[1]}",
            "Make one: htpasswd -nBC 10 '' | tr -d ':\\n'",
        )


def _check_tls(path: str, tls: dict[str, str]) -> None:
    for key, values in VALUES.items():
        if tls.get(key, "") not in values:
            known = ", ".join(filter(None, values))
            raise MetricsError(
                f"{path}: {key} is {shown(tls[key])} and must be one of {known}", _REMEDY
            )
    verifies = tls.get(CLIENTS, "") not in ("", "NoClientCert")
    needed = FILES if verifies else FILES[:2]
    lacking = [key for key in needed if not tls.get(key)]
    if lacking:
        raise MetricsError(f"{path}: {_TLS} has no {lacking[0]}", _REMEDY)


def _content(path: str, name: str) -> bytes:
    try:
        return files.read(name)
    except OSError as error:
        raise unusable(path, name, error.strerror or str(error)) from None


def unusable(path: str, name: str, why: str) -> MetricsError:
    """Return the error for a certificate or key that can't be used."""
    return MetricsError(
        f"{path}: {name}, or its key, can't be used: {why}",
        "Give cert_file and key_file that belong together, in PEM and without a password",
    )


def _identity(path: str) -> object:
    """Return a value that changes when a file is written or replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _tables(path: str) -> Tables:
    """Return the sections of the file, with their values as text."""
    try:
        root = yaml_reader.read(files.read(path))
    except OSError as error:
        raise MetricsError(
            f"The file {path} of --web-config can't be read: {error.strerror or error}",
            "Name a file that is there, or leave the option out",
        ) from None
    except yaml_reader.TreeError as error:
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
    path: str, node: yaml_reader.YamlNode, where: str, known: Collection[str] | None
) -> dict[str, yaml_reader.YamlNode]:
    if node.is_scalar and yaml_reader.scalar(node) is None:
        return {}
    if not node.is_table:
        raise _wrong(path, node.line, f"{where} must be a table, not {node.kind}")
    found: dict[str, yaml_reader.YamlNode] = {}
    for key, value in zip(node.items[::2], node.items[1::2], strict=True):
        name = key.text or ""
        if name in found:
            raise _wrong(path, key.line, f"{shown(name)} comes twice")
        if known is not None and name not in known:  # protects: web-config-known
            sentence = f"{shown(name)} of {where} is unknown; known are {', '.join(known)}"
            raise _wrong(path, key.line, sentence)
        found[name] = value
    return found


def _texts(path: str, table: dict[str, yaml_reader.YamlNode]) -> dict[str, str]:
    for name, node in table.items():
        if not node.is_scalar:
            raise _wrong(path, node.line, f"{shown(name)} must be a text, not {node.kind}")
    return {name: node.text or "" for name, node in table.items()}


def _wrong(path: str, line: int | None, sentence: str) -> MetricsError:
    at = f", line {line}" if line else ""
    return MetricsError(f"{path}{at}: {sentence}", _REMEDY)
