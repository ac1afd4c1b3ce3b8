"""Checks of containerd's files in distributions, and of byte order marks in engines' files."""

import codecs
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import starts
from fabricated import BIN, BOOT, Tree, said

from gpuhook.tools.doctor import docker as docker_checks
from gpuhook.tools.doctor import engines
from gpuhook.tools.engines import containerd, installer
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.files import DROP_IN_HEADER
from gpuhook.tools.engines.store import Store

GPU_PY = f"{BIN}/gpu-py"
RANCHERS = "var/lib/rancher/k3s/agent/etc/containerd"
KINDS: dict[str, Callable[[Path], Any]] = {
    "k3s": lambda root: starts.Ranchers(root / RANCHERS),
    "k3s imports": lambda root: starts.Ranchers(root / RANCHERS, imports=True),
    "microk8s": lambda root: starts.MicroK8s(root / "var/snap/microk8s/1/args"),
    "k0s": lambda root: starts.K0s(root / "etc/k0s"),
    "k0s 2": lambda root: starts.K0s(root / "etc/k0s", 2),
}
RESTARTS = {"k3s": "systemctl restart k3s", "micr": "snap restart", "k0s": "k0s does so by itself"}


class Site:
    """A Kubernetes distribution on a simulated machine, and the containerd that it configures."""

    def __init__(self, tree: Tree, kind: str) -> None:
        self.made = KINDS[kind](tree.root)
        self._tree = tree
        self.made.start()

    def install(self) -> None:
        """Do what gpuhook install does."""
        ask = EngineRequest((("gpu-py", GPU_PY),), config=str(self.made.read))
        with (store := Store(f"{self._tree.root}-state")).locked():
            installer.install(store, list(containerd.answer(ask, (2, 1)).targets))

    def found(self, started: int = BOOT) -> dict[str, tuple[str, str]]:
        """Return the doctor's findings on a containerd that has run since this time."""
        root = str(self._tree.root)
        for path in [*self._tree.root.rglob("*.toml"), *self._tree.root.rglob("*.tmpl")]:
            path.write_text(path.read_text().replace(root, ""))  # paths as seen on that machine
        read = str(self.made.read).removeprefix(root)
        self._tree.process(7, "/usr/bin/containerd", "--config", read, started=started)
        return {
            each.check: (str(each.status), f"{each.message}. {each.remedy}")
            for each in engines.containerd(self._tree.case)
        }


@pytest.fixture(params=KINDS)
def site(request: pytest.FixtureRequest, tree: Tree) -> Site:
    tree.program(GPU_PY)
    return Site(tree, request.param)


FUTURE = 4_000_000_000


def test_an_installed_and_loaded_runtime_is_reported_ok(site: Site) -> None:
    site.install()
    site.made.start()
    found = site.found(started=FUTURE)
    assert {check: status for check, (status, _) in found.items()} == {
        "containerd-registered": "ok",
        "containerd-loaded": "ok",
    }


def test_an_installed_runtime_not_yet_loaded_is_a_failure(
    site: Site, request: pytest.FixtureRequest
) -> None:
    site.install()
    found = site.found()
    kind = request.node.callspec.params["site"]
    if kind in ("k3s imports", "k0s"):  # containerd imports the drop-in, which is new
        assert found["containerd-loaded"][0] == "failure"
        text = found["containerd-loaded"][1]
    else:
        status, text = found["containerd-file"]
        assert status == "failure"
        assert "registers gpu-py, and" in text
        assert "containerd-unused" not in found
    assert RESTARTS[kind[:4].strip()] in text


def test_a_runtime_lost_at_the_next_start_gives_a_warning(site: Site) -> None:
    """This happens after an edit of the file that the distribution writes again at each start."""
    made = site.made
    version = 2 if "version = 2" in made.read.read_text() else 3
    plugin = starts.V2 if version == 2 else starts.V3
    extra = f'\n[plugins."{plugin}".containerd.runtimes.gpu-py.options]\nBinaryName = "{GPU_PY}"\n'
    made.read.write_text(made.read.read_text() + extra)
    status, text = site.found(started=FUTURE)["containerd-file"]
    assert status == "warning"
    assert "when it starts, and then containerd loses gpu-py" in text
    assert "gpuhook install --engine containerd --config" in text


def test_a_distribution_without_gpu_py_is_reported_as_unused(site: Site) -> None:
    assert {*site.found()} == {"containerd-unused"}


def test_a_microk8s_drop_in_with_a_placeholder_gives_a_warning(tree: Tree) -> None:
    tree.program(GPU_PY)
    site = Site(tree, "microk8s")
    folder = site.made.folder / "conf.d"
    folder.mkdir()
    (folder / "99-gpuhook.toml").write_text(
        f'# {DROP_IN_HEADER}\nversion = 2\n[plugins."{starts.V2}".containerd]\n'
        f'snapshotter = "${{SNAPSHOTTER}}"\n[plugins."{starts.V2}".containerd.runtimes.gpu-py'
        f'.options]\nBinaryName = "{GPU_PY}"\n'
    )
    template = site.made.template
    template.write_text(f'imports = ["{folder}/*.toml"]\n' + template.read_text())
    site.made.start()
    status, text = site.found(started=FUTURE)["containerd-file"]
    assert status == "warning"
    assert "99-gpuhook.toml, line 4, has '${SNAPSHOTTER}', which containerd reads literally" in text
    assert "gpuhook uninstall --engine containerd && gpuhook install" in text


# Byte order marks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "mark", "status"),
    [
        ("20.10.24", codecs.BOM_UTF8, "failure"),
        ("20.10.24", codecs.BOM_UTF16_LE, "failure"),
        ("28.5.2", codecs.BOM_UTF8, "ok"),
        ("28.5.2", codecs.BOM_UTF16_LE, "ok"),
    ],
)
def test_daemon_json_with_a_byte_order_mark_fails_only_on_old_docker(
    tree: Tree, version: str, mark: bytes, status: str
) -> None:
    tree.program(GPU_PY)
    tree.program("/usr/bin/dockerd", f"#!/bin/sh\necho Docker version {version}, build 1\n")
    text = json.dumps({"runtimes": {"gpu-py": {"path": GPU_PY}}})
    encoding = "utf-8" if mark == codecs.BOM_UTF8 else "utf-16-le"
    tree.write("/etc/docker/daemon.json", mark + text.encode(encoding))
    found = said(docker_checks.docker(tree.case))["docker-registered"]
    assert found[0] == status
    assert status == "ok" or "byte order mark of UTF-" in found[1]


@pytest.mark.parametrize(("version", "status"), [("1.7.24", "ok"), ("2.1.9", "failure")])
def test_config_toml_with_a_byte_order_mark_fails_on_containerd_2(
    tree: Tree, version: str, status: str
) -> None:
    tree.program(GPU_PY)
    tree.program("/usr/bin/containerd", f"#!/bin/sh\necho containerd x/v2 {version} x\n")
    text = f'version = 2\n[plugins."{starts.V2}".containerd.runtimes.gpu-py.options]\n'
    text += f'BinaryName = "{GPU_PY}"\n'
    tree.write("/etc/containerd/config.toml", codecs.BOM_UTF8 + text.encode())
    assert said(engines.containerd(tree.case))["containerd-registered"][0] == status


@pytest.mark.parametrize(("version", "status"), [("4.3.1", "failure"), ("5.4.2", "ok")])
def test_containers_conf_with_a_byte_order_mark_fails_on_old_podman(
    tree: Tree, version: str, status: str
) -> None:
    tree.program(GPU_PY)
    tree.program("/usr/bin/podman", f"#!/bin/sh\necho podman version {version}\n")
    text = f'[engine.runtimes]\ngpu-py = ["{GPU_PY}"]\n'
    path = "/etc/containers/containers.conf.d/99-gpuhook.conf"
    tree.write(path, codecs.BOM_UTF8 + text.encode())
    statuses = [
        str(finding.status)
        for finding in engines.podman(tree.case)
        if finding.check == "podman-runtime"
    ]
    assert status in statuses
    assert ("failure" in statuses) is (status == "failure")


def test_a_hook_file_with_a_byte_order_mark_is_a_failure(tree: Tree) -> None:
    """podman's parser of hooks rejects the mark, and then no container starts."""
    tree.program("/usr/bin/podman")
    hook = {"version": "1.0.0", "hook": {"path": tree.program(f"{BIN}/gpuhook-prestart").name}}
    path = "/usr/share/containers/oci/hooks.d/gpuhook.json"
    tree.write(path, codecs.BOM_UTF8 + json.dumps(hook).encode())
    assert said(engines.podman(tree.case))["podman-hook"][0] == "failure"
