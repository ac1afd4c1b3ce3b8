"""Files of systemd with a block by gpuhook, and scripts that gpuhook writes as a whole."""

import shlex
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhook.base.errors import EngineError, LostDeviceError
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.plan.operations import AllowDevice, BindDevice, Plan
from gpuhook.hpc.rootfs import machines, units
from gpuhook.tools.cli import watch
from gpuhook.tools.engines import charliecloud, installer, unit_text, whole_text
from gpuhook.tools.engines.ask import EngineRequest
from gpuhook.tools.engines.files import Change
from gpuhook.tools.engines.known import ENGINES
from gpuhook.tools.engines.store import Store

NSPAWN, DROP_IN = "/etc/systemd/nspawn/box.nspawn", "/etc/systemd/system/box.service.d/x.conf"
BLOCK = "[Files]\nBind=/dev/nvidia0:/dev/nvidia0\n"


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("/", ["--property=DeviceAllow=/dev/nvidia0 rw"]),
        ("/run/nvidia/driver", ["--keep-unit", "--register=no"]),
    ],
)
def test_nodes_outside_dev_get_no_systemd_device_rule(root: str, words: list[str]) -> None:
    """systemd-nspawn adds a rule for each bound node, and systemd refuses rules for other paths."""
    node = DeviceNode("/dev/nvidia0", 195, 0, 0o666, 0, 0)
    plan = Plan([AllowDevice(node.numbers, ""), BindDevice(root, node, "")])
    bind = f"--bind={root.rstrip('/')}/dev/nvidia0:/dev/nvidia0"
    assert units.arguments(plan, ["A=1"]) == [bind, "--setenv=A=1", *words]


@pytest.mark.parametrize("value", ["A=1", "A=", "A= ", "A=a  b\tc\"d'e\\f%g$h", 'A="\\"', "A='"])
def test_variables_in_a_nspawn_file_are_quoted_for_systemd(value: str) -> None:
    """In these files, systemd removes quotes and takes a backslash literally."""
    name, _, text = units.machine(Plan([]), [value])[-1].partition("=")
    parser = shlex.shlex(text, posix=True)
    parser.whitespace_split, parser.escape, parser.commenters = True, "", ""
    assert (name, list(parser)) == ("Environment", [value])


@given(st.text(), st.text(min_size=1).filter(lambda text: "# To here" not in text))
def test_a_unit_block_is_found_and_removed(others: str, block: str) -> None:
    block += "\n"
    if "# From here" in others + block:
        return
    text = unit_text.edited("", {unit_text.OTHERS: others, unit_text.OURS: block}, "x")
    found = unit_text.parse(text, "x")
    assert found[unit_text.OURS] == block
    rest = unit_text.edited(text, {unit_text.OTHERS: found.get(unit_text.OTHERS, "")}, "x")
    assert rest in (others, f"{others}\n")


@pytest.mark.parametrize("before", [None, "", "[Exec]\nBoot=no", "[Exec]\nBoot=no\n\n"])
def test_an_nspawn_file_keeps_its_text_and_is_restored_exactly(
    tmp_path: Path, before: str | None
) -> None:
    place = tmp_path / NSPAWN.lstrip("/")
    if before is not None:
        place.parent.mkdir(parents=True)
        place.write_text(before)
    store = Store(str(tmp_path / "state"))
    for block in (BLOCK, BLOCK.replace("0", "1"), BLOCK):
        ask = EngineRequest((), prefix=str(tmp_path), units=((NSPAWN, block), (DROP_IN, block)))
        with store.locked():
            installer.install(store, list(ENGINES["nspawn"].install(ask).targets))
        text = place.read_text()
        assert text.startswith(before or "")
        assert text.count(block) == 1
        assert text.count("[Files]") == 1
    with store.locked():
        installer.uninstall(store, store.records())
    assert (place.read_text() if place.exists() else None) == before
    assert not (tmp_path / DROP_IN.lstrip("/")).parent.exists()


def test_owner_edits_outside_the_nspawn_block_survive_uninstall(tmp_path: Path) -> None:
    place = tmp_path / NSPAWN.lstrip("/")
    store = Store(str(tmp_path / "state"))
    ask = EngineRequest((), prefix=str(tmp_path), units=((NSPAWN, BLOCK),))
    with store.locked():
        installer.install(store, list(ENGINES["nspawn"].install(ask).targets))
    place.write_text("[Exec]\nBoot=yes\n" + place.read_text().replace("nvidia0", "nvidia7"))
    with store.locked():
        installer.uninstall(store, store.records())
    assert place.read_text() == "[Exec]\nBoot=yes\n"


@pytest.mark.protects(
    "each-machine",
    "a failing nspawn machine doesn't block file updates of other machines",
    instead="except ZeroDivisionError as error:",
)
def test_a_failing_nspawn_machine_does_not_block_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One machine may name a lost GPU; systemd must still load the files of the others."""
    state = str(tmp_path / "state")
    for name in ("a", "b", "c"):
        machines.remember(state, machines.NspawnMachine(name))

    def files(machine: machines.NspawnMachine) -> machines.MachineFiles:
        if machine.name == "b":
            raise LostDeviceError("GPU 1 has fallen off the bus", "Look at dmesg")
        return machines.MachineFiles(((str(tmp_path / f"{machine.name}.nspawn"), BLOCK),), ())

    monkeypatch.setattr(machines, "files", files)
    seen: list[str] = []
    kept = watch._Files("nspawn", lambda: machines.refresh(state), lambda: seen.append("reload"))
    assert not kept.refresh()
    assert all(BLOCK in (tmp_path / f"{name}.nspawn").read_text() for name in ("a", "c"))
    assert seen == ["reload"]
    said = capsys.readouterr().out
    assert said.count("wrote") == 2
    assert "fallen off" in said
    assert not kept.refresh()
    assert (seen, capsys.readouterr().out) == (["reload"], ""), "nothing is new"


def enroot(prefix: Path) -> EngineRequest:
    return EngineRequest((("gpu-py", "/opt/gpuhook/bin/gpu-py"),), prefix=str(prefix))


def test_an_enroot_hook_is_executable_and_foreign_hooks_stay(tmp_path: Path) -> None:
    folder = tmp_path / "etc/enroot/hooks.d"
    folder.mkdir(parents=True)
    (folder / "98-nvidia.sh").write_text("theirs\n")
    (folder / "98-nvidia.sh").chmod(0o755)
    store = Store(str(tmp_path / "state"))
    with store.locked():
        installer.install(store, list(ENGINES["enroot"].install(enroot(tmp_path)).targets))
    hook = folder / "98-gpuhook.sh"
    assert hook.stat().st_mode & 0o777 == 0o755
    assert "exec /opt/gpuhook/bin/gpuhook apply" in hook.read_text()
    assert (folder / "98-nvidia.sh").stat().st_mode & 0o777 == 0o755
    with store.locked():
        again = installer.install(store, list(ENGINES["enroot"].install(enroot(tmp_path)).targets))
        assert not any(each.change for each in again)
        (folder / "98-nvidia.sh").write_text("a newer package's\n")
        installer.uninstall(store, store.records())
    assert (folder / "98-nvidia.sh").read_text() == "a newer package's\n"
    assert not hook.exists()
    hook.write_text("#!/bin/sh\n# my own\n")
    with store.locked(), pytest.raises(EngineError, match="not a file of gpuhook"):
        installer.install(store, list(ENGINES["enroot"].install(enroot(tmp_path)).targets))


WHOLE = {
    "enroot": ("etc/enroot/hooks.d/98-nvidia.sh", "etc/enroot/hooks.d/98-gpuhook.sh"),
    "charliecloud": (
        "etc/charliecloud/cdi/acme.com-gpu.json",
        "etc/profile.d/gpuhook-charliecloud.sh",
    ),
}
OURS_ALONE = ("98-gpuhook.sh", "gpuhook-charliecloud.sh")  # another file there isn't overwritten


class Whole:
    """An engine with a file that gpuhook writes as a whole; the site may have had one before."""

    def __init__(self, system: Path, engine: str, place: str, before: str | None) -> None:
        self.path, self.before = system / place, before
        self._engine, self._prefix = engine, system
        self._store = Store(str(system / "state"))
        nvidias = system / WHOLE["enroot"][0]
        nvidias.parent.mkdir(parents=True)
        nvidias.write_text("nvidia's\n")  # gpuhook writes 98-nvidia.sh only if it exists
        if before is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(before)

    def install(self, program: str = "/opt/bin/gpu-py") -> None:
        ask = EngineRequest((("gpu-py", program),), prefix=str(self._prefix))
        with self._store.locked():
            installer.install(self._store, [*ENGINES[self._engine].install(ask).targets])

    def uninstall(self) -> None:
        with self._store.locked():
            installer.uninstall(self._store, self._store.records())

    def forget(self) -> None:
        shutil.rmtree(self._store.folder)

    def edit(self, line: str) -> str:
        text = self.path.read_text() + line
        self.path.write_text(text)
        return text

    def kept(self) -> list[str]:
        """Return the copies of the edited file; no program may start or read them."""
        found = sorted(self.path.parent.glob(f"{self.path.name}.*"))
        assert all(each.stat().st_mode & 0o777 == 0o600 for each in found)
        assert all(each.suffix.startswith(".edited") for each in found)
        return [each.read_text() for each in found]

    def now(self) -> str | None:
        return self.path.read_text() if self.path.exists() else None


CASES = [
    (engine, place, before)
    for engine, places in WHOLE.items()
    for place in places
    for before in (None, "the site's own\n")
    if not (before and place.endswith(OURS_ALONE)) and not (not before and "98-nvidia" in place)
]
SIGNED = [case for case in CASES if not case[1].endswith(".json")]  # files with gpuhook's header


def name_of(case: tuple[str, str, str | None]) -> str:
    return f"{Path(case[1]).name}-{'over' if case[2] else 'new'}"


@pytest.fixture(params=CASES, ids=name_of)
def whole(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Whole:
    made = charliecloud._GeneratedSpecs({"acme.com-gpu.json": '{"kind": "acme.com/gpu"}\n'}, [], [])
    monkeypatch.setattr(charliecloud, "_documents", lambda _: made)
    return Whole(tmp_path, *request.param)


def test_edits_to_a_generated_file_are_saved_and_the_original_restored(
    whole: Whole,
) -> None:
    whole.install()
    ours = whole.now()
    edited = [whole.edit("# mine\n")]
    whole.install()
    assert whole.now() == ours
    assert whole.kept() == edited
    edited.append(whole.edit("# mine again\n"))
    whole.uninstall()
    assert whole.now() == whole.before
    assert whole.kept() == edited


def test_repeated_user_edits_are_kept_once(whole: Whole) -> None:
    whole.install()
    for _ in range(2):
        edited = whole.edit("# mine\n")
        whole.install()
    whole.uninstall()
    assert whole.kept() == [edited]
    assert whole.now() == whole.before


@pytest.mark.parametrize("whole", SIGNED, ids=name_of, indirect=True)
def test_a_generated_file_without_a_record_is_not_kept_as_an_original(whole: Whole) -> None:
    """Earlier versions left an edited file behind and forgot its record."""
    whole.install()
    whole.forget()
    whole.install()
    whole.uninstall()
    assert whole.now() is None


@pytest.mark.parametrize("whole", SIGNED, ids=name_of, indirect=True)
def test_a_file_that_replaced_a_generated_file_is_restored(whole: Whole) -> None:
    whole.install()
    whole.path.write_text("a newer package's\n")
    whole.install()
    assert whole.now() != "a newer package's\n"
    whole.uninstall()
    assert whole.now() == "a newer package's\n"
    assert whole.kept() == []


def test_a_crash_during_install_loses_no_user_edit(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole.install()
    edited = whole.edit("# mine\n")
    with monkeypatch.context() as patch:
        patch.setattr(Change, "commit", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            whole.install()
    whole.uninstall()
    assert whole.now() == whole.before
    assert whole.kept() == [edited]


def test_a_whole_text_is_replaced_as_one_value() -> None:
    assert whole_text.edited("old", whole_text.parse("new", "x"), "x") == "new"
    assert whole_text.parse("", "x") == {}
