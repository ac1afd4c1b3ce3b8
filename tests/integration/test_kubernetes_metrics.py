"""The image's exporter, run by podman as overlays/metrics would, with a simulated kubelet."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import pytest
import yaml
from harness.commands import Result, wait_until
from harness.driver import Driver
from harness.manifests import MANIFESTS, Document, daemon_set
from harness.podman_node import Node, node
from pod_resources import PodResources

RECORDS = "/run/gpuhook/containers"
FOLDER = "/var/lib/kubelet/pod-resources"
PASSWORD = "secret"  # noqa: S105 - of a test
SCRAPE = """
import ssl, sys, urllib.request
url, authority, password = sys.argv[1:]
context = ssl.create_default_context(cafile=authority) if authority else None
passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
passwords.add_password(None, url, "prometheus", password)
handlers = [urllib.request.HTTPBasicAuthHandler(passwords)]
handlers += [urllib.request.HTTPSHandler(context=context)] if context else []
print(urllib.request.build_opener(*handlers).open(url, timeout=20).read().decode())
"""


@pytest.fixture(scope="module")
def kept(workspace: Path, node_image: Path) -> Iterator[Node]:
    with node(workspace / "metrics-node", node_image) as made:
        yield made


@contextmanager
def exporter(kept: Node, document: Document, host: dict[str, str]) -> Iterator[str]:
    """Run the exporter until the end of the block; yield its container."""
    container = kept.begin(document, "metrics", host=host)
    try:
        yield container
        kept.podman.call("kill", "--signal=TERM", container).ok()
        kept.end(container).ok()
    finally:
        kept.podman.call("rm", "--force", "--ignore", container)


def scraped(
    kept: Node, container: str, url: str, authority: str = "", password: str = ""
) -> Result:
    """Scrape from within the pod's network."""
    pid = kept.podman.call("inspect", "--format={{.State.Pid}}", container).ok().stdout.strip()
    words = ("nsenter", f"--net=/proc/{pid}/ns/net", "python3", "-c", SCRAPE)
    return kept.space.run(*words, url, authority, password)


def lines(kept: Node, container: str, *options: str) -> list[str]:
    """Return the lines of a scrape; wait until the exporter serves them."""
    done: list[Result] = []

    def is_there() -> bool:
        done[:] = [scraped(kept, container, *options)]
        return done[0].status == 0

    log = kept.podman.call("logs", container)
    wait_until(is_there, "the exporter answers", shown=lambda: f"{done}\n{log}")
    return done[0].stdout.splitlines()


@pytest.fixture
def host(driver: Driver, tmp_path: Path) -> dict[str, str]:
    """Folders that replace the node's folders, with one for a kubelet's socket."""
    for name in ("records", "kubelet"):
        (tmp_path / name).mkdir(mode=0o700)
    return {"/": str(driver.root), RECORDS: f"{tmp_path}/records", FOLDER: f"{tmp_path}/kubelet"}


def test_metrics_name_devices_and_pods(kept: Node, driver: Driver, host: dict[str, str]) -> None:
    gpu = driver.gpus[1].uuid
    given = ("space", "alone", "web", "nvidia.com/gpu", (gpu,))
    document = daemon_set("overlays/metrics", "metrics")
    with (
        PodResources(Path(host[FOLDER]) / "kubelet.sock", given),
        exporter(kept, document, host) as container,
    ):
        url = "http://127.0.0.1:9836/metrics"

        def assigned() -> list[str]:
            name = "gpuhook_container_gpu_assigned{"
            return [each for each in lines(kept, container, url) if each.startswith(name)]

        found = lines(kept, container, url)
        assert sum(each.startswith("gpuhook_gpu_info{") for each in found) == len(driver.gpus)
        wait_until(lambda: len(assigned()) == 1, "the kubelet is heard")
        [line] = assigned()
        assert f'uuid="{gpu}"' in line
        assert 'namespace="space"' in line
        assert 'pod="alone"' in line
        said = kept.podman.call("logs", container).ok().stderr.splitlines()
        # The log has only the usual messages, and one that is due to the test setup: the node isn't
        # a separate machine.
        known = ("Listening at", "NVIDIA: Driver", "This runs in a separate pid namespace")
        assert [
            each for each in said if not each.startswith(tuple(map("gpuhook: {}".format, known)))
        ] == []


def certificate(folder: Path) -> None:
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", "tls.key", "-out", "tls.crt"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)


def test_metrics_are_served_only_with_tls_and_the_password(
    kept: Node, host: dict[str, str], tmp_path: Path
) -> None:
    """The overlay and the Secret are those of the page; nothing is served without the Secret."""
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    place = os.path.relpath(MANIFESTS, overlay)
    text = f"resources: [{place}/overlays/metrics]\ncomponents: [{place}/components/web-config]\n"
    (overlay / "kustomization.yaml").write_text(text)
    document = daemon_set(overlay, "metrics")
    secret = tmp_path / "secret"
    secret.mkdir()
    certificate(secret)
    users = {"prometheus": bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()}
    tls = {"cert_file": "tls.crt", "key_file": "tls.key"}
    config = {"tls_server_config": tls, "basic_auth_users": users}
    (secret / "web-config.yml").write_text(yaml.safe_dump(config))
    with exporter(kept, document, {**host, "gpuhook-metrics": str(secret)}) as container:
        url, authority = "https://127.0.0.1:9836/metrics", f"{secret}/tls.crt"
        found = lines(kept, container, url, authority, PASSWORD)
        assert any(each.startswith("gpuhook_gpu_info{") for each in found)
        refused = scraped(kept, container, url, authority, "other").failed()
        assert "401" in refused.stderr
        plain = scraped(kept, container, url.replace("https", "http"), "", PASSWORD).failed()
        assert "gpuhook_" not in plain.stdout
