"""CDI specs as text that every reader understands as meant, and as files that are always whole."""

import json
import os
import re
import resource
import stat
import tempfile
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import CdiError, UntrustedPathError
from gpuhook.tools.cdi import write

# Plain scalars that some YAML readers don't read as text.
AMBIGUOUS = [
    "0", "1:0", "0:1", "7:0", "1e3", "1E3", "0x1f", "0o17", "017", "1_000", "+1", "-1", ".5", "1.",
    ".inf", "-.INF", ".nan", "y", "Y", "n", "N", "yes", "No", "ON", "off", "true", "False", "null",
    "NULL", "Null", "~", "", "<<", "=", "2020-01-01", "2020-01-01T00:00:00Z", " a", "a ", "a: b",
    "a:", "a #b", "#a", "- a", "-", "?", "!a", "&a", "*a", "{", "[", "]", "|", ">", "%a", "@a",
    "`a", "'a", '"a', "a\nb", "\t", "\x85", "\u2028", "\ufeff", "\x00", "---", "...", "é",
]  # fmt: skip
# Scalars that are written without quotes, so that a person can read the file easily.
PLAIN = ["/dev/nvidia0", "GPU-12345678-1234", "nvidia.com/gpu", "rprivate", "NVIDIA_X=void", "gpu0"]


def document(name: str) -> dict[str, object]:
    return {"cdiVersion": "0.5.0", "devices": [{"name": name, "major": 195, "args": [name]}]}


@pytest.mark.protects(
    "quoted-strings",
    "ambiguous strings in a CDI spec are quoted",
    instead='return dumper.represent_scalar("tag:yaml.org,2002:str", text, None)',
)
@pytest.mark.parametrize("text", AMBIGUOUS)
def test_ambiguous_yaml_strings_are_quoted(text: str) -> None:
    made = write.to_text(document(text), "yaml")
    assert re.search(r'name: "', made)
    assert yaml.safe_load(made) == document(text)


@pytest.mark.parametrize("text", PLAIN)
def test_unambiguous_yaml_strings_are_not_quoted(text: str) -> None:
    assert f"name: {text}\n" in write.to_text(document(text), "yaml")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_in_a_cdi_spec_is_read_back(text: str) -> None:
    made = write.to_text(document(text), "yaml")
    assert yaml.safe_load(made) == document(text)
    # BaseLoader reads every scalar as text, so this checks the quoting itself.
    [device] = yaml.load(made, Loader=yaml.BaseLoader)["devices"]  # noqa: S506 - text alone
    assert device["name"] == text
    assert json.loads(write.to_text(document(text), "json")) == document(text)


def test_yaml_starts_with_a_marker_and_keeps_the_key_order() -> None:
    shared = {"path": "/dev/a"}
    made = write.to_text({"kind": "a/b", "a": [shared, shared], "number": 432}, "yaml")
    assert made.startswith("---\nkind: a/b\n")
    assert made.endswith("number: 432\n")
    assert "&" not in made


def test_file_names_are_derived_from_the_kind() -> None:
    assert write.file_name("nvidia.com/gpu", "yaml") == "nvidia.com-gpu.yaml"
    assert write.file_name("a.com/b", "json") == "a.com-b.json"


# Files --------------------------------------------------------------------------------------


def test_a_written_file_is_world_readable_despite_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.yaml"
    old = os.umask(0o077)
    try:
        assert write.write(str(path), "a")
    finally:
        os.umask(old)
    assert path.read_text() == "a"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == ["a.yaml"]


def test_an_unreadable_cdi_spec_file_becomes_world_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a")
    path.chmod(0o600)
    assert write.write(str(path), "a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_with_the_same_text_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    assert write.write(str(path), "a")
    before = path.stat()
    assert not write.write(str(path), "a")
    assert path.stat().st_ino == before.st_ino
    assert write.write(str(path), "b")
    assert path.read_text() == "b"


@pytest.mark.protects(
    "document-whole",
    "a CDI spec is replaced atomically as a whole",
    instead="open(path, 'wb').write(data)",
)
def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # simulates a full disk, by EFBIG
    try:
        with pytest.raises(CdiError, match="can't be written: File too large"):
            write.write(str(path), "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.yaml"]


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CdiError, match="can't be written"):
        write.write(str(tmp_path / "file/a.yaml"), "a")


def refused_to_nobody(path: Path) -> bool:
    """Return whether a process without root's rights is refused to write, with one sentence."""
    pid = os.fork()
    if pid == 0:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        try:
            write.write(str(path), "a")
        except CdiError as error:
            os._exit("Permission denied" not in str(error))
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def test_a_folder_without_write_permission_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.yaml")
        path.write_text("old")
        Path(folder).chmod(0o555)  # other users may read this folder, but not write to it
        try:
            assert refused_to_nobody(path)
        finally:
            Path(folder).chmod(0o755)
        assert path.read_text() == "old"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has others to fear")
def test_a_world_writable_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UntrustedPathError):
        write.write(str(folder / "a.yaml"), "a")


@pytest.mark.protects(
    "document-whole",
    "a CDI spec is replaced atomically as a whole",
    instead="open(path, 'wb').write(data)",
)
def test_readers_see_either_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    texts = ["a" * 100_000, "b" * 100_000]
    write.write(str(path), texts[0])
    seen: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(50):
            write.write(str(path), texts[number % 2])
    finally:
        done.set()
        reader.join()
    assert seen <= set(texts)
