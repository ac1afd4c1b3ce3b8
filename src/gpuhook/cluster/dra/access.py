"""The API server's address and credentials: from a pod's service account or a kubeconfig's user.

Tokens, certificates and keys are read again when their files have changed: the kubelet renews a
pod's token every hour, and its own certificate from time to time. Only names of files and servers
are ever printed.
"""

import base64
import binascii
import os
import ssl
from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from urllib.parse import urlsplit

from gpuhook.base.errors import PluginError, shown
from gpuhook.base.host import files as host_files

SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"
_MOST = 1 << 20  # bytes of a kubeconfig, of a certificate
_LONGEST_TOKEN = 64 << 10
# Other fields of a kubeconfig's user, and why they aren't supported.
_REFUSED = {
    "exec": "a program that would have to run as root",
    "auth-provider": "a program that would have to run as root",
    "username": "a password",
    "password": "a password",
    "as": "the rights of another user",
    "as-uid": "the rights of another user",
    "as-groups": "the rights of other groups",
    "as-user-extra": "the rights of another user",
}


class Access:
    """The address and credentials for one API server.

    ``ca``, ``token``, ``certificate`` and ``key`` are paths, or the content as bytes, or None.
    Without ``ca`` the system's certificate authorities are trusted.
    """

    def __init__(
        self,
        server: str,
        ca: str | bytes | None,
        *,
        token: str | bytes | None = None,
        certificate: str | bytes | None = None,
        key: str | bytes | None = None,
        server_name: str = "",
    ) -> None:
        self.server = server
        self.host, self.port, self.prefix = _parts(server)
        self.server_name = server_name or self.host
        self._ca = ca
        self._token = token
        self._certificate = certificate
        self._key = key
        self._stamps: object = None
        self._context: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"Access({self.server!r})"

    def token(self) -> str:
        """Return the current token, "" for none; PluginError if it can't be read."""
        if self._token is None:
            return ""
        if isinstance(self._token, bytes):
            return _as_token(self._token, "the kubeconfig's token")
        return _as_token(_read(self._token, _LONGEST_TOKEN), self._token)

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for connections, with the current certificates."""
        stamps = [
            _stamp(each)
            for each in (self._ca, self._certificate, self._key)
            if isinstance(each, str)
        ]
        if self._context is None or stamps != self._stamps:
            self._context = self._made()
            self._stamps = stamps
        return self._context

    def _made(self) -> ssl.SSLContext:
        try:
            if self._ca is None:
                context = ssl.create_default_context()
            else:
                raw = self._ca if isinstance(self._ca, bytes) else _read(self._ca)
                context = ssl.create_default_context(cadata=raw.decode("ascii", "replace"))
        except ssl.SSLError as error:
            _fail(f"The authority's certificate {_named(self._ca)} is invalid: {error.reason}")
        # Python 3.13 and later reject authorities without key usage, which kubectl accepts.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self._certificate is not None and self._key is not None:
            _load(context, self._certificate, self._key)
        return context


def find(
    kubeconfig: str | None = None,
    server: str | None = None,
    environ: Mapping[str, str] = os.environ,
    secrets: str = SECRETS,
) -> Access:
    """Return the access to the API server: by a kubeconfig, else as the pod's service account.

    ``server`` is the address (https://...) in place of the kubeconfig's or the pod's. PluginError,
    with a sentence, if neither is available.
    """
    if kubeconfig:
        return from_kubeconfig(kubeconfig, server)
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT")
    if not server and not host:
        raise PluginError(
            "There is no API server to ask: this isn't a pod, and no kubeconfig is given",
            "Run it in a pod with a service account, or name a file with --kubeconfig",
        )
    address = f"[{host}]" if ":" in host else host
    return Access(
        server or f"https://{address}:{port or '443'}",
        f"{secrets}/ca.crt",
        token=f"{secrets}/token",
    )


# A kubeconfig ------------------------------------------------------------------------------------


def from_kubeconfig(path: str, server: str | None = None) -> Access:
    """Return the access of a kubeconfig's current context; PluginError if it has none.

    Programs (exec) aren't run, and servers without a certificate check aren't used. If this process
    is root, other users must not be able to write the file, or the files that it names.
    """
    import yaml  # noqa: PLC0415 - a pod needs no kubeconfig, so it saves the memory

    try:
        text = _read(path, by=host_files.read_roots)  # protects: kubeconfig-way
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        _fail(f"The kubeconfig {path} isn't valid YAML", "Give one that kubectl accepts")
    if not isinstance(document, dict):
        _fail(f"The kubeconfig {path} isn't a table", "Give one that kubectl accepts")
    current = document.get("current-context")
    context = _entry(path, document, "context", current)
    cluster = _entry(path, document, "cluster", context.get("cluster"))
    user = _entry(path, document, "user", context.get("user"))
    for field, what in _REFUSED.items():
        if user.get(field):  # protects: kubeconfig-programs
            _fail(
                f"The user in the kubeconfig {path} has {field}: {what}, which gpuhook doesn't use",
                "Give it a client certificate or a token of its own",
            )
    if cluster.get("insecure-skip-tls-verify"):  # protects: api-server-checked
        _fail(
            f"The kubeconfig {path} has insecure-skip-tls-verify: anyone could pose as the server",
            "Set certificate-authority instead",
        )
    if cluster.get("proxy-url"):
        _fail(f"The kubeconfig {path} has proxy-url, which gpuhook doesn't use", "Remove it")
    base = os.path.dirname(os.path.abspath(path))
    certificate = _either(path, base, user, "client-certificate")
    key = _either(path, base, user, "client-key")
    if (certificate is None) != (key is None):
        _fail(f"The kubeconfig {path} has only a client certificate or only its key", "Set both")
    token_file = _text(path, user, "tokenFile")  # has precedence over the token, as in kubectl
    words = _text(path, user, "token").encode()
    token = _believed(base, token_file) if token_file else words or None
    return Access(
        server or _text(path, cluster, "server"),
        _either(path, base, cluster, "certificate-authority"),
        token=token,
        certificate=certificate,
        key=key,
        server_name=_text(path, cluster, "tls-server-name"),
    )


def _entry(path: str, document: dict[str, Any], kind: str, name: object) -> dict[str, Any]:
    """Return the entry of a name in a kubeconfig's list."""
    several = document.get(f"{kind}s")
    named: list[dict[str, Any]] = [
        each[kind]
        for each in (several if isinstance(several, list) else [])
        if isinstance(each, dict) and each.get("name") == name and isinstance(each.get(kind), dict)
    ]
    if not named or not name:
        _fail(
            f"The kubeconfig {path} has no {kind} {shown(name or '')}",
            "Check it with `kubectl config view --minify`",
        )
    return named[0]


def _either(path: str, base: str, table: dict[str, Any], name: str) -> str | bytes | None:
    """Return the inline data of a field, or else its path, in kubectl's order of preference."""
    data = _text(path, table, f"{name}-data")
    if data:
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            _fail(f"{name}-data in the kubeconfig {path} isn't base64", "Encode it again")
    named = _text(path, table, name)
    return _believed(base, named) if named else None


def _believed(base: str, named: str) -> str:
    """Return the path of a file that a kubeconfig names; UntrustedPathError for another user's."""
    path = os.path.join(base, named)
    host_files.check_writers(path)  # protects: kubeconfig-files
    return path


def _text(path: str, table: dict[str, Any], name: str) -> str:
    value = table.get(name) or ""
    if not isinstance(value, str):
        _fail(f"{name} in the kubeconfig {path} isn't a string", "Put it in quotes")
    return value


# Small things -----------------------------------------------------------------------------------


def _parts(server: str) -> tuple[str, int, str]:
    """Return host, port and path of a server's address; PluginError if it is invalid."""
    try:
        found = urlsplit(server)
        port = found.port or 443
    except ValueError:
        found, port = urlsplit(""), 0
    # protects: token-over-tls
    good = found.scheme == "https" and found.hostname and not (found.query or found.fragment)
    if not good or found.username is not None or not server.isprintable() or " " in server:
        _fail(
            f"The API server's address can't be {shown(server)}",
            "Write https://HOST:PORT: a token is sent only over https",
        )
    return found.hostname or "", port, found.path.rstrip("/")


def _as_token(raw: bytes, where: str) -> str:
    try:
        text = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable() or " " in text:
        _fail(f"There is no token in {where}", "Check the program that writes it")
    return text


def _read(
    path: str, most: int = _MOST, *, by: Callable[[str, int], bytes] = host_files.read
) -> bytes:
    try:
        return by(path, most)
    except OSError as error:
        _fail(f"{path} can't be read: {error.strerror}", "It is needed to ask the API server")


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = host_files.status_of(path)
    except OSError as error:
        _fail(f"{path} can't be read: {error.strerror}", "It is needed to ask the API server")
    return status.st_ino, status.st_mtime_ns, status.st_size


def _load(context: ssl.SSLContext, certificate: str | bytes, key: str | bytes) -> None:
    """Load a client certificate into the context; inline data is put into memory files for that."""
    opened: list[int] = []
    try:
        shown_to_all, secret = _as_path(certificate, opened), _as_path(key, opened)
        context.load_cert_chain(shown_to_all, secret, _refuse_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        _fail(f"The client certificate {_named(certificate)} can't be used: {why}")
    finally:
        for fd in opened:
            os.close(fd)


def _as_path(given: str | bytes, opened: list[int]) -> str:
    if isinstance(given, str):
        return given
    fd = os.memfd_create("gpuhook", os.MFD_CLOEXEC)
    opened.append(fd)
    os.write(fd, given)
    return f"/proc/self/fd/{fd}"


def _refuse_password() -> NoReturn:
    """Prevent OpenSSL from asking for the password of an encrypted key at a terminal."""
    raise ValueError("its key is encrypted with a password")


def _named(given: str | bytes | None) -> str:
    return given if isinstance(given, str) else "in the kubeconfig"


def _fail(cause: str, remedy: str = "Give one that kubectl accepts") -> NoReturn:
    raise PluginError(cause, remedy)
