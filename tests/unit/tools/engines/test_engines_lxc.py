"""gpuhook's line in an LXC container's file: found and removed, even if the file is rewritten."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines import installer, lxc_text
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.store import Store

PLAIN, PROXMOX = "/var/lib/lxc/box/config", "/etc/pve/lxc/101.conf"
INCLUDED = "/var/lib/gpuhook/lxc/gpuhook-box.conf"
SNAPSHOT = "\n[before]\nlxc.include: /etc/more.conf\nrootfs: a:b\n"
THEIRS = {
    PLAIN: ["", "lxc.uts.name = box", "lxc.uts.name = box\n\n\n", "# mine\r\nlxc.arch = x\r\n"],
    PROXMOX: [
        "arch: amd64\nrootfs: local:vm-101-disk-0\n",
        f"#my notes\narch: amd64\nlxc.include: /etc/more.conf\n{SNAPSHOT}",
        f"arch: amd64\n\n[pve:pending]\ncores: 2\n{SNAPSHOT}",
        f"arch: amd64{SNAPSHOT}",
    ],
}
CASES = [(path, text) for path, texts in THEIRS.items() for text in texts]
# Lines of generated files, as people and programs write them.
PIECES = st.lists(
    st.sampled_from(
        ["lxc.arch = x", "# a", "", " ", "[snap]", "dev0: /dev/x", "lxc.include = /a.conf", "\r"]
    ),
    max_size=8,
).map("\n".join)


def ask(prefix: Path, path: str, line: str = INCLUDED, text: str = "lxc.a = b\n") -> EngineRequest:
    """Return a request for a container's file, below a folder."""
    header = "# Written by `gpuhook install`; `gpuhook uninstall` takes it back.\n"
    return EngineRequest(
        (), units=((f"{prefix}{path}", line), (f"{prefix}{INCLUDED}", header + text))
    )


def written(prefix: Path, path: str, text: str) -> tuple[Path, Store]:
    """Write a container's file below a folder; return it, and the records of changes."""
    place = prefix / path[1:]
    place.parent.mkdir(parents=True)
    place.write_bytes(text.encode())
    return place, Store(str(prefix / "state"))


def install(store: Store, asked: EngineRequest) -> None:
    with store.locked():
        installer.install(store, list(ENGINES["lxc"].install(asked).targets))


def uninstall(store: Store) -> None:
    with store.locked():
        installer.uninstall(store, store.records())


def rewritten(text: str) -> str:
    """Return a file as Proxmox writes it again: notes first, then settings, sections last."""
    head, bracket, tail = text.partition("\n[")
    lines = [line for line in head.split("\n") if line]
    notes = [line for line in lines if line.startswith("#")]
    keys = sorted(line for line in lines if not line.startswith(("#", "lxc.")))
    lxc = [line.replace(" = ", ": ", 1) for line in lines if line.startswith("lxc.")]
    return "".join(f"{line}\n" for line in (*notes, *keys, *lxc)) + bracket + tail


@given(PIECES, st.sampled_from([PLAIN, PROXMOX]))
def test_the_include_line_is_found_and_other_text_stays(others: str, path: str) -> None:
    wanted = {lxc_text.OTHERS: others, lxc_text.OURS: INCLUDED}
    text = lxc_text.edited(others, wanted, path)
    found = lxc_text.parse(text, path)
    assert found[lxc_text.OURS] == INCLUDED
    rest = str(found.get(lxc_text.OTHERS, ""))
    assert rest == others or (
        not others.endswith("\n") and rest.replace("\n", "") == others.replace("\n", "")
    )
    assert lxc_text.edited(text, found, path) == text
    if path == PROXMOX and others.startswith("["):
        assert text.index(INCLUDED) < text.index("[")


@pytest.mark.parametrize(("path", "before"), CASES)
def test_a_file_is_restored_to_the_byte(tmp_path: Path, path: str, before: str) -> None:
    place, store = written(tmp_path, path, before)
    for text in ("lxc.a = b\n", "lxc.a = c\n", "lxc.a = b\n"):
        install(store, ask(tmp_path, path, text=text))
        now = place.read_bytes().decode()
        assert now.count(INCLUDED) == 1
        assert now.endswith(before.partition("\n[")[2])
        assert (tmp_path / INCLUDED[1:]).read_text().endswith(text)
    uninstall(store)
    assert place.read_bytes().decode() == before
    assert not (tmp_path / INCLUDED[1:]).parent.exists()


def test_the_include_line_has_comments_except_in_proxmox_files(tmp_path: Path) -> None:
    for path, mark in ((PLAIN, 2), (PROXMOX, 0)):
        place = tmp_path / path[1:]
        place.parent.mkdir(parents=True)
        place.write_text(f"lxc.arch = x\n{SNAPSHOT if mark == 0 else ''}")
        install(Store(str(tmp_path / f"state-{mark}")), ask(tmp_path, path))
        lines = place.read_text().split("\n")
        assert len([line for line in lines if line.startswith("#")]) == mark
    ours, blank, section = place.read_text().split("\n")[1:4]
    assert (ours, blank, section) == (f"lxc.include: {INCLUDED}", "", "[before]")


@pytest.mark.parametrize("before", THEIRS[PROXMOX])
@pytest.mark.parametrize("also", ["", "memory: 512\n"])
def test_a_file_rewritten_by_proxmox_keeps_one_line_until_uninstall(
    tmp_path: Path, before: str, also: str
) -> None:
    """Proxmox rewrites the file after a change in its web interface, for instance."""
    place, store = written(tmp_path, PROXMOX, before)
    install(store, ask(tmp_path, PROXMOX))
    place.write_text(rewritten(also + place.read_text()))
    for _ in range(2):
        install(store, ask(tmp_path, PROXMOX, text="lxc.a = c\n"))
        assert place.read_text().count(INCLUDED) == 1
    uninstall(store)
    assert place.read_text() == rewritten(also + before)


def test_the_line_in_a_proxmox_snapshot_is_kept(tmp_path: Path) -> None:
    place, store = written(tmp_path, PROXMOX, "arch: amd64\n")
    install(store, ask(tmp_path, PROXMOX))
    with place.open("a") as file:
        file.write(f"\n[snap]\narch: amd64\nlxc.include: {INCLUDED}\n")
    uninstall(store)
    assert place.read_text() == f"arch: amd64\n\n[snap]\narch: amd64\nlxc.include: {INCLUDED}\n"


def test_lines_added_by_the_owner_survive_uninstall(tmp_path: Path) -> None:
    place, store = written(tmp_path, PLAIN, "lxc.arch = x\n")
    install(store, ask(tmp_path, PLAIN))
    text = place.read_text()
    place.write_text(f"# first\n{text}lxc.cap.drop = sys_time\n")
    uninstall(store)
    assert place.read_text() == "# first\nlxc.arch = x\nlxc.cap.drop = sys_time\n"


def test_a_generated_file_is_refused_unless_it_has_the_line(tmp_path: Path) -> None:
    place, store = written(tmp_path, PLAIN, "# Ansible managed\nlxc.arch = x\n")
    with pytest.raises(EngineError, match=rf"write lxc\.include = {INCLUDED}, and run this again"):
        install(store, ask(tmp_path, PLAIN))
    assert not (tmp_path / INCLUDED[1:]).exists()
    place.write_text(f"# Ansible managed\nlxc.include = {INCLUDED}\n")
    install(store, ask(tmp_path, PLAIN))
    assert (tmp_path / INCLUDED[1:]).exists()
    assert place.read_text() == f"# Ansible managed\nlxc.include = {INCLUDED}\n"


def test_another_program_s_file_at_the_included_path_is_refused(tmp_path: Path) -> None:
    place, other = (tmp_path / path[1:] for path in (PLAIN, INCLUDED))
    for path in (place, other):
        path.parent.mkdir(parents=True)
        path.write_text("lxc.arch = x\n")
    with pytest.raises(EngineError, match="is not a file of gpuhook"):
        install(Store(str(tmp_path / "state")), ask(tmp_path, PLAIN))
    assert place.read_text() == other.read_text() == "lxc.arch = x\n"


def test_a_removed_line_stays_removed_when_the_lines_are_written_again(tmp_path: Path) -> None:
    place, store = written(tmp_path, PLAIN, "lxc.arch = x\n")
    install(store, ask(tmp_path, PLAIN))
    place.write_text("lxc.arch = y\n")
    install(store, ask(tmp_path, PLAIN, line="", text="lxc.a = c\n"))
    assert (tmp_path / INCLUDED[1:]).read_text().endswith("lxc.a = c\n")
    assert place.read_text() == "lxc.arch = y\n"
    uninstall(store)
    assert place.read_text() == "lxc.arch = y\n"
