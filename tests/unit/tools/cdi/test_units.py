"""Files of systemd and udev that refresh CDI specs."""

import re
from pathlib import Path

import pytest

from gpuhook.tools.cdi import units
from gpuhook.vendors.registry import BUILT_IN

SOURCES = Path(units.__file__).parent / "units"
RULES = "70-gpuhook-cdi-refresh.rules"
SERVICE = "gpuhook-cdi-refresh.service"


def lines(name: str) -> list[str]:
    return [each for each in (SOURCES / name).read_text().splitlines() if each[:1] != "#"]


def text(system: Path, command: str = "/opt/bin/gpuhook", state: str = "/var/lib/gpuhook") -> str:
    [change] = [
        each
        for each in units.wanted(command, state, str(system))[0]
        if each.path == f"{system}/etc/systemd/system/{SERVICE}"
    ]
    return (change.new or b"").decode()


def test_the_udev_rule_matches_every_vendor() -> None:
    modules, devices = lines(RULES)
    words = [word for names in BUILT_IN.values() for word in names.DRIVER_WORDS]
    [found] = re.findall(r'SUBSYSTEM=="module", KERNEL=="([^"]*)"', modules)
    assert set(found.split("|")) == {f"*{word}*" for word in words}
    [found] = re.findall(r'SUBSYSTEM=="pci", ENV{PCI_ID}=="([^"]*)"', devices)
    ids = [names.PCI_VENDOR.upper() for names in BUILT_IN.values() if names.PCI_VENDOR]
    assert set(found.split("|")) == {f"{each}:*" for each in ids}


def test_an_event_during_a_refresh_restarts_the_service() -> None:
    for line in lines(RULES):
        assert line.endswith(f'RUN+="/bin/systemctl --no-block restart {SERVICE}"')


def test_every_unit_file_exists() -> None:
    assert {path.name for path in SOURCES.iterdir()} == {*units.FILES}
    assert set(units.ENABLED) == {SERVICE, "gpuhook-cdi-refresh.path"}


def test_units_contain_the_paths_of_this_installation(tmp_path: Path) -> None:
    found = text(tmp_path)
    assert "\nExecStart=/opt/bin/gpuhook cdi refresh\n" in found
    assert "\nConditionPathExists=/var/lib/gpuhook/cdi.json\n" in found
    found = text(tmp_path, state="/srv/state")
    assert "\nExecStart=/opt/bin/gpuhook cdi refresh --state-dir /srv/state\n" in found
    assert "\nConditionPathExists=/srv/state/cdi.json\n" in found


def test_special_characters_in_unit_paths_are_escaped(tmp_path: Path) -> None:
    found = text(tmp_path, '/o p/100%/$x"/gpuhook', "/s t/50%")
    command = r'"/o p/100%%/$$x\"/gpuhook" cdi refresh --state-dir "/s t/50%%"'
    assert f"\nExecStart={command}\n" in found
    assert "\nConditionPathExists=/s t/50%%/cdi.json\n" in found


def test_units_shipped_by_the_package_are_not_written_again(tmp_path: Path) -> None:
    for name, (_, folder) in units.FILES.items():
        path = tmp_path / folder[1:] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((SOURCES / name).read_text())
    assert units.wanted("/usr/bin/gpuhook", "/var/lib/gpuhook", str(tmp_path)) == ([], [])
    changes, _ = units.wanted("/opt/bin/gpuhook", "/var/lib/gpuhook", str(tmp_path))
    assert [Path(change.path).name for change in changes] == [SERVICE]


@pytest.mark.parametrize("name", units.FILES)
def test_an_administrators_own_unit_file_is_kept_with_a_warning(name: str, tmp_path: Path) -> None:
    path = tmp_path / units.FILES[name][0][1:] / name
    path.parent.mkdir(parents=True)
    path.write_text("# mine\n")
    changes, [warning] = units.wanted("/opt/bin/gpuhook", "/var/lib/gpuhook", str(tmp_path))
    assert f"{path} exists and isn't a file of gpuhook" in warning
    assert str(path) not in [change.path for change in changes]
    assert units.removals((f"{units.FILES[name][0]}/{name}",), str(tmp_path)) == []
