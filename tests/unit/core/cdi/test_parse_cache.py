"""Parsed CDI specs, saved for the next start and read again after a change."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpuhook
from gpuhook.base import state_directory
from gpuhook.base.config.model import Config
from gpuhook.core.cdi import document, parse_cache, parse_result

LONG_AGO = 10**10 * 60  # nanoseconds


def of(*devices: str) -> str:
    entries = [{"name": name, "containerEdits": {"env": [f"N={name}"]}} for name in devices]
    return json.dumps({"cdiVersion": "0.3.0", "kind": "v.com/g", "devices": entries})


class Site:
    """A folder of CDI specs, with a count of how often one was parsed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cdi"
        self.folder.mkdir()
        self.state = folder / "state"
        self.config = Config()
        self.config.cdi_spec_dirs = (str(self.folder),)
        self.config.state_dir = str(self.state)
        self.reads = 0

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def names(self) -> list[str]:
        return [name.partition("=")[2] for name in parse_cache.read_folders(self.config).devices]

    def errors(self) -> list[str]:
        return [str(error) for error in parse_cache.read_folders(self.config).errors]

    def new_reads(self) -> int:
        before = self.reads
        self.names()
        return self.reads - before

    @property
    def file(self) -> Path:
        [path] = self.state.glob("cdi-documents-*")
        return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A folder of CDI specs, in which a file counts as settled as soon as it is read."""
    made = Site(tmp_path)
    real = document.read

    def read(data: bytes) -> parse_result.ParseResult:
        made.reads += 1
        return real(data)

    monkeypatch.setattr(document, "read", read)
    monkeypatch.setattr(parse_cache, "_SETTLED_NS", -LONG_AGO)
    return made


def test_an_unchanged_cdi_spec_is_not_read_again(site: Site) -> None:
    site.write("a.json", of("x", "y"))
    site.write("b.yaml", "kind: [\n")
    before = [site.names(), site.errors()]
    assert site.reads == 2
    assert [site.names(), site.errors()] == before
    assert site.reads == 2
    assert site.errors()[0].startswith(f"{site.folder}/b.yaml, line ")


def _written_again(path: Path) -> None:
    old = path.stat()
    path.write_text(path.read_text().replace("x", "z"))
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


def _replaced(path: Path) -> None:
    old = path.stat()
    new = path.with_name(".new")
    new.write_text(path.read_text().replace("x", "z"))
    os.utime(new, ns=(old.st_atime_ns, old.st_mtime_ns))
    new.rename(path)


@pytest.mark.parametrize("change", [_written_again, _replaced])
def test_a_changed_cdi_spec_of_the_same_size_and_time_is_read_again(
    site: Site, change: Callable[[Path], None]
) -> None:
    path = site.write("a.json", of("x"))
    other = site.write("b.json", of("other"))
    assert site.names() == ["x", "other"]
    stamp = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == stamp:  # until the next tick of the kernel's clock
        change(path)
    assert site.names() == ["z", "other"]
    assert site.reads == 3
    other.unlink()
    assert site.names() == ["z"]
    assert site.reads == 3
    assert str(other) not in site.file.read_text()


@pytest.mark.protects(
    "settled-document",
    "a CDI spec that was changed just now isn't cached",
    instead="settled = parses.known",
)
def test_a_cdi_spec_written_just_now_is_not_saved(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec could change again within the same clock tick, and its times would look the same."""
    monkeypatch.undo()
    path = site.write("a.json", of("x"))
    parse_cache.read_folders(site.config)
    assert not site.state.exists()
    later = path.stat().st_ctime_ns + parse_cache._SETTLED_NS
    monkeypatch.setattr("time.time_ns", lambda: later)
    parse_cache.read_folders(site.config)
    assert not site.state.exists()
    monkeypatch.setattr("time.time_ns", lambda: later + 1)
    parse_cache.read_folders(site.config)
    assert "x" in site.file.read_text()


def test_specs_are_saved_even_after_the_clock_was_set_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose time lies in the future is saved, too."""
    monkeypatch.undo()
    path = site.write("a.json", of("x"))
    earlier = path.stat().st_ctime_ns - 20 * 86400 * 10**9
    monkeypatch.setattr("time.time_ns", lambda: earlier)
    parse_cache.read_folders(site.config)
    assert "x" in site.file.read_text()


@pytest.mark.protects(
    "saved-mode",
    "cached CDI specs are readable only by root",
    instead="_MODE = 0o644  # a document may be for root alone to read",
)
def test_saved_cdi_specs_are_accessible_to_their_owner_only(site: Site) -> None:
    site.write("a.json", of("x"))
    site.names()
    assert site.file.stat().st_mode & 0o777 == 0o600


def _writable(path: Path) -> None:
    path.chmod(0o666)


def _folder_writable(path: Path) -> None:
    path.parent.chmod(0o777)


def _damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"N=x", b"N=y"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _link(path: Path) -> None:
    elsewhere = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(elsewhere)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.protects(
    "saved-owner",
    "a cache of CDI specs that other users may have written is ignored",
    instead="return True",
)
@pytest.mark.parametrize("spoil", [_writable, _folder_writable, _damaged, _cut, _link, _pipe])
def test_an_unsafe_or_damaged_file_of_saved_specs_is_ignored(
    site: Site, spoil: Callable[[Path], None]
) -> None:
    site.write("a.json", of("x"))
    assert site.names() == ["x"]
    spoil(site.file)
    assert site.new_reads() == 1
    assert site.names() == ["x"]


@pytest.mark.parametrize(
    "text", ["[]", '["0", {}]', "[1, 2]", "[{v}, []]", '[{v}, {"x": 3}]', '[{v}, {"x": [1]}]',
             '[{v}, {"x": [[1], null, [3]]}]', "null", "{"],
)  # fmt: skip
def test_saved_specs_of_the_wrong_form_are_ignored(site: Site, text: str) -> None:
    site.write("a.json", of("x"))
    site.names()
    body = text.replace("{v}", f'"{gpuhook.__version__}"').encode()
    site.file.write_bytes(state_directory.digest(body).encode() + b"\n" + body)
    assert site.names() == ["x"]
    assert site.reads == 2


def test_two_folder_configurations_do_not_invalidate_each_other(site: Site, tmp_path: Path) -> None:
    site.write("a.json", of("x"))
    other = Config()
    other.cdi_spec_dirs = (str(tmp_path / "other"), str(site.folder))
    other.state_dir = site.config.state_dir
    for _ in range(3):
        parse_cache.read_folders(site.config)
        parse_cache.read_folders(other)
    assert site.reads == 2


def test_a_start_with_all_specs_saved_imports_no_yaml(site: Site) -> None:
    site.write("a.json", of("x"))
    site.write("b.yaml", "kind: [\n")
    site.names()
    code = (
        f"import sys; sys.path.append({str(Path(gpuhook.__file__).parents[1])!r})\n"
        "from gpuhook.core.cdi import apply, parse_cache\n"
        "from gpuhook.base.config.model import Config\n"
        "from gpuhook.base.host import files\n"
        f"config = Config()\nconfig.cdi_spec_dirs = {site.config.cdi_spec_dirs!r}\n"
        f"config.state_dir = {site.config.state_dir!r}\n"
        "print(apply.resolve(parse_cache.read_folders(config), ['v.com/g=x']), *sys.modules)\n"
    )
    words = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert done.startswith("{'env': ['N=x']}")
    slow = {"yaml", "re", "json", "tempfile", "typing", "struct", "gpuhook.core.cdi.document"}
    assert slow & set(done.split()) == set()
