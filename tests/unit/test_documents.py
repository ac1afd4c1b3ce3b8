"""Names in the documentation, which must exist, and pages made from the code."""

import html
import inspect
import json
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import chart
import click
import docs_hooks
import pytest
import reference
import results
import yaml
from command_lines import commands

from gpuhook.base import errors
from gpuhook.base.config.model import FEATURE_PREFIX, FEATURES, KEYS
from gpuhook.metrics import exporter
from gpuhook.metrics.model import SeriesOptions, Snapshot
from gpuhook.tools.cli import cli
from gpuhook.vendors.registry import BUILT_IN

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
PARSERS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def _code(text: str) -> str:
    """Return the code in a document: text between backticks, and fenced blocks."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(
        r"`[^`\n]+`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    return "\n".join([*lines, *inline])


def _options(command: click.Command) -> set[str]:
    given = command.params
    own = {word for each in given for word in (*each.opts, *each.secondary_opts)}
    if isinstance(command, click.Group):
        own |= {word for inner in command.commands.values() for word in _options(inner)}
    return own | {"--help", "-h"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_commands_and_options_in_the_docs_exist(path: Path) -> None:
    context = click.Context(cli)
    for name, rest in USE.findall(_code(path.read_text())):
        command = cli.get_command(context, name)
        assert command is not None, name
        used = set(re.findall(r"(?<=\s)(--?[a-z][a-z.-]*)", rest))
        assert used <= _options(command), (name, used - _options(command))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_code_blocks_for_files_can_be_parsed(path: Path) -> None:
    for _, language, block in LANGUAGE.findall(path.read_text()):
        PARSERS[language](textwrap.dedent(block))


def _reserved(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the devices that a compose file reserves anywhere in it."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key == "reservations":
            yield from inner.get("devices", ())
        elif isinstance(inner, (dict, list)):
            yield from _reserved(inner)


def test_compose_devices_in_the_docs_have_capabilities() -> None:
    """Compose refuses devices without capabilities, although CDI has no use for them."""
    texts = [path.read_text() for path in DOCUMENTS]
    blocks = [block for text in texts for _, _, block in LANGUAGE.findall(text)]
    devices = [
        device
        for block in blocks
        if "reservations" in block
        for document in PARSERS["yaml"](textwrap.dedent(block))
        for device in _reserved(document)
    ]
    assert devices
    assert [each for each in devices if not each.get("capabilities")] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_in_the_docs_lead_to_existing_files(path: Path) -> None:
    """Links must work in the repository, too, so they can't lead to pages of only the site."""
    targets = {
        Path(os.path.normpath(path.parent / each)) for each in LINK.findall(path.read_text())
    }
    assert [target for target in targets if not target.exists()] == []


@pytest.mark.parametrize("names", BUILT_IN.values(), ids=BUILT_IN)
def test_every_vendor_is_described_in_the_docs(names: ModuleType) -> None:
    """Its variables are in the table of all variables, and on a page that support.md links to."""
    docs = REPOSITORY / "docs"
    requests = (docs / "requests.md").read_text()
    assert [name for name in names.VARIABLES if f"`{name}`" not in requests] == []
    support = (docs / "support.md").read_text()
    pages = [path for path in (docs / "vendors").glob("*.md") if f"vendors/{path.name}" in support]
    [first, *_] = names.VARIABLES
    assert [path for path in pages if first in path.read_text()], f"docs/vendors for {first}"


def test_the_page_on_adding_vendors_shows_the_test_vendors_code() -> None:
    """The page shows it letter by letter."""
    folder = REPOSITORY / "tests/vendors"
    sources = "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
    blocks = FENCED.findall((REPOSITORY / "docs/engineering/add-a-vendor.md").read_text())
    assert len(blocks) >= 5
    assert [block for block in blocks if f"\n{block}" not in sources] == []


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_valid_and_loads_no_other_file(path: Path) -> None:
    for element in ET.parse(path).iter():  # noqa: S314 - ours
        addresses = [value for name, value in element.items() if name.endswith("href")]
        assert [each for each in addresses if not each.startswith("#")] == []
        assert not re.search(r"@import|url\([^#]", element.text or "")


@pytest.mark.parametrize("name", ["cost.svg", "image.svg", "overview.svg", "start.svg"])
def test_a_drawing_has_a_dark_style_title_and_description(name: str) -> None:
    root = ET.parse(REPOSITORY / "docs/images" / name).getroot()  # noqa: S314
    texts = {element.tag.rpartition("}")[2]: element.text or "" for element in root}
    assert texts["title"]
    assert texts["desc"]
    assert "prefers-color-scheme: dark" in texts["style"]


def test_the_tutorials_pictures_show_its_simulated_machine() -> None:
    """The list has eight GPUs with the UUIDs that the containers print; one of them gets lost."""
    page = (REPOSITORY / "docs/tutorial/simulated.md").read_text()
    [lost] = re.findall(r"simulate /srv/gpus --lost (\d+)", page)
    pictures = {
        name: html.unescape((REPOSITORY / f"docs/images/{name}.svg").read_text()).replace(
            "\xa0", " "
        )
        for name in re.findall(r"images/(\w+)\.svg", page)
    }
    assert pictures.keys() == {"list", "explain", "doctor"}
    uuids = set(re.findall(r"GPU-[0-9a-f-]{36}", page))
    assert uuids
    assert uuids < set(re.findall(r"GPU-[0-9a-f-]{36}", pictures["list"]))
    assert len(re.findall(r"GPU-[0-9a-f-]{36}", pictures["list"])) == 8
    assert ", 8 GPUs, " in pictures["explain"]
    assert f"GPU {lost} has fallen off the bus" in pictures["doctor"]


def test_tests_named_in_the_docs_exist() -> None:
    """If its test is renamed or removed, nothing proves a claim any more."""
    tests = REPOSITORY / "tests"
    texts = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    known = set(re.findall(r"^ *def (test_\w+)", texts, re.MULTILINE))
    known |= {path.stem for path in tests.rglob("test_*.py")}
    for path in DOCUMENTS:
        named = set(re.findall(r"\btest_\w+", path.read_text()))
        assert named <= known, (path.name, named - known)


def test_versions_named_on_the_slurm_page_were_tested() -> None:
    page = (REPOSITORY / "docs/schedulers/slurm.md").read_text()
    said = set(re.findall(r"\b(Slurm|runc|crun) (\d+\.\d+\.\d+)\b", page))
    every = results.read_all().values()
    assert said
    assert said <= {(row["program"], row["version"]) for one in every for row in one["programs"]}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_line_of_text_in_the_docs_is_too_long(path: Path) -> None:
    """Code and tables may have longer lines."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
    assert [line for line in lines if len(line) > 120] == []


# Columns of code beside the menus of the site, on a screen of 1280 pixels.
COLUMNS = 80
SITE = [path for path in DOCUMENTS if path.name != "README.md"]
BEHIND = re.compile(r"^\s*\S.*?\s{2,}# ")


@pytest.mark.parametrize("path", SITE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_commented_command_line_exceeds_the_page_width(path: Path) -> None:
    """A comment that doesn't fit behind its command goes above it."""
    blocks = re.findall(
        r"^ *```(?:sh|console)?\n(.*?)^ *```", path.read_text(), re.MULTILINE | re.DOTALL
    )
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS and BEHIND.match(line)] == []


def test_the_comparison_page_is_taken_from_the_readme() -> None:
    page = docs_hooks.comparison((REPOSITORY / "README.md").read_text())
    assert page.startswith("# Compared with NVIDIA's toolkit\n")
    assert "| state | in production for years | alpha |" in page
    assert "](docs/" not in page
    with pytest.raises(ValueError, match="no section that compares"):
        docs_hooks.comparison("# gpuhook\n")


# Pages that are made from the code ------------------------------------------------------------


def test_the_reference_has_every_command_and_option() -> None:
    page = reference.commands()
    shown = (each for each in commands(cli, "gpuhook") if not each[1].hidden)
    next(shown)  # gpuhook itself, with which the page begins
    for name, command, _ in shown:
        section = page.partition(f"# {name}\n")[2].partition("\n##")[0]
        assert section, name
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert any(option in section for option in parameter.opts), (name, parameter.opts)
        for line in command.examples:
            assert line in section, (name, line)


def test_the_reference_has_every_setting_with_its_default() -> None:
    page = reference.settings()
    for key in (*KEYS, *(FEATURE_PREFIX + name for name in FEATURES)):
        section = page.partition(f"### <code>{key}</code>\n")[2].partition("\n##")[0]
        assert "; the default is <code>" in section, key
        assert section.strip().splitlines()[0], key


def test_the_reference_has_every_error_code() -> None:
    page = reference.errors()
    for each in vars(errors).values():
        if inspect.isclass(each) and issubclass(each, errors.GpuhookError):
            assert (f"<code>{each.code}</code>" in page) == (each is not errors.GpuhookError)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("gpuhook_gpu_info", "mig_profile"),
        ("gpuhook_container_gpu_sm_utilization_ratio", "pod"),
        ("gpuhook_gpu_xid_errors_total", "xid"),
        ("gpuhook_metrics_errors_total", "kind"),
        ("container_accelerator_duty_cycle", "acc_id"),
        ("DCGM_FI_DEV_SM_CLOCK", "modelName"),
        ("DCGM_FI_DEV_FB_USED", "UUID"),
    ],
)
def test_the_reference_has_the_series_with_their_labels(name: str, label: str) -> None:
    before, found, _ = reference.series().partition(f"<code>{name}</code>")
    assert found
    assert f"<code>{label}</code>" in before[before.rindex("Labels: ") :]


def test_the_reference_has_every_series_of_the_exporter() -> None:
    every = SeriesOptions(cadvisor=True, dcgm=True)
    text = exporter.text(Snapshot(), every, 0.0, openmetrics=False).decode()
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    page = reference.series()
    assert len(names) > 40
    assert [name for name in names if f"<code>{name}</code>" not in page] == []


def test_markup_characters_in_the_reference_are_escaped() -> None:
    assert reference.escaped("a <b> *c* d_e_ [f|g] `h_i` ``j``") == (
        r"a &lt;b&gt; \*c\* d\_e\_ \[f\|g\] `h_i` `j`"
    )


def test_preformatted_lines_of_a_help_text_are_kept() -> None:
    command = click.Command("x", help="One.\n\n\b\n  two   three\n  four\n\nFive\nsix.")
    page = "\n".join(reference._paragraphs(inspect.cleandoc(command.help or "")))
    assert page == "One.\n\n```\ntwo   three\nfour\n```\n\nFive six.\n"


# The chart ------------------------------------------------------------------------------------


PAGE = chart.PAGE.read_text("utf-8")


def test_the_chart_shows_the_pages_figures() -> None:
    """If this fails, run python3 scripts/lib/chart.py."""
    assert chart.CHART.read_text("utf-8") == chart.drawn(PAGE)


def test_a_changed_figure_changes_the_chart() -> None:
    median, added = chart.figures(PAGE)["8 GPUs"]
    assert 0 < added < median
    assert chart.drawn(PAGE.replace(f"| {added} |", "| 99.5 |")).count("+ 99.5 ms") == 1


def test_a_missing_row_of_figures_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="no row of figures for 8 GPUs, helper off"):
        chart.figures(PAGE.replace("| 8 GPUs, helper off |", "| helper off |"))


# The site's hooks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("1. a\n\n   b", [3]),
        ("1. a\n\n    b", []),
        ("1. a\n   b", []),
        ("- a\n\n  ```\n  x\n  ```", [3]),
        ("- a\n  ```\n  x\n  ```", [2]),
        ("- a\n\n    ```\n    x\n    ```\n\n    b", []),
        ("```\na\n\n  b\n```", []),
        ("a\n\n     b", []),
    ],
)
def test_badly_indented_blocks_in_lists_are_found(text: str, lines: list[int]) -> None:
    assert docs_hooks.badly_indented(text) == lines


@pytest.mark.parametrize(
    ("page", "loaded"),
    [
        ('<script src="https://a.example/x.js"></script>', ["https://a.example/x.js"]),
        ('<img src="x.svg">', ["x.svg"]),
        ('<link rel="stylesheet" href="//a.example/x.css">', ["//a.example/x.css"]),
        ('<link rel="canonical" href="https://a.example">', []),
        ('<a href="https://a.example">x</a>', []),
    ],
)
def test_addresses_loaded_by_a_page_are_found(page: str, loaded: list[str]) -> None:
    found = docs_hooks.Loaded()
    found.feed(page)
    assert [each for each in found.addresses if each] == loaded


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_command_names_a_real_image(path: Path) -> None:
    """A user copies a command unchanged, and a placeholder in it fails in the engine."""
    blocks = re.findall(r"^ *```.*?^ *```", path.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if re.search(r"(?<![-\w])(CUDA-)?IMAGE\b(?!=)", line)] == []
