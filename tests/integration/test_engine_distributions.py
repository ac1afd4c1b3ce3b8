"""Several containerd versions, with configuration files that distributions generate."""

import copy
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import starts
from harness.commands import Result, run
from harness.containerd import runtimes_of, same_as_runc
from harness.driver import Driver
from harness.installation import Installation
from harness.namespaces import Namespace, host_cgroups
from harness.releases import Release, release
from harness.snapshot import contents, contents_now

RANCHERS = "agent/etc/containerd"
WROTE = ("wrote", "changed")
Made = starts.Ranchers | starts.MicroK8s | starts.K0s


@dataclass(frozen=True)
class Machine:
    """A host with a containerd; ``new`` means that it supports version 3 of its file."""

    space: Namespace
    command: Path
    folder: Path
    new: bool

    def gpuhook(self, verb: str, config: Path, *words: str) -> Result:
        """Run a gpuhook command for the engine that reads a file."""
        options = ("--engine=containerd", f"--config={config}", f"--state-dir={self.folder}/state")
        return self.space.run(self.command, verb, *options, *words)

    def dump(self, config: Path) -> dict[str, Any]:
        """Return the configuration that containerd makes from a file."""
        text = self.space.run("containerd", "--config", config, "config", "dump").ok().stdout
        return tomllib.loads(text)

    def has_program(self, folder: Path) -> None:
        """Add this containerd to a distribution's folder of programs."""
        folder.mkdir(parents=True)
        (folder / "containerd").symlink_to("/usr/bin/containerd")


@pytest.fixture(scope="module")
def releases(
    workspace: Path, engine_roots: dict[str, Path], installation: Installation, driver: Driver
) -> Iterator[dict[str, Release]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                release(name, lower, workspace / f"files-{name}", installation, driver)
            )
            for name, lower in engine_roots.items()
        }


@pytest.fixture(params=["host", "trixie", "sid"])
def machine(
    request: pytest.FixtureRequest, workspace: Path, installation: Installation
) -> Iterator[Machine]:
    folder = workspace / "engine-files"
    folder.mkdir()
    space, command = Namespace(host_cgroups()), installation.command
    if request.param != "host":
        found = request.getfixturevalue("releases")[request.param]
        space, command = found.namespace, found.installation.command
    version = space.run("containerd", "--version").ok().stdout
    yield Machine(space, command, folder, " v2." in version or "/v2 2." in version)
    run(["rm", "-rf", "--one-file-system", folder]).ok()


def same_but_ours(before: dict[str, Any], after: dict[str, Any], default: str) -> None:
    """Fail unless gpu-py differs from runc only in its program, and all else is unchanged."""
    before, after = copy.deepcopy(before), copy.deepcopy(after)
    for each in (before, after):
        each.pop("imports", None)
    known = runtimes_of(after)
    same_as_runc(known["runtimes"].pop("gpu-py"), runtimes_of(before)["runtimes"]["runc"])
    assert known.pop("default_runtime_name") == default
    assert runtimes_of(before).pop("default_runtime_name") == "runc"
    assert after == before


def goes_round(machine: Machine, made: Made, config: Path, where: Path, *words: str) -> None:
    """Install to one file, start the distribution twice, uninstall; check that all is restored."""
    made.start()
    before, dump = contents(made.folder), machine.dump(made.read)
    done = machine.gpuhook("install", config, *words).ok()
    wrote = [line.split()[-1] for line in done.stdout.splitlines() if line.split()[1] in WROTE]
    assert wrote == [str(where)]
    for _ in range(2):
        made.start()
        same_but_ours(dump, machine.dump(made.read), "gpu-py" if words else "runc")
        again = machine.gpuhook("install", config).ok()
        assert "containerd: changed" not in again.stdout
    machine.gpuhook("uninstall", config).ok()
    made.start()
    assert contents_now(before) == before
    after = machine.dump(made.read)
    for each in (dump, after):
        each["imports"] = sorted(each["imports"])  # containerd 1 has them in any order
    assert after == dump


# Possible templates of a user: the built-in one in every spelling, and longer ones.
USERS = [
    '{{ template "base" . }}\n',
    '{{- template "base" . -}}',
    '# mine, not "{{ .Name }}"\r\n{{template "base" .}}\r\n\r\n[debug]\r\n  level = "debug"\r\n',
    '{{/* one\n two */}}\nimports = ["/nowhere/*.toml"]\n{{ template "base" . }}\n# ${SNAP}',
]


@pytest.mark.parametrize("name", ["k3s", "rke2"])
@pytest.mark.parametrize("template", USERS)
def test_a_users_template_is_edited_and_restored(
    machine: Machine, template: str, name: str
) -> None:
    for version in (2, 3) if machine.new else (2,):
        folder = machine.folder / str(version) / RANCHERS
        made = starts.Ranchers(folder, version, name=name)
        made.folder.mkdir(parents=True)
        made.template.write_bytes(template.encode())
        goes_round(machine, made, made.template if name == "k3s" else made.read, made.template)


def test_our_own_template_is_written_and_removed(machine: Machine) -> None:
    """For version 2, k3s must report that it is new enough for such a template."""
    made = starts.Ranchers(machine.folder / RANCHERS, 3 if machine.new else 2)
    if made.version == 3:
        goes_round(machine, made, made.read, made.template)
        return
    made.start()
    before = contents(made.folder)
    done = machine.gpuhook("install", made.read).failed()
    assert "The version of k3s is unknown" in done.stderr
    assert contents(made.folder) == before


@pytest.mark.parametrize("default", [(), ("--set-default",)])
def test_a_folder_imported_by_k3s_is_used_where_containerd_merges_it(
    machine: Machine, default: tuple[str, ...]
) -> None:
    """A file there is enough if containerd merges tables; otherwise the template is edited."""
    made = starts.Ranchers(machine.folder / RANCHERS, 3 if machine.new else 2, imports=True)
    made.start()
    made.drop_ins.mkdir()
    (made.drop_ins / "10-other.toml").write_text('[debug]\nlevel = "debug"\n')
    machine.has_program(machine.folder / "data/current/bin")
    if machine.new:
        goes_round(machine, made, made.read, made.drop_ins / "99-gpuhook.toml", *default)
        return
    made.template.write_text(USERS[0])
    if not default:
        goes_round(machine, made, made.read, made.template)
        return
    done = machine.gpuhook("install", made.read, *default).failed()
    assert "can't take another one from its template" in done.stderr


@pytest.mark.parametrize("default", [(), ("--set-default",)])
@pytest.mark.parametrize("config", ["read", "template"])
def test_microk8s_is_configured_and_restored(
    machine: Machine, config: str, default: tuple[str, ...]
) -> None:
    made = starts.MicroK8s(machine.folder / "args")
    goes_round(machine, made, getattr(made, config), made.template, *default)


@pytest.mark.parametrize("default", [(), ("--set-default",)])
def test_k0s_is_configured_and_restored(machine: Machine, default: tuple[str, ...]) -> None:
    made = starts.K0s(machine.folder / "k0s", 3 if machine.new else 2)
    goes_round(machine, made, made.read, made.drop_ins / "99-gpuhook.toml", *default)


def test_in_a_file_with_two_versions_the_files_version_is_edited(machine: Machine) -> None:
    """containerd takes only the tables of the file's version, so gpuhook copies from those."""
    config = machine.folder / "config.toml"
    for version in (2, 3) if machine.new else (2,):
        tables = "".join(
            f'[plugins."{plugin}".containerd.runtimes.runc]\r\n'
            'runtime_type = "io.containerd.runc.v2"\r\n'
            f'[plugins."{plugin}".containerd.runtimes.runc.options]\r\n'
            f"SystemdCgroup = {value}\r\n"
            for plugin, value in ((starts.V2, "true"), (starts.V3, "false"))
        )
        text = f"version = {version}\r\n# mine\r\n{tables}".encode()
        config.write_bytes(text)
        before = machine.dump(config)
        machine.gpuhook("install", config).ok()
        same_but_ours(before, machine.dump(config), "runc")
        machine.gpuhook("uninstall", config).ok()
        assert config.read_bytes() == text
