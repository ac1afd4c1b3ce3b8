"""The search for the API server, and the checks that its access files can be trusted."""

import base64
import os
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import certify

from gpuhook.base.errors import GpuhookError, PluginError
from gpuhook.cluster.dra.access import Access, find

SERVER = "https://10.0.0.1:6443"


def config(user: dict[str, Any], cluster: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "current-context": "here",
        "contexts": [
            {"name": "there", "context": {}},
            {"name": "here", "context": {"cluster": "c", "user": "u"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": SERVER} if cluster is None else cluster}],
        "users": [{"name": "u", "user": user}],
    }


def written(folder: Path, document: object) -> str:
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_access_in_a_pod_is_found_from_its_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = find(environ=environ, secrets=str(tmp_path))
    assert (access.server, access.host, access.port) == ("https://[fd00::1]:6443", "fd00::1", 6443)
    assert access.token() == "one"
    (tmp_path / "token").write_text("two\n")  # renewed
    assert access.token() == "two"
    assert "two" not in repr(access)
    with pytest.raises(PluginError, match="isn't a pod"):
        find(environ={})


def test_an_explicit_server_address_is_used(tmp_path: Path) -> None:
    assert find(server="https://a.b/c/", environ={}).prefix == "/c"
    path = written(tmp_path, config({"token": "t"}))
    assert find(path, "https://other").server == "https://other"


@pytest.mark.protects(
    "token-over-tls",
    "DRA: a token is sent only over TLS",
    instead="good = found.hostname and not (found.query or found.fragment)",
)
@pytest.mark.parametrize(
    "server",
    ["http://a", "https://", "a:6443", "https://u:p@a", "https://a:0x1", "https://a/?b",
     "https://a b", "https://a\r\nX: y", "https://[::1", "file:///etc/passwd"],
)  # fmt: skip
def test_addresses_without_valid_tls_are_refused(server: str) -> None:
    with pytest.raises(PluginError, match="address can't be"):
        find(server=server, environ={})


def test_token_and_server_name_of_a_kubeconfig_are_used(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("from a file")
    access = find(written(tmp_path, config({"token": "given"})))
    assert (access.server, access.token()) == (SERVER, "given")
    access = find(written(tmp_path, config({"token": "given", "tokenFile": "t"})))
    with pytest.raises(PluginError, match="no token in"):  # the token has blanks
        access.token()
    (tmp_path / "t").write_text("other")
    assert access.token() == "other"
    cluster = {"server": SERVER, "tls-server-name": "kubernetes"}
    assert find(written(tmp_path, config({}, cluster))).server_name == "kubernetes"


def test_certificates_are_read_from_files_or_data(tmp_path: Path) -> None:
    certify(tmp_path)
    names = {"client-certificate": "client.crt", "client-key": "client.key"}
    authority = {"server": SERVER, "certificate-authority": "ca.crt"}
    access = find(written(tmp_path, config(names, authority)))
    first = access.context()
    assert access.context() is first
    (tmp_path / "client.crt").write_text((tmp_path / "client.crt").read_text() + "\n")
    assert access.context() is not first  # the certificate was renewed
    data = {
        f"{key}-data": base64.b64encode((tmp_path / name).read_bytes()).decode()
        for key, name in names.items()
    }
    assert find(written(tmp_path, config(data, authority))).context()


REFUSED = {
    "exec": ({"exec": {"command": "/bin/sh"}}, None, "exec: a program"),
    "provider": ({"auth-provider": {"name": "gcp"}}, None, "auth-provider: a program"),
    "password": ({"username": "u", "password": "p"}, None, "a password"),
    "another user": ({"token": "t", "as": "admin"}, None, "rights of another user"),
    "groups": ({"token": "t", "as-groups": ["a"]}, None, "rights of other groups"),
    "unchecked": ({}, {"server": SERVER, "insecure-skip-tls-verify": True}, "insecure-skip"),
    "proxy": ({}, {"server": SERVER, "proxy-url": "http://p"}, "proxy-url"),
    "key alone": ({"client-key": "k"}, None, "or only its key"),
    "no base 64": ({}, {"server": SERVER, "certificate-authority-data": "?"}, "isn't base64"),
    "no text": ({"token": 5}, None, "token in the kubeconfig"),
    "no server": ({}, {}, "address can't be"),
    "plain": ({}, {"server": "http://a"}, "address can't be"),
}  # fmt: skip


@pytest.mark.protects(
    "api-server-checked",
    "DRA: an API server without certificate verification is never contacted",
    only="unchecked",
)
@pytest.mark.protects(
    "kubeconfig-programs",
    "DRA: a kubeconfig user that needs a program, password or impersonation is refused",
)
@pytest.mark.parametrize(("user", "cluster", "word"), REFUSED.values(), ids=[*REFUSED])
def test_an_unsafe_or_invalid_kubeconfig_entry_is_refused(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any] | None, word: str
) -> None:
    with pytest.raises(PluginError, match=word):
        find(written(tmp_path, config(user, cluster)))


@pytest.mark.parametrize(
    "document",
    [None, [], "x", {}, {"current-context": "here"}, config({}) | {"users": []},
     config({}) | {"contexts": 3}, config({}) | {"clusters": [{"name": "c", "cluster": 1}]}],
)  # fmt: skip
def test_a_document_that_is_no_kubeconfig_is_refused(tmp_path: Path, document: object) -> None:
    with pytest.raises(PluginError, match="kubeconfig"):
        find(written(tmp_path, document))


def test_unreadable_access_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="No such file"):
        find(f"{tmp_path}/none")
    (tmp_path / "bad").write_text("a: [")
    with pytest.raises(PluginError, match="isn't valid YAML"):
        find(f"{tmp_path}/bad")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PluginError, match="regular file"):
        find(f"{tmp_path}/pipe")
    access = Access(SERVER, f"{tmp_path}/bad")
    with pytest.raises(PluginError, match="certificate"):
        access.context()


def test_an_authority_without_key_usage_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many clusters have such an authority; Python 3.13 and newer refuse it by default."""
    certify(tmp_path)
    default = ssl.create_default_context

    def strict(**given: Any) -> ssl.SSLContext:
        made = default(**given)
        made.verify_flags |= ssl.VERIFY_X509_STRICT
        return made

    monkeypatch.setattr(ssl, "create_default_context", strict)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with pytest.raises(ssl.SSLCertVerificationError, match="key usage"):
        shake(strict(cafile=f"{tmp_path}/ca.crt"), server)
    shake(Access(SERVER, f"{tmp_path}/ca.crt").context(), server)


def shake(ours: ssl.SSLContext, theirs: ssl.SSLContext) -> None:
    """Complete a TLS handshake between a client and a server."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ours.wrap_bio(back, there, server_hostname="kubernetes")
    server = theirs.wrap_bio(there, back, server_side=True)
    for side in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    assert client.getpeercert()


def test_an_encrypted_client_key_is_refused_without_a_prompt(tmp_path: Path) -> None:
    """OpenSSL would ask for the password at the terminal and wait there."""
    certify(tmp_path)
    words = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", "client.key"]
    subprocess.run([*words, "-out", "locked"], check=True, capture_output=True, cwd=tmp_path)
    user = {"client-certificate": "client.crt", "client-key": "locked"}
    with pytest.raises(PluginError, match="encrypted with a password"):
        find(written(tmp_path, config(user))).context()


@pytest.mark.protects(
    "kubeconfig-way",
    "DRA: a kubeconfig that other users can change is refused",
    instead="text = _read(path)",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has nobody above it")
def test_a_kubeconfig_in_another_users_folder_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, config({"token": "t"}))
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65533, 65533)
    (folder / "kubeconfig").write_bytes(Path(path).read_bytes())
    with pytest.raises(GpuhookError, match="theirs"):
        find(f"{folder}/kubeconfig")


@pytest.mark.protects(
    "kubeconfig-files",
    "DRA: files named in a kubeconfig are refused if other users can change them",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has somebody to fear")
@pytest.mark.parametrize("name", ["kubeconfig", "ca.crt", "client.crt", "client.key", "token"])
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_access_files_that_others_can_change_are_refused(
    tmp_path: Path, name: str, how: str
) -> None:
    """A user who can write one of them chooses the server, and so the allocated devices."""
    certify(tmp_path)
    (tmp_path / "token").write_text("t")
    user = {"client-certificate": "client.crt", "client-key": "client.key", "tokenFile": "token"}
    path = written(tmp_path, config(user, {"server": SERVER, "certificate-authority": "ca.crt"}))
    assert find(path).context()
    if how == "mode":
        (tmp_path / name).chmod(0o666)
    else:
        os.chown(tmp_path / name, 1000, 0)
    with pytest.raises(GpuhookError, match=f"{name} may be written by non-root users"):
        find(path)
