"""Engines' files: the file that each engine reads, its mark, and cases where none is written."""

import codecs
import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness.commands import Result, run
from harness.driver import Driver
from harness.images import REPOSITORY
from harness.installation import Installation
from harness.namespaces import Namespace, host_cgroups
from harness.releases import Release, release
from harness.snapshot import contents

from gpuhook.tools.engines import marks
from gpuhook.tools.engines.installed import version_of

ENCODINGS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le"}
CONTAINERD = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
"""


@pytest.fixture(scope="module")
def releases(
    workspace: Path, engine_roots: dict[str, Path], installation: Installation, driver: Driver
) -> Iterator[dict[str, Release]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                release(name, lower, workspace / f"marks-{name}", installation, driver)
            )
            for name, lower in engine_roots.items()
        }


@pytest.fixture(params=["host", "trixie", "sid"])
def space(request: pytest.FixtureRequest, workspace: Path) -> Namespace:
    """The namespace of the host or of a release, each with its own engines."""
    assert workspace
    if request.param == "host":
        return Namespace(host_cgroups())
    found: Release = request.getfixturevalue("releases")[request.param]
    return found.namespace


@pytest.fixture
def folder(workspace: Path) -> Iterator[Path]:
    made = workspace / "files"
    made.mkdir()
    yield made
    run(["rm", "-rf", "--one-file-system", made]).ok()


@pytest.mark.parametrize("mark", ENCODINGS, ids=lambda mark: mark.hex())
@pytest.mark.parametrize("engine", ["docker", "containerd", "podman"])
def test_byte_order_marks_are_accepted_exactly_where_engines_read_them(
    space: Namespace, folder: Path, engine: str, mark: bytes
) -> None:
    program = {"docker": "dockerd"}.get(engine, engine)
    version = _version(space.run(program, "--version").ok().stdout, folder)
    file = folder / "file"
    podman = ("podman", f"--root={folder}/r", f"--runroot={folder}/rr", "--storage-driver=vfs")
    words = {
        "docker": ("dockerd", "--validate", "--config-file", file),
        "containerd": ("containerd", "--config", file, "config", "dump"),
        "podman": (
            "env", f"CONTAINERS_CONF={file}", *podman, "info", "--format={{.Host.EventLogger}}",
        ),
    }[engine]  # fmt: skip
    text, said = {
        "docker": ('{"log-driver": "json-file"}', "configuration OK"),
        "containerd": (f'version = 2\nroot = "{folder}/marked"\n', f"{folder}/marked"),
        "podman": ('[engine]\nevents_logger = "none"\n', "none"),
    }[engine]

    def is_read(data: bytes) -> bool:
        file.write_bytes(data)
        done = space.run(*words)
        return said in done.stdout + done.stderr

    if engine == "docker" and version.startswith("20."):  # dockerd 20 has no --validate
        places = (f"--data-root={folder}/d", f"--exec-root={folder}/e", f"--pidfile={folder}/pid")
        start = ("dockerd", "--config-file", file, *places, f"--host=unix://{folder}/docker.sock")
        words = ("unshare", "--mount", "timeout", "5", *start, "--containerd=/nowhere")
        said = "Starting up"
    assert is_read(text.encode())
    assert is_read(mark + text.encode(ENCODINGS[mark])) is (
        marks.problem(engine, mark, lambda: version) == ""
    )


def _version(said: str, folder: Path) -> str:
    """Return the version that gpuhook finds in a program's output."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(said.strip())}\n")
    program.chmod(0o755)
    found = version_of(str(program))
    assert found is not None
    return found


def test_daemon_json_with_a_byte_order_mark_is_edited_and_restored(
    releases: dict[str, Release], folder: Path
) -> None:
    """Each release's Docker must accept the edited file, and uninstall restores every byte."""
    file = folder / "daemon.json"
    for found in releases.values():
        for mark, encoding in ENCODINGS.items():
            before = mark + '{\r\n  "log-driver": "json-file"\r\n}\r\n'.encode(encoding)
            file.write_bytes(before)
            options = ["--engine=docker", f"--config={file}", f"--state-dir={folder}/state"]
            found.gpuhook("install", *options)
            after = file.read_bytes()
            assert after.startswith(mark)
            document = json.loads(after[len(mark) :].decode(encoding))
            assert {*document} == {"log-driver", "runtimes"}
            done = found.namespace.run("dockerd", "--validate", "--config-file", file).ok()
            assert "configuration OK" in done.stdout + done.stderr
            found.gpuhook("uninstall", *options)
            assert file.read_bytes() == before


# Which file is read -------------------------------------------------------------------------


def beside_containerds(
    installation: Installation, folder: Path, names: list[str], *words: str
) -> Result:
    """Run gpuhook while only the named containerds run, each with its own file."""
    lines = []
    for name in names:
        place = folder / name
        place.mkdir(parents=True)
        (place / "config.toml").write_text(CONTAINERD.format(folder=place))
        lines.append(f"containerd --config {place}/config.toml >{place}/log 2>&1 &")
        lines.append(f"until [ -S {place}/containerd.sock ]; do sleep 0.05; done")
    ours = shlex.join(map(str, (installation.command, *words, f"--state-dir={folder}/memory")))
    script = "\n".join([*lines, ours])
    return run([REPOSITORY / "scripts/lib/apart", "sh", "-c", script])


def test_the_running_containerd_is_the_one_configured(
    installation: Installation, folder: Path
) -> None:
    words = ("install", "--engine=containerd")
    done = beside_containerds(installation, folder, ["k8s"], *words).ok()
    assert f"changed {folder}/k8s/config.toml" in done.stdout
    assert "/etc/containerd" not in done.stdout
    done = run([installation.command, "uninstall", f"--state-dir={folder}/memory"]).ok()
    assert (folder / "k8s/config.toml").read_text() == CONTAINERD.format(folder=folder / "k8s")


def test_one_of_several_running_containerds_must_be_named(
    installation: Installation, folder: Path
) -> None:
    done = beside_containerds(installation, folder, ["a", "b"], "install", "--engine=containerd")
    assert done.status == 1
    assert "Several containerds are running" in done.stderr
    for name in ("a", "b"):
        command = f"gpuhook install --engine containerd --config {folder}/{name}/config.toml"
        assert command in done.stderr


def test_a_distribution_beside_the_usual_containerd_causes_a_warning(
    installation: Installation, folder: Path
) -> None:
    """gpuhook installs for the usual containerd, such as Docker's, not for the distribution's."""
    place = folder / "agent/etc/containerd"
    place.mkdir(parents=True)
    text = "# File generated by k3s. DO NOT EDIT. Use config-v3.toml.tmpl instead.\n"
    (place / "config.toml").write_text(text + CONTAINERD.format(folder=folder))
    (folder / "usual.toml").write_text(CONTAINERD.format(folder=folder / "usual"))
    script = f"""
        mount --bind {folder}/usual.toml /etc/containerd/config.toml
        containerd >{folder}/log1 2>&1 &
        containerd --config {place}/config.toml >{folder}/log2 2>&1 &
        until [ -S {folder}/containerd.sock ] && [ -S {folder}/usual/containerd.sock ]; do
            sleep 0.05
        done
        {installation.command} install --engine=containerd --dry-run --state-dir={folder}/memory
    """
    Path("/etc/containerd").mkdir(exist_ok=True)
    Path("/etc/containerd/config.toml").touch()
    done = run([REPOSITORY / "scripts/lib/apart", "sh", "-c", script]).ok()
    assert "+++ /etc/containerd/conf.d/99-gpuhook.toml" in done.stdout
    said = f"k3s has its own containerd, which reads {place}/config.toml"
    assert said in done.stderr


# Where nothing can be written ---------------------------------------------------------------


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize("engine", ["docker", "containerd", "crio", "podman"])
def test_a_read_only_filesystem_is_refused_and_unchanged(
    installation: Installation, folder: Path, engine: str, dry_run: tuple[str, ...]
) -> None:
    place = folder / "etc"
    place.mkdir()
    names = {"docker": "daemon.json", "podman": "99-gpuhook.conf"}
    config = place / names.get(engine, "config")
    words = [installation.command, "install", f"--engine={engine}", f"--config={config}"]
    words += [f"--state-dir={folder}/memory", *dry_run]
    command = shlex.join(map(str, words))
    script = f"mount --bind {place} {place} && mount -o remount,bind,ro {place} && exec {command}"
    before = contents(folder)
    done = run(["unshare", "--mount", "sh", "-c", script])
    assert done.status == 1
    assert "is on a filesystem that is mounted read-only" in done.stderr
    assert contents(folder) == before
