"""Engines' files that another program generates or rewrites, or that can't be written."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import starts
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines import containerd, installer, managed, placeholders
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.files import DROP_IN_HEADER
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.store import Store

RUNTIMES = (("gpu-py", "/opt/gpu-py"),)
CRI = f'plugins."{starts.V2}"'
PLACEHOLDERS: tuple[str, ...] = (
    "${SNAPSHOTTER}", "${snap.data}", "${RUNTIME:-runc}", "$(RUNTIME)", "$RUNTIME",
    "{{ containerd_runtime }}", "{{runtime}}", "{{- .Runtime -}}", "{% raw %}", "<%= @runtime %>",
    "@RUNTIME@", "@@RUNTIME_PATH@@", "%RUNTIME%", "__RUNTIME__",
)  # fmt: skip
# Values that an engine itself understands, or that aren't placeholders at all.
LITERAL = (
    "runc", "a$b", "$5", "100%", "%h/%u", "user@host", "a@B", "{a}", "{{", "}}", "${}", "$()",
    "image@sha256:0123", "<none>", "_x_", "__init__", "~/.local", "/usr/lib/@scope/x",
)  # fmt: skip


def install(engine: str, tmp_path: Path, config: Path, **more: Any) -> None:
    ask = EngineRequest(RUNTIMES, config=str(config), **more)
    store = Store(str(tmp_path / "state"))
    with store.locked():
        made = (
            containerd.answer(ask, (1, 7))
            if engine == "containerd"
            else ENGINES[engine].install(ask)
        )
        installer.install(store, list(made.targets))


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# Placeholders -------------------------------------------------------------------------------

TEXTS = {
    "containerd": f'version = 2\n# comment\n[{CRI}.containerd]\nsnapshotter = "VALUE"\n',
    "crio": '[crio.runtime]\n[crio.runtime.runtimes.runc]\nruntime_root = "VALUE"\n',
    "docker": '{\n  "data-root": "VALUE"\n}\n',
}
COMMENTED = {
    "containerd": 'version = 2 # VALUE\n# "VALUE"\nroot = "/#/x" # \'VALUE\n',
    "crio": '# VALUE\n[crio.runtime] # "VALUE"\nlog_dir = "/#" # VALUE\n',
}


@pytest.mark.protects(
    "placeholders", "installation: a configuration template with unknown placeholders is refused"
)
@pytest.mark.parametrize("engine", TEXTS)
@pytest.mark.parametrize("value", PLACEHOLDERS)
def test_a_template_of_an_unknown_program_is_refused(
    tmp_path: Path, engine: str, value: str
) -> None:
    config = tmp_path / "config"
    config.write_text(TEXTS[engine].replace("VALUE", value))
    before = tree(tmp_path)
    line = TEXTS[engine].partition("VALUE")[0].count("\n") + 1
    said = f"{config}, line {line}, has the placeholder '{re.escape(value)}'"
    with pytest.raises(EngineError, match=f"{said}.*--config") as caught:
        install(engine, tmp_path, config)
    assert tree(tmp_path) == before
    # The error names an escape for a value that is meant literally.
    escape = re.search(r"as (\\u[0-9a-f]{4}) if", str(caught.value))
    assert escape is not None
    config.write_text(TEXTS[engine].replace("VALUE", escape[1] + value[1:]))
    install(engine, tmp_path, config)


@pytest.mark.parametrize("engine", TEXTS)
@pytest.mark.parametrize("value", LITERAL)
def test_literal_values_are_not_taken_for_placeholders(
    tmp_path: Path, engine: str, value: str
) -> None:
    config = tmp_path / "config"
    config.write_text(TEXTS[engine].replace("VALUE", value))
    install(engine, tmp_path, config)


@pytest.mark.parametrize("engine", COMMENTED)
@pytest.mark.parametrize("value", PLACEHOLDERS)
def test_placeholders_in_comments_are_ignored(tmp_path: Path, engine: str, value: str) -> None:
    config = tmp_path / "config"
    config.write_text(COMMENTED[engine].replace("VALUE", value.replace('"', "")))
    install(engine, tmp_path, config)


@pytest.mark.parametrize("text", ["root = ${ROOT}\n", "{% if x %}\nversion = 2\n{% endif %}\n"])
def test_a_template_that_is_not_valid_toml_is_refused(tmp_path: Path, text: str) -> None:
    config = tmp_path / "config.toml"
    config.write_text(text)
    with pytest.raises(EngineError, match="line 1, has the placeholder"):
        install("containerd", tmp_path, config)


def test_a_template_that_is_not_valid_json_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "daemon.json"
    config.write_text('{\n"debug": {{ debug | to_json }}\n}')
    with pytest.raises(EngineError, match="line 2, has the placeholder"):
        install("docker", tmp_path, config)


@pytest.mark.parametrize(
    ("key", "is_own"), [("log-opts", True), ("data-root", False), ("labels", False)]
)
def test_placeholders_in_docker_log_options_alone_are_accepted(
    tmp_path: Path, key: str, is_own: bool
) -> None:
    tag = '{{.Name}}/{{index .ContainerLabels "com.x"}}'
    value: Any = {"tag": tag} if key == "log-opts" else [tag] if key == "labels" else tag
    config = tmp_path / "daemon.json"
    config.write_text(json.dumps({"log-driver": "json-file", key: value}))
    if is_own:
        install("docker", tmp_path, config)
        return
    with pytest.raises(EngineError, match=r"the placeholder '\{\{\.Name\}\}'"):
        install("docker", tmp_path, config)


def test_a_placeholder_in_an_imported_file_is_refused(tmp_path: Path) -> None:
    """Before containerd 2.1, gpuhook's drop-in contains copies of containerd's settings."""
    config, other = tmp_path / "config.toml", tmp_path / "other.toml"
    config.write_text(f'version = 2\nimports = ["{other}"]\n')
    other.write_text(f'version = 2\n[{CRI}]\nsandbox_image = "${{IMAGE}}"\n')
    with pytest.raises(EngineError, match=f"{other}, line 3, has the placeholder"):
        install("containerd", tmp_path, config)


@pytest.mark.parametrize("value", PLACEHOLDERS)
def test_a_placeholder_in_a_copied_podman_list_is_refused(tmp_path: Path, value: str) -> None:
    """Our drop-in repeats hooks_dir of containers.conf."""
    config = tmp_path / "etc/containers/containers.conf"
    config.parent.mkdir(parents=True)
    config.write_text(f'[engine]\nhooks_dir = ["{value}"]\n')
    ask = EngineRequest(
        RUNTIMES, prefix=str(tmp_path), hook="prestart", hook_path="/opt/gpuhook-prestart"
    )
    with pytest.raises(EngineError, match=f"{config}, line 2, has the placeholder"):
        ENGINES["podman"].install(ask)
    config.write_text('[containers]\nlog_tag = "{{.Name}}/{{ .ID }}"\n')
    assert ENGINES["podman"].install(ask).targets


@given(st.text())
def test_any_text_is_searched_for_placeholders_without_error(text: str) -> None:
    for line, found in placeholders.find(text):
        assert found in text
        assert 1 <= line <= text.count("\n") + 1


# Files that another program writes ----------------------------------------------------------

CLAIMS = (
    "# Ansible managed", "# This file is managed by Puppet. DO NOT EDIT.",
    "# Generated by Chef for node1", "#  THIS FILE IS AUTOMATICALLY GENERATED", "# auto-generated",
    "#\n# Do not edit this file: changes will be overwritten", "# don't modify",
    "# Autogenerated by x",
    "# managed by terraform", "# Salt managed",
)  # fmt: skip
NO_CLAIMS = (
    "# Licensed under the Apache License", f"# {DROP_IN_HEADER}", "# This file may be edited.",
    "version = 2\n# DO NOT EDIT", "# The settings of containerd, see containerd-config.toml(5)",
)  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("version", [1, 2])
def test_editing_a_file_another_program_writes_is_refused(
    tmp_path: Path, claim: str, version: int
) -> None:
    config = tmp_path / "config.toml"
    head = "version = 2\n" if version == 2 else 'root = "/r"\n'
    config.write_text(f"{claim}\n\n{head}")
    before = tree(tmp_path)
    with pytest.raises(
        EngineError, match=f"{config} is written by another program.*line"
    ) as caught:
        install("containerd", tmp_path, config)
    assert tree(tmp_path) == before
    if version == 1:
        return
    [wanted] = re.findall(r"Make that program write (imports = .*?\]),", str(caught.value))
    config.write_text(f"{claim}\n{wanted}\nversion = 2\n")
    install("containerd", tmp_path, config)  # the file needs no edit now
    assert config.read_text() == f"{claim}\n{wanted}\nversion = 2\n"
    assert (tmp_path / "conf.d/99-gpuhook.toml").exists()


@pytest.mark.parametrize("text", NO_CLAIMS)
def test_other_leading_comments_are_accepted(tmp_path: Path, text: str) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"{text}\n" if "version" in text else f"{text}\nversion = 2\n")
    install("containerd", tmp_path, config)


# Places where nothing can be written --------------------------------------------------------


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio", "podman"])
def test_a_link_into_a_system_store_is_refused(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "nix/store"
    monkeypatch.setattr(managed, "STORES", {str(store): "NixOS"})
    (store / "abc-etc").mkdir(parents=True)
    etc = tmp_path / "etc"
    etc.symlink_to(store / "abc-etc")
    name = {"docker": "daemon.json", "podman": "99-gpuhook.conf"}.get(engine, "config")
    before = tree(tmp_path)
    option = managed._SETTINGS[engine]
    with pytest.raises(EngineError, match=f"{etc}/.* leads to .*, a file that NixOS.*{option}"):
        install(engine, tmp_path, etc / name)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio"])
@pytest.mark.parametrize(
    ("system", "title"), [("talos", "Talos"), ("bottlerocket", "Bottlerocket")]
)
@pytest.mark.parametrize("quotes", ["", '"'])
def test_a_system_that_writes_its_own_engine_files_is_refused(
    tmp_path: Path, engine: str, system: str, title: str, quotes: str
) -> None:
    release = tmp_path / "etc/os-release"
    release.parent.mkdir()
    release.write_text(f'NAME="x"\nID_LIKE=debian\nID={quotes}{system}{quotes}\n')
    before = tree(tmp_path)
    with pytest.raises(EngineError, match=f"{title} writes the files of {engine} itself.*mounts"):
        ENGINES[engine].install(EngineRequest(RUNTIMES, prefix=str(tmp_path)))
    assert tree(tmp_path) == before
    release.write_text("ID=debian\nVERSION=talos\n")
    ENGINES[engine].install(EngineRequest(RUNTIMES, prefix=str(tmp_path)))


@pytest.mark.parametrize("name", ["containerd.toml", "conf.d/20-customization.part"])
def test_the_files_of_talos_are_known_by_their_folder(tmp_path: Path, name: str) -> None:
    """Talos' own containerd has another file, and a pod can't see the os-release of Talos."""
    config = tmp_path / "etc/cri" / name
    config.parent.mkdir(parents=True)
    config.write_text("version = 3\n")
    ask = EngineRequest(RUNTIMES, prefix=str(tmp_path), config=str(config))
    with pytest.raises(EngineError, match="Talos writes the files of containerd itself"):
        ENGINES["containerd"].install(ask)


@pytest.mark.parametrize("program", ["shimpei", "nvidia-oci"])
def test_the_file_of_bottlerocket_is_known_by_its_programs(tmp_path: Path, program: str) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'version = 2\n[{CRI}.containerd.runtimes.x.options]\nBinaryName = "{program}"'
    )
    with pytest.raises(EngineError, match="Bottlerocket writes the files of containerd itself"):
        install("containerd", tmp_path, config)


def test_links_of_an_image_that_lead_out_of_it_are_not_followed(tmp_path: Path) -> None:
    """Installation succeeds, because gpuhook only looks for files through these links."""
    for name, target in (("var", "/nowhere"), ("etc/os-release", "/etc/os-release")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    ask = EngineRequest(RUNTIMES, prefix=str(tmp_path))
    [drop_in, _] = ENGINES["containerd"].install(ask).targets
    assert drop_in.path == f"{tmp_path}/etc/containerd/conf.d/99-gpuhook.toml"


# Files with tables of two versions ----------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("program", [None, (1, 7), (2, 0), (2, 1)])
@pytest.mark.parametrize("is_imported", [False, True])
def test_containerd_2_uses_only_plugin_tables_of_version_3(
    tmp_path: Path, version: int, program: Any, is_imported: bool
) -> None:
    """If any file has tables of version 3, containerd drops those of version 2 in every file."""
    config, other = tmp_path / "config.toml", tmp_path / "other.toml"
    table = '[plugins."{}".containerd.runtimes.runc.options]\r\nSystemdCgroup = {}\r\n'
    old, new = table.format(starts.V2, "true"), table.format(starts.V3, "false")
    head = f'version = {version}\r\nimports = ["{other}"]\r\n'
    config.write_bytes((head + old + ("" if is_imported else new)).encode())
    other.write_bytes(f"version = {version}\r\n{new if is_imported else ''}".encode())
    before = config.read_bytes()
    ask = EngineRequest(RUNTIMES, config=str(config))
    text = containerd.answer(ask, program).targets[0].text
    is_new = version == 3 or program != (1, 7)
    assert {*tomllib.loads(text)["plugins"]} == {starts.V3 if is_new else starts.V2}
    assert f"SystemdCgroup = {'false' if is_new else 'true'}" in text
    assert config.read_bytes() == before
