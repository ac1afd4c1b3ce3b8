"""The documentation as a site: scripts/docs builds it, and sees what is wrong with it."""

import shutil
from pathlib import Path

import pytest
from harness.commands import run
from harness.images import REPOSITORY

PARTS = ("docs", "scripts", "mkdocs.yml", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# What is appended to a page, and what is said of that.
FAULTS = {
    "[x](no-such-page.md)": "no-such-page.md",
    "[x](cdi.md#no-such-heading)": "#no-such-heading",
    "[x](/cdi.md)": "absolute link",
    "![x](images/no-such-image.svg)": "no-such-image.svg",
    '<img src="https://elsewhere.example/x.png">': "elsewhere.example/x.png",
    "1. x\n\n   three spaces": "four spaces",
    "text\n```\nnever closed": "was not understood",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the site is made of, which has this tree's environment."""
    for name in PARTS:
        source = REPOSITORY / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    (tmp_path / ".venv").symlink_to(REPOSITORY / ".venv")
    return tmp_path


def test_the_site_is_built(tree: Path) -> None:
    site = tree / ".work/site"
    (site / "search").mkdir(parents=True)
    (site / "search/search_index.json").touch()  # an older one is there
    done = run([tree / "scripts/docs"]).ok()
    assert done.stdout.strip().endswith(".work/site/index.html")
    for page in (
        "index",
        "tutorial/simulated",
        "reference/commands",
        "reference/series",
        "SECURITY",
    ):
        assert (site / f"{page}.html").is_file()


def test_whatever_is_wrong_with_a_page_is_said(tree: Path) -> None:
    with (tree / "docs/faq.md").open("a") as page:
        page.writelines(f"\n\n{fault}\n" for fault in FAULTS)
    (tree / "docs/orphan.md").write_text("# No menu has this page\n")
    done = run([tree / "scripts/docs"]).failed()
    warnings = (done.stdout + done.stderr).split("WARNING")[1:]
    for said in (*FAULTS.values(), "orphan.md"):
        assert [each for each in warnings if said in each.partition("INFO")[0]], said


def test_a_folder_of_somebody_else_is_not_emptied(tree: Path) -> None:
    done = run([tree / "scripts/docs", tree / "docs"]).failed()
    assert "name a folder that is new or empty" in done.stderr
    assert (tree / "docs/index.md").is_file()
