"""gpuhook cdi generate and cdi transform root: refused arguments, output, and moved files."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import paper
import pytest
import yaml
from click.testing import CliRunner, Result

from gpuhook.base.errors import CdiError, GpuhookError, NoDriverError
from gpuhook.core import contract
from gpuhook.core.inventory.model import Inventory
from gpuhook.tools.cli import cli
from gpuhook.tools.cli.cdi_generate import SpecDestination
from gpuhook.vendors import registry

DOCUMENT = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {
            "name": "1:0",
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/drv/dev/nvidia0"}]
            },
        }
    ],
    "containerEdits": {"env": ["A=1e3"]},
}


def call(*words: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["cdi", *map(str, words)], input=stdin)


def refused(done: Result) -> str:
    assert isinstance(done.exception, GpuhookError), done.output
    return str(done.exception)


# generate -----------------------------------------------------------------------------------


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    said = refused(call("generate", "--kind", "nvidia.com/gpus", "--output", tmp_path))
    assert said.startswith("gpuhook doesn't support devices of the kind 'nvidia.com/gpus'.")
    assert "nvidia.com/gpu" in said


@pytest.mark.parametrize("name", ["nvidia.yml", "nvidia.YAML", "nvidia.txt", "nvidia.yaml~"])
def test_an_output_file_name_that_no_engine_reads_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CdiError, match="no engine reads"):
        SpecDestination(str(tmp_path / name), None)


@pytest.mark.parametrize(
    ("output", "form", "path", "written"),
    [
        ("cdi", None, "cdi/nvidia.com-gpu.yaml", "yaml"),
        ("cdi", "json", "cdi/nvidia.com-gpu.json", "json"),
        ("cdi.d/", None, "cdi.d/nvidia.com-gpu.yaml", "yaml"),
        ("a.json", None, "a.json", "json"),
        ("a.yaml", "json", "a.yaml", "json"),
        ("there.d", None, "there.d/nvidia.com-gpu.yaml", "yaml"),
        ("there.yaml", None, "there.yaml/nvidia.com-gpu.yaml", "yaml"),
    ],
)
def test_output_option_selects_the_path_and_format(
    tmp_path: Path, output: str, form: str | None, path: str, written: str
) -> None:
    (tmp_path / "there.d").mkdir()
    (tmp_path / "there.yaml").mkdir()
    place = SpecDestination(f"{tmp_path}/{output}", form)
    assert place.path_of("nvidia.com/gpu") == f"{tmp_path}/{path}"
    assert place.form == written


@pytest.fixture
def two_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The kinds of the two vendors whose devices the host has."""
    there = {name: paper.machine(name, tmp_path / name, 1) for name in ("amd", "gaudi")}
    for name, names in registry.BUILT_IN.items():
        monkeypatch.setattr(type(contract.load(names)), "discover", partial(_found, there, name))
    return [registry.BUILT_IN[name].KIND for name in there]


def _found(there: dict[str, Inventory], name: str, *_: object) -> Inventory:
    if name not in there:
        raise NoDriverError("None", "Install it")
    return there[name]


def test_several_kinds_are_written_to_standard_output_with_a_hint(
    two_kinds: list[str], config: list[str]
) -> None:
    done = call("generate", *config, "--format", "json")
    assert done.exit_code == 0, done.output
    assert sorted(each["kind"] for each in json.loads(done.stdout)) == two_kinds
    assert "name a folder with --output" in done.stderr
    done = call("generate", *config)
    assert sorted(each["kind"] for each in yaml.safe_load_all(done.stdout)) == two_kinds
    assert "name a folder with --output" in done.stderr


def test_summary_json_lists_the_written_cdi_specs(
    two_kinds: list[str], config: list[str], tmp_path: Path
) -> None:
    words = ["generate", *config, "--output", f"{tmp_path}/out/", "--summary", "json"]
    for changed in (True, False):
        found = json.loads(call(*words).stdout)
        assert [each["kind"] for each in found] == two_kinds
        for each in found:
            document = yaml.safe_load(Path(each["path"]).read_text())
            assert each["devices"] == [device["name"] for device in document["devices"]]
            assert each["changed"] is changed
    assert call(*words, "--dry-run").stdout == ""  # nothing would change


@pytest.mark.usefixtures("two_kinds")
def test_a_single_kind_goes_to_standard_output_without_a_hint(config: list[str]) -> None:
    done = call("generate", *config, "--format", "json", "--kind", "amd.com/gpu")
    assert json.loads(done.stdout)["kind"] == "amd.com/gpu"
    assert "name a folder with --output" not in done.stderr


# transform root -------------------------------------------------------------------------------


def moved(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return yaml.safe_load(done.stdout)


@pytest.mark.parametrize("text", [json.dumps(DOCUMENT), yaml.safe_dump(DOCUMENT)])
def test_transform_reads_standard_input_and_writes_standard_output(text: str) -> None:
    found = moved(call("transform", "root", "--from=/drv", "--to=/", stdin=text))
    node = {"path": "/dev/nvidia0", "hostPath": "/dev/nvidia0"}
    device = {"name": "1:0", "containerEdits": {"deviceNodes": [node]}}
    assert found == {**DOCUMENT, "devices": [device]}


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (("--to=/n",), "/n/drv/lib/x"),
        (("--from=/drv",), "/lib/x"),
        (("--from=/drv", "--to="), "/lib/x"),
        (("--from=", "--to=/n"), "/n/drv/lib/x"),
    ],
)
def test_a_root_that_is_not_given_is_the_hosts(words: tuple[str, ...], path: str) -> None:
    """nvidia-ctk has the same default."""
    edits = {"mounts": [{"hostPath": "/drv/lib/x", "containerPath": "/lib/x"}]}
    device = {"name": "0", "containerEdits": {"env": ["A=1"]}}
    document = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [device],
        "containerEdits": edits,
    }
    done = call("transform", "root", *words, stdin=yaml.safe_dump(document))
    assert moved(done)["containerEdits"]["mounts"][0]["hostPath"] == path


def test_unquoted_names_stay_strings() -> None:
    text = json.dumps(DOCUMENT).replace('"1:0"', "1:0")  # some YAML readers read it as base 60
    text = text.replace("{", "{ ").replace(":", ": ").replace("1: 0", "1:0")
    found = moved(call("transform", "root", "--from=/drv", "--to=/", stdin=text))
    assert found["devices"][0]["name"] == "1:0"


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_transform_reads_and_writes_files(tmp_path: Path, ending: str) -> None:
    source, output = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    source.write_text(json.dumps(DOCUMENT))
    words = ("transform", "root", "--from=/drv", "--to=/x", "--input", source, "--output", output)
    assert call(*words).stdout == f"wrote {output}\n"
    assert call(*words).stdout == f"{output}: unchanged\n"
    text = output.read_text()
    assert ("---" in text) == (ending == "yaml")
    assert "/x/dev/nvidia0" in text


def test_numbers_are_kept_as_numbers(tmp_path: Path) -> None:
    node = {"path": "/dev/a", "type": "c", "major": 195, "minor": 0, "fileMode": 432}
    document = {**DOCUMENT, "containerEdits": {"deviceNodes": [node]}}
    done = call("transform", "root", "--from=/a", "--to=/b", stdin=yaml.safe_dump(document))
    assert moved(done)["containerEdits"]["deviceNodes"] == [node]


@pytest.mark.parametrize("rest", ["---\nkind: a/b\n", "---\n---\n[]\n", "...\n{}"])
def test_input_with_a_second_cdi_spec_is_refused(rest: str) -> None:
    text = f"{json.dumps(DOCUMENT)}\n{rest}"
    said = refused(call("transform", "root", "--from=/a", "--to=/b", stdin=text))
    assert "a second CDI spec starts here" in said


@pytest.mark.parametrize("text", ["", "[]", "a: [", "\x00", "{}", "kind: 3", "&a [*a]"])
def test_input_that_is_no_cdi_spec_is_refused(text: str) -> None:
    assert refused(call("transform", "root", "--from=/a", "--to=/b", stdin=text))


def test_a_missing_input_file_is_refused(tmp_path: Path) -> None:
    done = call("transform", "root", "--from=/a", "--to=/b", "--input", tmp_path / "a.yaml")
    assert str(tmp_path) in refused(done)


@pytest.mark.protects(
    "transformed-writers",
    "a CDI spec that other users may have written isn't transformed",
    instead="data = host_files.read(source)",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root carries out what others write")
@pytest.mark.parametrize(
    "how", ["another user's", "his group may write", "all may write", "his folder"]
)
def test_input_writable_by_other_users_is_refused(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "in.json"
    path.write_text(json.dumps(DOCUMENT))
    if how == "another user's":
        os.chown(path, 1000, 1000)
    elif how == "his folder":
        os.chown(folder, 1000, 1000)
    else:
        path.chmod(0o664 if "group" in how else 0o646)
    words = ("transform", "root", "--from", "/drv", "--to", "/", "--input", path)
    said = refused(call(*words, "--output", tmp_path / "out.json"))
    assert "may be written by non-root users" in said or "belongs to user 1000" in said
    assert not (tmp_path / "out.json").exists()
