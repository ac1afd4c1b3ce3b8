"""Byte order marks in engines' files: kept, or reported if the engine doesn't read them."""

import codecs
import itertools
import json
from pathlib import Path

import pytest

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines import containerd, docker, installed, installer, marks
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.files import DROP_IN_HEADER, decode
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.store import Store, TargetFile

ENCODINGS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
}
MARKS = pytest.mark.parametrize("mark", ENCODINGS, ids=lambda mark: mark.hex())
RUNTIMES = (("gpu-py", "/opt/gpu-py"),)
DAEMON = '{\r\n  "log-driver": "json-file",\r\n  "labels": ["é"]\r\n}\r\n'
# Engine, version, byte order mark, and whether that engine was observed to read such a file.
READ = [
    ("docker", "20.10.24+dfsg1", codecs.BOM_UTF8, False),
    ("docker", "20.10.24+dfsg1", codecs.BOM_UTF16_LE, False),
    ("docker", "26.1.5+dfsg1", codecs.BOM_UTF8, True),
    ("docker", "28.5.2", codecs.BOM_UTF16_BE, True),
    ("docker", "28.5.2", codecs.BOM_UTF32_LE, False),
    ("containerd", "1.6.20", codecs.BOM_UTF8, True),
    ("containerd", "1.7.24", codecs.BOM_UTF16_LE, False),
    ("containerd", "2.1.9", codecs.BOM_UTF8, False),
    ("podman", "4.3.1", codecs.BOM_UTF8, False),
    ("podman", "5.4.2", codecs.BOM_UTF8, True),
    ("podman", "5.4.2", codecs.BOM_UTF16_LE, False),
    ("crio", "1.31.3", codecs.BOM_UTF8, True),
]


def written(text: str, mark: bytes) -> bytes:
    return mark + text.encode(ENCODINGS[mark])


@MARKS
def test_byte_order_marks_survive_decoding_and_encoding(mark: bytes) -> None:
    data = written(DAEMON, mark)
    assert marks.mark_of(data) == mark
    assert decode(data, "x") == DAEMON
    assert marks.encoded(DAEMON, data) == data
    assert marks.encoded(DAEMON, DAEMON.encode()) == marks.encoded(DAEMON, None) == DAEMON.encode()


@pytest.mark.parametrize(("engine", "version", "mark", "is_read"), READ)
def test_byte_order_marks_are_reported_only_if_the_engine_rejects_them(
    engine: str, version: str, mark: bytes, is_read: bool
) -> None:
    said = marks.problem(engine, mark + b"x", lambda: version)
    assert (said == "") is is_read
    assert is_read or "byte order mark of UTF-" in said
    if ENCODINGS[mark] == "utf-8":  # nothing is reported for an unknown version
        assert marks.problem(engine, mark + b"x", lambda: None) == ""
    assert marks.problem(engine, b"x", lambda: pytest.fail("no need to know")) == ""


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("mark", [*ENCODINGS][:3], ids=lambda mark: mark.hex())
def test_daemon_json_keeps_its_byte_order_mark(
    tmp_path: Path, mark: bytes, is_edited: bool
) -> None:
    path = tmp_path / "etc/docker/daemon.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(written(DAEMON, mark))
    store = Store(str(tmp_path / "state"))
    for set_default in (True, False):
        ask = EngineRequest(
            RUNTIMES, prefix=str(tmp_path), set_default=set_default, cdi=not set_default
        )
        with store.locked():
            installer.install(store, list(docker.Docker().install(ask).targets))
        data = path.read_bytes()
        assert data.count(mark) == 1
        assert '"gpu-py": {\r\n' in decode(data, "x")
    if is_edited:
        path.write_bytes(data.replace("é".encode(ENCODINGS[mark]), "ü".encode(ENCODINGS[mark])))
    with store.locked():
        installer.uninstall(store, store.records())
    if is_edited:
        assert path.read_bytes().startswith(mark)
        assert json.loads(decode(path.read_bytes(), "x")) == json.loads(DAEMON.replace("é", "ü"))
    else:
        assert path.read_bytes() == written(DAEMON, mark)


@MARKS
@pytest.mark.parametrize("version", ["20.10.24", "28.5.2"])
def test_a_mark_that_docker_does_not_read_is_refused(
    tmp_path: Path, mark: bytes, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "daemon.json"
    path.write_bytes(written(DAEMON, mark))
    monkeypatch.setattr(installed, "version", lambda *_: version)
    ask = EngineRequest(RUNTIMES, config=str(path))
    if version == "28.5.2" and "32" not in ENCODINGS[mark]:
        assert docker.Docker().install(ask).targets
        return
    with pytest.raises(EngineError, match=f"{path} starts with a byte order mark of UTF-.*Docker"):
        docker.Docker().install(ask)


@pytest.mark.parametrize("program", [None, (1, 6), (1, 7), (2, 0), (2, 1)])
@pytest.mark.parametrize("version", [1, 2, 3])
@MARKS
def test_containerd_files_keep_a_readable_mark_and_others_are_refused(
    tmp_path: Path, mark: bytes, version: int, program: tuple[int, int] | None
) -> None:
    """A file of version 3 is for containerd 2, which reads no file with a mark."""
    path = tmp_path / "config.toml"
    head = f"version = {version}\n" if version > 1 else ""
    path.write_bytes(written(f'{head}root = "é"\n', mark))
    before = path.read_bytes()
    ask = EngineRequest(RUNTIMES, config=str(path))
    reads = mark == codecs.BOM_UTF8 and version < 3 and (program is None or program < (2, 0))
    if not reads:
        with pytest.raises(EngineError, match=f"{path} starts with a byte order mark of UTF-"):
            containerd.answer(ask, program)
        return
    store = Store(str(tmp_path / "state"))
    with store.locked():
        installer.install(store, list(containerd.answer(ask, program).targets))
    assert path.read_bytes().startswith(mark)
    assert path.read_bytes().count(mark) == 1
    with store.locked():
        installer.uninstall(store, store.records())
    assert path.read_bytes() == before


@pytest.mark.parametrize("engine", ["podman", "crio"])
@pytest.mark.parametrize("version", ["4.3.1", "1.27.1", "5.4.2", "1.31.3"])
def test_drop_ins_with_a_mark_are_kept_or_refused_by_engine_version(
    tmp_path: Path, engine: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpuhook recognizes its drop-in with a mark, and keeps additions that the engine can read."""
    store = Store(str(tmp_path / "state"))
    drop_in = tmp_path / "99-gpuhook.conf"
    (tmp_path / "crio.conf").touch()
    named = {"podman": drop_in, "crio": tmp_path / "crio.conf"}[engine]
    ask = EngineRequest(RUNTIMES, config=str(named), drop_in=str(drop_in))

    def install() -> None:
        with store.locked():
            installer.install(store, list(ENGINES[engine].install(ask).targets))

    install()
    drop_in.write_bytes(codecs.BOM_UTF8 + drop_in.read_bytes() + b'[network]\nname = "x"\n')
    monkeypatch.setattr(installed, "version", lambda *_: version)
    first = {"podman": (4, 6), "crio": (1, 28)}[engine]
    if tuple(map(int, version.split(".")[:2])) < first:
        with pytest.raises(EngineError, match=f"{drop_in} starts with a byte order mark of UTF-8"):
            install()
        return
    install()
    assert drop_in.read_bytes().startswith(codecs.BOM_UTF8 + f"# {DROP_IN_HEADER}".encode())
    assert b"[network]" in drop_in.read_bytes()


@pytest.mark.parametrize(
    ("syntax", "mark"), [*itertools.product(("unit", "toml", "json", "whole"), [codecs.BOM_UTF8])]
)
def test_a_files_mark_survives_install_and_uninstall(
    tmp_path: Path, syntax: str, mark: bytes
) -> None:
    path = tmp_path / "file"
    texts = {"unit": "[Exec]\n", "toml": "a = 1\n", "json": '{"a": 1}\n', "whole": "echo\n"}
    path.write_bytes(mark + texts[syntax].encode())
    text = {**texts, "toml": "a = 2\n", "json": '{"a": 2}\n', "whole": "true\n"}[syntax]
    store = Store(str(tmp_path / "state"))
    with store.locked():
        installer.install(store, [TargetFile("docker", str(path), syntax, text, str(path))])
    assert path.read_bytes() == mark + text.encode()
    with store.locked():
        installer.uninstall(store, store.records())
    assert path.read_bytes() == mark + texts[syntax].encode()
