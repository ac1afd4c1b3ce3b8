"""Installation of gpu-py into the source of a distribution's generated containerd file."""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import starts
from click.testing import CliRunner

from gpuhook.base.errors import EngineError
from gpuhook.tools.cli import cli
from gpuhook.tools.engines import containerd, containerd_files, installer
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.files import DROP_IN_HEADER
from gpuhook.tools.engines.merge import get
from gpuhook.tools.engines.store import Store

PROGRAM = "/opt/gpu-py"
RANCHERS = "agent/etc/containerd"
BASE = '{{ template "base" . }}\n'
NEW, OLD = (2, 1), (1, 7)
KINDS: dict[str, Callable[[Path], Any]] = {
    "k3s 2": lambda folder: starts.Ranchers(folder / RANCHERS, 2),
    "k3s 3": lambda folder: starts.Ranchers(folder / RANCHERS, 3),
    "rke2 3": lambda folder: starts.Ranchers(folder / RANCHERS, 3, name="rke2"),
    "k3s 3 imports": lambda folder: starts.Ranchers(folder / RANCHERS, 3, imports=True),
    "microk8s": lambda folder: starts.MicroK8s(folder / "args"),
    "k0s 2": lambda folder: starts.K0s(folder / "k0s", 2),
    "k0s 3": lambda folder: starts.K0s(folder / "k0s", 3),
}


def ask_for(config: Path, **more: Any) -> EngineRequest:
    return EngineRequest(**{"runtimes": (("gpu-py", PROGRAM),), "config": str(config), **more})


def install(made: Any, program: tuple[int, int] | None = NEW, **more: Any) -> list[str]:
    """Install for the file that containerd reads; return the files that changed."""
    store = Store(str(made.folder.parent / "state"))
    with store.locked():
        ask = ask_for(made.read, **more)
        outcomes = installer.install(store, list(containerd.answer(ask, program).targets))
    return [each.change.path for each in outcomes if each.change]


def uninstall(made: Any) -> None:
    store = Store(str(made.folder.parent / "state"))
    with store.locked():
        installer.uninstall(store, store.records())


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def programs_in(made: Any) -> dict[str, str]:
    """Return the runtimes' programs in the file that containerd reads and in its imports."""
    found: dict[str, str] = {}
    document = tomllib.loads(made.read.read_text())
    texts = [made.read.read_text()]
    for pattern in document.get("imports", []):
        texts += [path.read_text() for path in Path("/").glob(pattern[1:])]
    for text in texts:
        for plugin in (starts.V2, starts.V3):
            runtimes = get(tomllib.loads(text), ("plugins", plugin, "containerd", "runtimes")) or {}
            found |= {
                name: each.get("options", {}).get("BinaryName", "")
                for name, each in runtimes.items()
            }
    return found


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A distribution that was started once, with a template that includes the built-in one."""
    found = KINDS[request.param](tmp_path)
    if request.param == "k3s 2":  # nothing else here shows its version
        found.folder.mkdir(parents=True)
        found.template.write_text(BASE)
    found.start()
    return found


def test_gpu_py_survives_a_restart_and_uninstall_restores_files(made: Any) -> None:
    before, kept = tree(made.folder), made.read.read_bytes()
    changed = install(made)
    assert changed
    assert str(made.read) not in changed
    for _ in range(2):
        made.start()
        assert programs_in(made)["gpu-py"] == PROGRAM
        assert install(made) == []
    assert install(made, runtimes=(("gpu-py", "/new/gpu-py"),))
    made.start()
    assert programs_in(made)["gpu-py"] == "/new/gpu-py"
    uninstall(made)
    made.start()
    assert "gpu-py" not in programs_in(made)
    assert made.read.read_bytes() == kept
    assert tree(made.folder) == before


def test_an_administrators_template_edit_survives_uninstall(made: Any) -> None:
    template = getattr(made, "template", None)
    if template is None or not template.exists():
        return  # there is no template to edit
    install(made)
    text = template.read_text()
    template.write_text(f"# more\n{text}")
    made.start()
    install(made)
    uninstall(made)
    assert "# more" in template.read_text()
    assert "gpu-py" not in template.read_text()
    made.start()
    tomllib.loads(made.read.read_text())


def test_a_second_runtime_is_added_beside_the_first(made: Any) -> None:
    install(made)
    made.start()
    install(made, runtimes=(("other", "/opt/gpu-py"),))
    made.start()
    assert {"gpu-py", "other", "runc"} <= {*programs_in(made)}


def test_install_finds_a_distributions_files_below_a_prefix(tmp_path: Path) -> None:
    for name, folder in (("microk8s", "var/snap/microk8s/current/args"), ("k0s", "etc/k0s")):
        system = tmp_path / name
        kind: Any = starts.MicroK8s if name == "microk8s" else starts.K0s
        found = kind(system / folder)
        found.start()
        before = tree(system)
        words = [f"--prefix={system}", "--engine=containerd"]
        runner = CliRunner()
        done = runner.invoke(cli, ["install", *words, f"--runtime-path={PROGRAM}"])
        assert done.exit_code == 0, done.output
        assert not (system / "etc/containerd").exists()
        for config in (found.read, getattr(found, "template", found.read)):
            words_of = ["uninstall", *words, f"--config={config}", "--dry-run"]
            assert "gpu-py" in runner.invoke(cli, words_of, catch_exceptions=False).output
        done = runner.invoke(cli, ["uninstall", *words], catch_exceptions=False)
        restart = {"microk8s": "snap restart microk8s", "k0s": "k0s does so by itself"}[name]
        assert restart in done.output
        assert {
            path: text for path, text in tree(system).items() if "/var/lib" not in path
        } == before


# k3s and RKE2 -------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [None, OLD, (2, 0), NEW])
def test_drop_in_folder_is_used_only_if_containerd_merges_tables(
    tmp_path: Path, program: tuple[int, int] | None
) -> None:
    """Without merging, containerd would have only the CRI settings in the folder."""
    made = starts.Ranchers(tmp_path / RANCHERS, imports=True)
    made.start()
    before = tree(tmp_path)
    where = made.drop_ins / "99-gpuhook.toml" if program == NEW else made.template
    if program == OLD:  # a template of version 2 is refused unless it is known to work
        with pytest.raises(EngineError, match=r"config\.toml\.tmpl"):
            install(made, program)
        assert tree(tmp_path) == before
        return
    assert install(made, program) == [str(where)]
    assert install(made, NEW) == []  # the runtime stays in the file that has it


def test_import_folders_outside_the_distribution_are_not_used(tmp_path: Path) -> None:
    made = starts.Ranchers(tmp_path / RANCHERS)
    made.folder.mkdir(parents=True)
    patterns = [f"{tmp_path}/etc/*.toml", f"{made.folder}/x.d/*.conf", f"{made.folder}/*.toml"]
    made.template.write_text(f"imports = {patterns}\n{BASE}")
    made.start()
    assert install(made) == [str(made.template)]


@pytest.mark.parametrize(
    ("generated", "program", "there", "expected"),
    [
        (3, None, (), "config-v3.toml.tmpl"),
        (3, NEW, ("config.toml.tmpl",), "config.toml.tmpl"),
        (3, NEW, ("config.toml.tmpl", "config-v3.toml.tmpl"), "config-v3.toml.tmpl"),
        (2, None, ("config.toml.tmpl",), "config.toml.tmpl"),
        (2, OLD, ("config.toml.tmpl", "config-v3.toml.tmpl"), "config.toml.tmpl"),
        (2, NEW, ("config.toml.tmpl", "config-v3.toml.tmpl"), "config-v3.toml.tmpl"),
        (2, None, ("config.toml.tmpl", "config-v3.toml.tmpl"), "is unknown whether.*Restart k3s"),
        (2, None, (), "version of .* is unknown.*1.28.1"),
    ],
)
def test_the_template_that_the_distribution_reads_is_chosen(
    tmp_path: Path, generated: int, program: Any, there: tuple[str, ...], expected: str
) -> None:
    made = starts.Ranchers(tmp_path / RANCHERS, generated)
    made.start()
    for name in there:
        (made.folder / name).write_text(BASE)
    before = tree(tmp_path)
    if not expected.endswith(".tmpl"):
        with pytest.raises(EngineError, match=expected):
            install(made, program)
        assert tree(tmp_path) == before
    else:
        assert install(made, program) == [str(made.folder / expected)]


@pytest.mark.parametrize(
    ("version", "is_new"),
    [("v1.27.4+k3s1", False), ("v1.27.5+k3s1", True), ("v1.24.17+k3s1", True), ("v1.28.0", False),
     ("v1.30.2+k3s1", True), ("", False)],
)  # fmt: skip
def test_a_template_is_refused_with_a_k3s_too_old_for_base_templates(
    tmp_path: Path, version: str, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/k3s"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'k3s version {version} (8d074ecb)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    made = starts.Ranchers(tmp_path / RANCHERS, 2)
    made.start()
    if is_new:
        assert install(made, OLD) == [str(made.template)]
        assert made.template.read_text().startswith(BASE)
    else:
        with pytest.raises(EngineError, match="template that includes the built-in one needs"):
            install(made, OLD)


@pytest.mark.parametrize(
    "line",
    ['[plugins."x".containerd.runtimes.gpu-py]', "[plugins.x.containerd.runtimes.'gpu-py'.options]",
     'plugins.x.containerd.runtimes."gpu-py".a = 1'],
)  # fmt: skip
def test_a_runtime_already_in_the_template_is_refused(tmp_path: Path, line: str) -> None:
    """containerd doesn't start if a file has two tables with the same name."""
    made = starts.Ranchers(tmp_path / RANCHERS)
    made.start()
    made.template.write_text(f"{BASE}\n{line}\n")
    before = tree(tmp_path)
    with pytest.raises(EngineError, match="already has a runtime gpu-py"):
        install(made)
    made.template.write_text(f"{BASE}\n# {line}\n[plugins.x.containerd.runtimes.gpu-py-2]\n")
    assert install(made)
    assert before


def test_a_runtime_that_k3s_itself_adds_is_not_written(tmp_path: Path) -> None:
    """k3s adds it if it finds nvidia-container-runtime, which the option --gpus creates."""
    made = starts.Ranchers(tmp_path / RANCHERS)
    made.start()
    install(made, also=(("nvidia", PROGRAM),))
    assert "nvidia" not in made.template.read_text()


@pytest.mark.parametrize("kind", ["k3s 2", "k3s 3"])
def test_set_default_in_a_k3s_template_is_refused(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind](tmp_path)
    made.folder.mkdir(parents=True)
    made.template.write_text(BASE)
    made.start()
    with pytest.raises(EngineError, match="--set-default out, and name the RuntimeClass gpu-py"):
        install(made, OLD if kind == "k3s 2" else (2, 0), set_default=True)
    assert made.template.read_text() == BASE


@pytest.mark.parametrize("name", ["config.toml", "config.toml.tmpl", "config-v3.toml.tmpl"])
def test_installation_before_the_first_k3s_start_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / RANCHERS
    folder.mkdir(parents=True)
    if name != "config.toml":
        (folder / name).write_text(BASE)
    with pytest.raises(EngineError, match=r"doesn't exist yet.*Start k3s once"):
        containerd.answer(ask_for(folder / name), None)


@pytest.mark.parametrize("text", ["", "version = 3\r\n[debug]", "# {{/* nothing */}}\n"])
def test_a_complete_template_is_extended_and_restored(tmp_path: Path, text: str) -> None:
    """Such a template doesn't include the built-in one, and gpuhook doesn't add that."""
    made = starts.Ranchers(tmp_path / RANCHERS)
    made.start()
    made.template.write_bytes(text.encode())
    install(made)
    assert "template" not in made.template.read_text().replace("/* nothing */", "")
    uninstall(made)
    assert made.template.read_bytes() == text.encode()


def test_trim_marks_in_a_template_do_not_break_the_runtime(tmp_path: Path) -> None:
    """Text after a -}} directly follows the end of the built-in template."""
    made = starts.Ranchers(tmp_path / RANCHERS)
    made.folder.mkdir(parents=True)
    made.template.write_text('{{- template "base" . -}}')
    made.start()
    install(made)
    made.start()
    assert programs_in(made)["gpu-py"] == PROGRAM


@pytest.mark.parametrize("kind", ["k3s 3", "microk8s"])
@pytest.mark.parametrize("program", ["/opt/{{x}}/gpu-py", "/opt/${SNAP}/gpu-py"])
def test_a_program_path_with_a_placeholder_is_refused(
    kind: str, program: str, tmp_path: Path
) -> None:
    made = KINDS[kind](tmp_path)
    made.start()
    with pytest.raises(EngineError, match=r"would replace .* --runtime-path"):
        install(made, runtimes=(("gpu-py", program),))


@pytest.mark.parametrize("kind", ["k3s 3", "k3s 3 imports", "microk8s", "k0s 3"])
def test_a_drop_in_the_distribution_does_not_read_is_refused(kind: str, tmp_path: Path) -> None:
    made = KINDS[kind](tmp_path)
    made.start()
    with pytest.raises(EngineError, match="drop-in"):
        install(made, drop_in=str(tmp_path / "99.toml"))


# MicroK8s -----------------------------------------------------------------------------------


def test_the_default_runtime_of_microk8s_is_restored(tmp_path: Path) -> None:
    made = starts.MicroK8s(tmp_path / "args")
    made.start()
    install(made, set_default=True)
    assert 'default_runtime_name = "gpu-py"' in made.template.read_text()
    install(made, without=frozenset({"set-default"}))
    assert 'default_runtime_name = "${RUNTIME}"' in made.template.read_text()
    assert "gpu-py" in made.template.read_text()


def test_a_microk8s_drop_in_of_an_earlier_version_is_removed(tmp_path: Path) -> None:
    """An earlier version copied placeholders into a drop-in, where nothing replaces them."""
    made = starts.MicroK8s(tmp_path / "args")
    made.start()
    text = made.template.read_text()
    drop_in = made.folder / "conf.d/99-gpuhook.toml"
    drop_in.parent.mkdir()
    drop_in.write_text(
        f'# {DROP_IN_HEADER}\nversion = 2\n[plugins."{starts.V2}".containerd]\n'
        'snapshotter = "${SNAPSHOTTER}"\n'
    )
    made.template.write_text(
        text.replace("version = 2\n", f'version = 2\nimports = ["{made.folder}/conf.d/*.toml"]\n')
    )
    assert install(made) == [str(made.template), str(drop_in)]
    assert "imports" not in made.template.read_text()
    made.start()
    assert programs_in(made)["gpu-py"] == PROGRAM
    assert "${" not in made.read.read_text().replace("${NOTHING}", "")


@pytest.mark.parametrize("program", [None, OLD, NEW])
def test_imported_settings_are_refused_or_warned_of_before_containerd_2_1(
    tmp_path: Path, program: Any
) -> None:
    made = starts.MicroK8s(tmp_path / "args")
    made.start()
    folder = tmp_path / "config.toml.d"
    folder.mkdir()
    made.template.write_text(f'imports = ["{folder}/*.toml"]\n{made.template.read_text()}')
    (folder / "proxy.toml").write_text('[proxy_plugins.x]\ntype = "snapshot"\n')
    ask = ask_for(made.read)
    assert not containerd.answer(ask, program).warnings
    (folder / "cri.toml").write_text(f'[plugins."{starts.V2}"]\nsandbox_image = "x"\n')
    said = f"{folder}/cri.toml is imported by {made.template}, and containerd before 2.1"
    if program == OLD:
        with pytest.raises(EngineError, match=said):
            containerd.answer(ask, program)
    else:
        warnings = containerd.answer(ask, program).warnings
        assert [said in each for each in warnings] == ([True] if program is None else [])


# k0s ----------------------------------------------------------------------------------------


def test_a_config_not_managed_by_k0s_is_edited_directly(tmp_path: Path) -> None:
    made = starts.K0s(tmp_path / "k0s")
    made.start()
    made.read.write_text(made.read.read_text().split("\n", 1)[1])
    changed = install(made)
    assert changed == [f"{made.folder}/conf.d/99-gpuhook.toml", str(made.read)]
    uninstall(made)
    made.read.write_text("# k0s_managed=true\r\n" + made.read.read_text())
    assert install(made) == [f"{made.folder}/containerd.d/99-gpuhook.toml"]


@pytest.mark.parametrize("version", [2, 3])
def test_a_k0s_drop_in_has_the_version_of_its_config(tmp_path: Path, version: int) -> None:
    made = starts.K0s(tmp_path / "k0s", version)
    made.start()
    [path] = install(made, None, set_default=True)
    document = tomllib.loads(Path(path).read_text())
    assert document["version"] == version
    assert {*document["plugins"]} == {starts.V2 if version == 2 else starts.V3}
    cri = document["plugins"][starts.V2 if version == 2 else starts.V3]
    assert {*cri} == {"containerd"}  # k0s merges the other settings itself


# Which one ----------------------------------------------------------------------------------


def test_the_distributions_own_containerd_gives_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PATH may contain another containerd, such as Docker's."""
    for folder, version in (("bin", "1.6.20"), ("data/current/bin", "v2.1.5-k3s1")):
        program = tmp_path / folder / "containerd"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho containerd github.com/x/containerd {version} x\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    made = starts.Ranchers(tmp_path / RANCHERS)
    made.start()
    plain = tmp_path / "config.toml"
    plain.write_text("version = 2\n")
    assert containerd_files.version_for(str(made.read)) == (2, 1)
    assert containerd_files.version_for(str(plain)) == (1, 6)
    (tmp_path / "data/current/bin/containerd").unlink()
    assert containerd_files.version_for(str(made.read)) is None


@pytest.mark.protects(
    "own-containerd", "installation: root doesn't run a containerd that other users can change"
)
def test_a_containerd_writable_by_others_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root runs containerd to read its version, so other users must not be able to change it."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    program, ran = tmp_path / "data/current/bin/containerd", tmp_path / "ran"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ntouch {ran}\necho containerd x v2.1.5 x\n")
    program.chmod(0o777)
    made = starts.Ranchers(tmp_path / RANCHERS)
    made.start()
    assert containerd_files.version_for(str(made.read)) is None
    assert not ran.exists()
