"""What the documents name exists: commands and their options, and files that they link to."""

import json
import os
import re
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import click
import pytest
import results
import yaml

from gpuhook.tools.cli import cli

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = [
    *(REPOSITORY / "docs").rglob("*.md"),
    *(
        REPOSITORY / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    ),
]
PICTURES = sorted((REPOSITORY / "docs/images").glob("*.svg"))
# In code: gpuhook, a command, and what follows on the line or up to the closing backtick.
USE = re.compile(r"(?:^|[`(] ?|\$ |&& )gpuhook ([a-z][a-z-]*)([^`\n|#&;]*)", re.MULTILINE)
FENCED = re.compile(r"^ *```.*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LANGUAGE = re.compile(r"^( *)```(json|toml|yaml)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PARSERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def _code(text: str) -> str:
    """Return a document's code: what is between backticks, and the fenced blocks."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(
        r"`[^`\n]+`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    return "\n".join([*lines, *inline])


def _options(command: click.Command) -> set[str]:
    own = {word for parameter in command.params for word in parameter.opts}
    if isinstance(command, click.Group):
        own |= {word for inner in command.commands.values() for word in _options(inner)}
    return own | {"--help", "-h"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_commands_and_options_exist(path: Path) -> None:
    context = click.Context(cli)
    for name, rest in USE.findall(_code(path.read_text())):
        command = cli.get_command(context, name)
        assert command is not None, name
        used = set(re.findall(r"(?<=\s)(--?[a-z][a-z.-]*)", rest))
        assert used <= _options(command), (name, used - _options(command))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_what_is_to_be_written_into_files_can_be_read(path: Path) -> None:
    for _, language, block in LANGUAGE.findall(path.read_text()):
        PARSERS[language](textwrap.dedent(block))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(path: Path) -> None:
    """In the repository too, and so not to pages that only the site has."""
    targets = {
        Path(os.path.normpath(path.parent / each)) for each in LINK.findall(path.read_text())
    }
    assert [target for target in targets if not target.exists()] == []


def test_the_page_on_vendors_shows_what_is_there() -> None:
    """Its code is that of the tests' vendor, letter by letter."""
    folder = REPOSITORY / "tests/vendors"
    sources = "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
    blocks = FENCED.findall((REPOSITORY / "docs/engineering/add-a-vendor.md").read_text())
    assert len(blocks) >= 5
    assert [block for block in blocks if f"\n{block}" not in sources] == []


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_can_be_shown_and_loads_nothing(path: Path) -> None:
    for element in ET.parse(path).iter():  # noqa: S314 - ours
        addresses = [value for name, value in element.items() if name.endswith("href")]
        assert [each for each in addresses if not each.startswith("#")] == []
        assert not re.search(r"@import|url\([^#]", element.text or "")


@pytest.mark.parametrize("name", ["cost.svg", "image.svg", "overview.svg", "start.svg"])
def test_a_drawing_can_be_read_on_a_dark_page_and_aloud(name: str) -> None:
    root = ET.parse(REPOSITORY / "docs/images" / name).getroot()  # noqa: S314
    texts = {element.tag.rpartition("}")[2]: element.text or "" for element in root}
    assert texts["title"]
    assert texts["desc"]
    assert "prefers-color-scheme: dark" in texts["style"]


def test_tests_that_the_documents_name_exist() -> None:
    """A claim whose test was renamed or removed is no longer shown by anything."""
    tests = REPOSITORY / "tests"
    texts = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    known = set(re.findall(r"^ *def (test_\w+)", texts, re.MULTILINE))
    known |= {path.stem for path in tests.rglob("test_*.py")}
    for path in DOCUMENTS:
        named = set(re.findall(r"\btest_\w+", path.read_text()))
        assert named <= known, (path.name, named - known)


def test_versions_that_a_page_says_it_was_run_with_were_tested() -> None:
    page = (REPOSITORY / "docs/schedulers/slurm.md").read_text()
    said = set(re.findall(r"\b(Slurm|runc|crun) (\d+\.\d+\.\d+)\b", page))
    every = results.read_all().values()
    assert said
    assert said <= {(row["program"], row["version"]) for one in every for row in one["programs"]}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_line_is_too_long_to_read(path: Path) -> None:
    """Code and tables have the lines that they need."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
    assert [line for line in lines if len(line) > 120] == []
