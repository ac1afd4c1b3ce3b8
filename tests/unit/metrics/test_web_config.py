"""TLS and passwords of the exporter, checked by Python's own client, and their settings file."""

import base64
import http.client
import mmap
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from serving import serving
from timeouts import in_time

from gpuhook.base.errors import MetricsError
from gpuhook.metrics.web_config import WebConfig
from gpuhook.metrics.web_files import WebFiles

PASSWORD = "secret: with a colon"  # noqa: S105 - of a test
TLS = "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate authority, and its certificates for two servers and a client."""
    folder = tmp_path_factory.mktemp("certificates")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2"]

    def make(name: str, *more: str) -> None:
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        subprocess.run([*words, *files, *more], cwd=folder, check=True, capture_output=True)

    make("ca", "-addext", "keyUsage=critical,keyCertSign")  # Python 3.13 requires keyUsage
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE")
    for name in ("server", "other", "client"):
        make(name, *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    return folder


@pytest.fixture
def folder(tmp_path: Path, certificates: Path) -> Path:
    for each in certificates.iterdir():
        os.link(each, tmp_path / each.name)
    return tmp_path


def web_of(folder: Path) -> WebConfig:
    """Return the settings that the server process reads from the file."""
    return WebConfig(WebFiles(str(folder / "web.yml")).read())


def allows(web: WebConfig, authorization: str) -> bool:
    """Return whether the server process accepts a password, after a check if it needs one."""
    answer = web.answer(authorization)
    if answer is None:
        answer = web.check(authorization)
        web.remember(authorization, right=answer)
    return answer


def hashed(password: str, cost: int = 4) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()


@contextmanager
def served(folder: Path, text: str) -> Iterator[tuple[str, int]]:
    (folder / "web.yml").write_text(text)
    with serving(folder, web=folder / "web.yml") as address:
        yield address


def context(folder: Path, client: str = "") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=folder / "ca.pem")
    if client:
        made.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    return made


def in_tls(address: tuple[str, int], folder: Path, source: str = "127.0.0.1") -> ssl.SSLSocket:
    """Return a connection from a local address, after the TLS handshake."""
    made = socket.create_connection(address, 60, source_address=(source, 0))
    return context(folder).wrap_socket(made, server_hostname="127.0.0.1")


def asked(
    address: tuple[str, int], tls: ssl.SSLContext | None, user: str = "", password: str = ""
) -> int:
    """Return the status of an answer, which is complete."""
    made = (
        http.client.HTTPConnection(*address, timeout=60)
        if tls is None
        else http.client.HTTPSConnection(*address, timeout=60, context=tls)
    )
    words = base64.b64encode(f"{user}:{password}".encode()).decode()
    try:
        made.request("GET", "/metrics", headers={"Authorization": f"Basic {words}"} if user else {})
        answer = made.getresponse()
        assert b"gpuhook_metrics_complete" in answer.read() or answer.status != 200
        if answer.status == 401:
            assert str(answer.headers["WWW-Authenticate"]).startswith("Basic ")
        return answer.status
    finally:
        made.close()


def test_with_tls_only_tls_clients_are_answered(folder: Path) -> None:
    with served(folder, TLS) as address:
        assert asked(address, context(folder)) == 200
        with pytest.raises((http.client.HTTPException, OSError)):
            asked(address, None)
        old = context(folder)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert asked(address, old) == 200


def test_a_client_that_starts_no_tls_does_not_delay_others(folder: Path) -> None:
    with served(folder, TLS) as address, socket.create_connection(address, 60):
        assert asked(address, context(folder)) == 200


def test_tls_below_the_minimum_version_is_refused(folder: Path) -> None:
    with served(folder, TLS.replace("}", ", min_version: TLS13}")) as address:
        assert asked(address, context(folder)) == 200
        old = context(folder)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            asked(address, old)


@pytest.mark.protects(
    "web-config-followed", "metrics: a changed web configuration file applies at once"
)
def test_a_renewed_certificate_is_used_and_an_invalid_one_ignored(folder: Path) -> None:
    """The files are replaced by others, as Kubernetes does with the files of a Secret."""
    with served(folder, TLS) as address:
        assert _subject(address, folder) == "server"
        for kind in ("pem", "key"):
            (folder / f"other.{kind}").rename(folder / f"server.{kind}")
        assert _subject(address, folder) == "other"
        (folder / "server.key").write_text("broken")
        assert _subject(address, folder) == "other", "what was right counts on"
        with in_time():
            while "stays in use" not in (folder / "told").read_text():
                time.sleep(0.01)


def _subject(address: tuple[str, int], folder: Path) -> str:
    made = http.client.HTTPSConnection(*address, timeout=60, context=context(folder))
    made.connect()
    found: Any = made.sock.getpeercert()
    made.close()
    return str(found["subject"][0][0][1])


def test_a_client_without_a_required_certificate_is_refused(folder: Path) -> None:
    more = ", client_ca_file: ca.pem, client_auth_type: RequireAndVerifyClientCert}"
    with served(folder, TLS.replace("}", more)) as address:
        assert asked(address, context(folder, "client")) == 200
        with pytest.raises((ssl.SSLError, OSError)):
            asked(address, context(folder))


@pytest.mark.protects(
    "web-password",
    "metrics: a client without a valid password gets no metrics",
    instead="answer = http_request.elsewhere(client.request)",
)
@pytest.mark.protects(
    "web-config-followed", "metrics: a changed web configuration file applies at once"
)
def test_only_valid_and_current_passwords_are_accepted(folder: Path) -> None:
    users = f"basic_auth_users: {{anna: {hashed(PASSWORD)}, bert: {hashed('other')}}}\n"
    with served(folder, users) as address:
        for _ in range(2):
            assert asked(address, None, "anna", PASSWORD) == 200
            assert asked(address, None, "anna", "other") == 401
        assert asked(address, None, "bert", "other") == 200
        assert asked(address, None) == 401
        assert asked(address, None, "carl", "") == 401
        # A removed user is refused at once.
        (folder / "web.yml").write_text(f"basic_auth_users: {{bert: {hashed('other')}}}\n")
        assert asked(address, None, "anna", PASSWORD) == 401
        assert asked(address, None, "bert", "other") == 200


@pytest.mark.protects(
    "followed-at-once",
    "metrics: a changed web configuration also applies to connections that are already open",
    instead="pass",
)
def test_a_removed_password_is_refused_on_an_open_connection(folder: Path) -> None:
    users = f"basic_auth_users: {{a: {hashed('b')}}}\n"
    with served(folder, users) as address, socket.create_connection(address, 60) as made:
        assert asked(address, None, "a", "b") == 200
        made.sendall(request("b")[:9])
        assert asked(address, None, "a", "b") == 200  # the server has now started the request above
        (folder / "web.yml").write_text(f"basic_auth_users: {{a: {hashed('other')}}}\n")
        made.sendall(request("b")[9:])
        with suppress(ConnectionError):
            assert made.recv(12) in (b"", b"HTTP/1.0 401")
        assert asked(address, None, "a", "other") == 200


class Checks:
    """Counts of password checks and costs of hashes; wrong passwords wait until they are released.

    They are in memory that child processes share, because the server process opens none of our
    files.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._shared = mmap.mmap(-1, 1 << 12)  # numbers started, released and done; then the costs
        self._check = bcrypt.checkpw
        monkeypatch.setattr(bcrypt, "checkpw", self._checked)

    def _number(self, at: int, more: int = 0) -> int:
        """Add to a shared number and return it; one process and thread at a time adds to each."""
        number = int.from_bytes(self._shared[4 * at : 4 * at + 4]) + more
        self._shared[4 * at : 4 * at + 4] = number.to_bytes(4)
        return number

    def _checked(self, password: bytes, made: bytes) -> bool:
        begun = self._number(0, 1)
        self._shared[100 + begun] = int(made[4:6])
        right = self._check(password, made)
        if not right:
            done = self._number(2, 1)
            while self._number(1) < done:
                time.sleep(0.002)
        return right

    @property
    def costs(self) -> list[int]:
        return list(self._shared[101 : 101 + self._number(0)])

    def let_go(self, count: int) -> None:
        self._number(1, count)

    def wait_for(self, count: int) -> None:
        with in_time():
            while len(self.costs) < count:
                time.sleep(0.01)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


def basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def request(password: str) -> bytes:
    return f"GET /metrics HTTP/1.1\r\nAuthorization: {basic('a', password)}\r\n\r\n".encode()


@pytest.mark.protects(
    "web-password",
    "metrics: a client without a valid password gets no metrics",
    instead="answer = http_request.elsewhere(client.request)",
)
@pytest.mark.protects(
    "web-config-followed", "metrics: a changed web configuration file applies at once"
)
def test_wrong_passwords_do_not_evict_cached_valid_ones(folder: Path, checks: Checks) -> None:
    (folder / "web.yml").write_text(f"basic_auth_users: {{a: {hashed('b')}, c: {hashed('d')}}}\n")
    web = web_of(folder)
    checks.let_go(1000)
    assert allows(web, basic("a", "b"))
    assert allows(web, basic("c", "d"))
    for number in range(300):
        assert not allows(web, basic("ac"[number % 2], f"wrong {number}"))
    assert len(checks.costs) == 302
    assert allows(web, basic("a", "b"))
    assert allows(web, basic("c", "d"))
    assert not allows(web, basic("a", "wrong 298"))
    assert len(checks.costs) == 302
    assert not allows(web, basic("a", "d")), "of another user"


@pytest.mark.protects(
    "unknown-user-time",
    "metrics: checking an unknown user takes as long as the slowest password check",
    instead="self._nobody = _NOBODY % 10",
)
def test_an_unknown_user_takes_as_long_as_the_slowest_password(
    folder: Path, checks: Checks
) -> None:
    users = ", ".join(f"u{cost}: {hashed('b', cost)}" for cost in (5, 8, 4))
    (folder / "web.yml").write_text(f"basic_auth_users: {{{users}}}\n")
    web = web_of(folder)
    checks.let_go(2)
    assert not allows(web, basic("u8", "wrong"))
    assert not allows(web, basic("nobody", "wrong"))
    assert checks.costs == [8, 8]


@pytest.mark.protects(
    "checks-beside",
    "metrics: a password check doesn't delay other clients",
    instead="self._run()",
)
def test_pending_password_checks_do_not_delay_other_clients(folder: Path, checks: Checks) -> None:
    """This holds with TLS, too, for remembered passwords and for answers that need no password."""
    users = f"basic_auth_users: {{a: {hashed('b')}}}\n"
    with served(folder, TLS + users) as address, ExitStack() as others:
        others.callback(checks.let_go, 100)  # so that a failing test doesn't hang
        assert asked(address, context(folder), "a", "b") == 200
        wrong = []
        for number in range(9):
            wrong.append(others.enter_context(in_tls(address, folder)))
            wrong[-1].sendall(request(f"wrong {number}"))
        checks.wait_for(2)  # the right password, and one of the wrong ones
        for _ in range(3):
            assert asked(address, context(folder), "a", "b") == 200
        assert asked(address, context(folder)) == 401
        checks.let_go(9)
        assert all(each.recv(12) == b"HTTP/1.0 401" for each in wrong)
    assert len(checks.costs) == 10


@pytest.mark.protects(
    "fair-checks",
    "metrics: passwords of clients with fewer wrong attempts are checked first",
    instead="chosen = waiting[0]",
)
def test_a_new_client_is_checked_before_a_password_guesser(folder: Path, checks: Checks) -> None:
    """Of the clients with passwords to check, the one with the fewest wrong ones comes first."""
    users = f"basic_auth_users: {{a: {hashed('b')}}}\n"
    with served(folder, users) as address, ExitStack() as others:
        others.callback(checks.let_go, 100)  # so that a failing test doesn't hang
        for number in range(12):
            wrong = others.enter_context(socket.create_connection(address, 60))
            wrong.sendall(request(f"wrong {number}"))
        checks.wait_for(1)
        made = socket.create_connection(address, 60, source_address=("127.0.0.2", 0))
        others.enter_context(made)
        made.sendall(request("b"))
        assert asked(address, None) == 401  # a later request is answered, so made's was read
        checks.let_go(1)
        assert made.recv(12) == b"HTTP/1.0 200"


def test_many_silent_handshakes_do_not_delay_another_client(folder: Path) -> None:
    """One address opens more connections than allowed; another address is served all the while."""
    with served(folder, TLS) as address, ExitStack() as others:
        for _ in range(40):
            others.enter_context(socket.create_connection(address, 60))
        for _ in range(3):
            tls = others.enter_context(in_tls(address, folder, "127.0.0.2"))
            others.enter_context(socket.create_connection(address, 60))
            tls.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert tls.recv(12) == b"HTTP/1.0 200"


@pytest.mark.protects(
    "password-nul",
    "metrics: a password with a NUL character is refused",
    instead='if scheme.lower() != "basic" or not colon:',
)
@pytest.mark.parametrize("password", ["b\0", "b\0c", "\0", "\0b"])
def test_a_password_with_a_nul_byte_is_refused(folder: Path, checks: Checks, password: str) -> None:
    """bcrypt raises an error, or checks only the part before it, so the beginning would suffice."""
    users = f"basic_auth_users: {{a: {hashed('b')}}}\n"
    with served(folder, users) as address:
        assert asked(address, None, "a", password) == 401
        assert checks.costs == []
        assert asked(address, None, "a", "b") == 200


@pytest.mark.protects(
    "web-password",
    "metrics: a client without a valid password gets no metrics",
    instead="answer = http_request.elsewhere(client.request)",
)
@pytest.mark.protects(
    "web-config-followed", "metrics: a changed web configuration file applies at once"
)
def test_clients_with_wrong_passwords_do_not_displace_a_valid_one(
    folder: Path, checks: Checks
) -> None:
    """The valid client has started a request from another address and is remembered."""
    users = f"basic_auth_users: {{a: {hashed('b')}}}\n"
    with served(folder, users) as address, ExitStack() as others:
        others.callback(checks.let_go, 100)  # so that a failing test doesn't hang
        assert asked(address, None, "a", "b") == 200
        made = socket.create_connection(address, 60, source_address=("127.0.0.2", 0))
        others.enter_context(made)
        made.sendall(request("b")[:9])
        for number in range(80):
            with suppress(ConnectionError):  # the server has already closed this connection
                wrong = others.enter_context(socket.create_connection(address, 60))
                wrong.sendall(request(f"wrong {number}"))
            if number % 20 == 19:
                checks.let_go(1)
                checks.wait_for(2 + number // 20)
        made.sendall(request("b")[9:])
        checks.let_go(80)
        assert made.recv(12) == b"HTTP/1.0 200"


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic ", "Basic !", "Bearer YTpi", "Basic YQ==", "Basic /w==", "Basic AAA6AAA="],
)
def test_malformed_authorization_headers_are_refused(folder: Path, header: str) -> None:
    (folder / "web.yml").write_text(f"basic_auth_users: {{a: {hashed('b')}}}\n")
    web = web_of(folder)
    assert allows(web, "basic YTpi")
    assert not allows(web, header)


@pytest.mark.protects(
    "web-config-known", "metrics: unknown keys in the web configuration file are refused"
)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls_server_config: {}\n", "tls_server_config has no cert_file"),
        ("tls_server_config: {cert_file: server.pem}\n", "has no key_file"),
        (TLS.replace("server.key", "none"), "No such file"),
        (TLS.replace("server.key", "other.key"), "can't be used"),
        (TLS.replace("}", ", client_auth_type: RequestClientCert}"), "must be one of NoClientCert"),
        (
            TLS.replace("}", ", client_auth_type: RequireAndVerifyClientCert}"),
            "has no client_ca_file",
        ),
        (TLS.replace("}", ", min_version: TLS10}"), "must be one of TLS12, TLS13"),
        (TLS.replace("}", ", client_allowed_sans: [a]}"), "'client_allowed_sans' of"),
        ("basic_auth_users: {a: secret}\n", "isn't a bcrypt hash"),
        (f"basic_auth_users: {{a: $2b$31${'a' * 53}}}\n", "a cost of 4 to 15"),
        ("basic_auth_users: [a]\n", "must be a table, not a list"),
        ("rate_limit: {}\n", "line 1: 'rate_limit' of the file is unknown"),
        ("[", "neither YAML nor JSON"),
    ],
)
def test_an_invalid_web_config_is_refused_with_the_reason(
    folder: Path, text: str, said: str
) -> None:
    (folder / "web.yml").write_text(text)
    with pytest.raises(MetricsError) as refused:
        web_of(folder)
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "tls_server_config:\nbasic_auth_users:\n", "{}"])
def test_an_empty_web_config_allows_plain_http_without_passwords(folder: Path, text: str) -> None:
    (folder / "web.yml").write_text(text)
    if text.startswith("tls"):
        with pytest.raises(MetricsError, match="has no cert_file"):
            web_of(folder)
        return
    web = web_of(folder)
    assert (web.scheme, allows(web, "")) == ("http", True)


def test_a_missing_web_config_is_an_error() -> None:
    with pytest.raises(MetricsError, match="can't be read"):
        WebFiles("/nonexistent").read()
