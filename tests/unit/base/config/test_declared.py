"""Vendors that config.toml declares: the keys of a table, and the errors for an invalid one."""

from pathlib import Path

import declared_vendors
import pytest
from click.testing import CliRunner

from gpuhook.base.config import source
from gpuhook.base.config.declared import FIELDS
from gpuhook.base.config.loader import examine, loads
from gpuhook.base.errors import ConfigError
from gpuhook.tools.cli import cli
from gpuhook.tools.config.render import as_toml
from gpuhook.vendors import registry

LEAST = """\
[[gpuhook.vendors]]
name = "maker"
kind = "maker.com/npu"
variable = "MAKER_VISIBLE_DEVICES"
nodes = ["/dev/maker{n}"]
"""


def other(**changes: str) -> str:
    """Return a second table that differs from the first in every value, with the given changes."""
    table = LEAST.replace("maker", "other").replace("MAKER", "OTHER")
    for key, value in changes.items():
        table = "".join(
            f"{key} = {value}\n" if line.startswith(f"{key} =") else line
            for line in table.splitlines(keepends=True)
        )
    return table


def test_a_table_with_only_required_keys_is_accepted() -> None:
    [vendor] = loads(LEAST).vendors
    assert vendor.values().keys() == {"name", "title", "kind", "variable", "nodes"}
    assert (vendor.title, vendor.noun, vendor.numbers) == ("Maker", "device", "node")


def test_shown_vendor_tables_load_again_unchanged() -> None:
    tables = declared_vendors.tables()
    for later in ("tpu-vfio", "rocket"):  # later generations have the same variable as the first
        del tables[later]
    config = loads("\n".join(tables.values()))
    again = loads(as_toml(config))
    assert [each.values() for each in again.vendors] == [each.values() for each in config.vendors]
    assert len(config.vendors) == len(tables) > 16


@pytest.mark.parametrize("text", [LEAST, *declared_vendors.tables().values()])
def test_vendor_tables_are_read_by_the_quick_reader(text: str) -> None:
    """The table stands between other tables, as in a whole file."""
    whole = f'[gpuhook]\nroot = "/x"\n{text}[features]\n{other()}'
    assert source.read_plain(whole) is not None
    assert len(loads(whole).vendors) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('name = "Maker"', "line 2: gpuhook.vendors.name contains 'Maker'"),
        ("name = 1", "line 2: gpuhook.vendors.name must be a string"),
        ('kind = "maker"', "line 3: gpuhook.vendors.kind contains 'maker'"),
        ('variable = "PATH"', "line 4: gpuhook.vendors.variable contains 'PATH'"),
        ('variable = "maker_devices"', "line 4: "),
        ('nodes = "/dev/maker{n}"', "line 5: gpuhook.vendors.nodes must be a list"),
        ("nodes = []", "line 5: gpuhook.vendors.nodes is empty"),
        ('nodes = ["/dev/maker"]', "'/dev/maker', which isn't a path below /dev with {n}"),
        ('nodes = ["/dev/{n}/maker"]', "line 5: "),
        ('nodes = ["/dev/../etc/maker{n}"]', "line 5: "),
        ('nodes = ["/etc/maker{n}"]', "line 5: "),
        ('nodes = ["/dev/maker{n}*"]', "line 5: "),
        ('optional-nodes = ["/dev/maker{n}*"]', "line 6: gpuhook.vendors.optional-nodes contains"),
        ('optional-nodes = ["/dev/*"]', "line 6: "),
        ('control = ["/dev/maker{n}"]', "line 6: "),
        ('control = ["/dev"]', "line 6: "),
        ('files = ["maker"]', "line 6: "),
        ('folders = ["/"]', "line 6: "),
        ('writable-folders = ["/dev"]', "line 6: gpuhook.vendors.writable-folders contains"),
        ('writable-folders = ["hugepages"]', "line 6: "),
        ('writable-folders = ["/tmp/maker"]', "line 6: "),
        (
            'void = "yes"',
            "line 6: gpuhook.vendors.void contains 'yes', which isn't variable or none",
        ),
        ('folders = ["/usr"]', "line 6: "),
        ('folders = ["/opt//maker"]', "line 6: "),
        ('libraries = ["libmaker"]', "line 6: "),
        ('libraries = ["/opt/*/libmaker.so"]', "line 6: "),
        ('libraries = ["maker.so"]', "line 6: "),
        ('environment = ["MAKER"]', "line 6: "),
        ('environment = ["1=2"]', "line 6: "),
        ('environment = ["A=b\\nc"]', "line 6: "),
        ('environment = ["A=\\u0000"]', "line 6: "),
        ('present = "maker"', "line 6: "),
        ('present = "pci:1"', "line 6: "),
        ('present = "driver:"', "line 6: "),
        ('numbers = "any"', "line 6: gpuhook.vendors.numbers contains 'any', which isn't node or"),
        ('node = ["/dev/maker{n}"]', "line 6: gpuhook.vendors.node isn't a key of a vendor"),
        ("files = [1]", "line 6: gpuhook.vendors.files must be a list of strings"),
    ],
)
def test_an_invalid_vendor_key_is_refused_with_its_line(line: str, words: str) -> None:
    key = line.partition(" ")[0]
    kept = [each for each in LEAST.splitlines() if each.partition(" ")[0] != key]
    place = 1 + list(FIELDS).index(key) if key in ("name", "kind") else len(kept)
    place = {"name": 1, "kind": 2, "variable": 3, "nodes": 4}.get(key, place)
    text = "\n".join([*kept[:place], line, *kept[place:]])
    with pytest.raises(ConfigError) as caught:
        loads(text, "config.toml")
    assert words in caught.value.cause
    moved = "[gpuhook]\n\n" + other() + text
    _, [error] = examine(moved)
    number = len(("[gpuhook]\n\n" + other()).splitlines()) + place + 1
    assert f"line {number}: gpuhook.vendors.{key} " in error.cause


@pytest.mark.parametrize("key", ["name", "kind", "variable", "nodes"])
def test_a_missing_required_vendor_key_is_refused(key: str) -> None:
    text = "".join(line for line in LEAST.splitlines(keepends=True) if not line.startswith(key))
    with pytest.raises(ConfigError, match=f"line 1: gpuhook.vendors lacks {key}"):
        loads(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", '"maker"'), ("kind", '"maker.com/npu"'), ("variable", '"MAKER_VISIBLE_DEVICES"')],
)
def test_two_vendors_with_the_same_name_kind_or_variable_are_refused(key: str, value: str) -> None:
    assert len(loads(LEAST + other()).vendors) == 2
    with pytest.raises(
        ConfigError, match=f"{key} is {value.replace(chr(34), chr(39))}, as in another"
    ):
        loads(LEAST + other(**{key: value}))


@pytest.mark.parametrize("text", ["gpuhook.vendors = 1", "[gpuhook.vendors]\na = 1"])
def test_vendors_that_are_not_a_list_of_tables_are_not_loaded(text: str) -> None:
    _, errors = examine(text)
    assert errors or not loads(text).vendors
    if text.endswith("= 1\n") or text.startswith("gpuhook.vendors"):
        assert "must be tables, [[gpuhook.vendors]]" in errors[0].cause


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('"maker"', '"nvidia"', "nvidia"),
        ('"maker.com/npu"', '"nvidia.com/gpu"', "nvidia.com/gpu"),
    ],
)
def test_the_name_or_kind_of_a_built_in_vendor_cannot_be_declared(
    tmp_path: Path, old: str, new: str, word: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(LEAST.replace(old, new))
    with pytest.raises(ConfigError, match=f"{word} is NVIDIA's already"):
        registry.all_vendors(loads(file.read_text()))
    done = CliRunner().invoke(cli, ["config", "validate", str(file)])
    assert done.exit_code == 1
    assert f"{word} is NVIDIA's already" in done.stderr


def test_validate_reports_the_line_of_an_unknown_vendor_key(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(LEAST + 'librarys = ["libmaker.so"]\n')
    done = CliRunner().invoke(cli, ["config", "validate", str(file)])
    assert done.exit_code == 1
    assert f"{file}, line 6: gpuhook.vendors.librarys isn't a key of a vendor" in done.stderr
