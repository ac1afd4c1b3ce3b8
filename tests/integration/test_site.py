"""The documentation as a site, which scripts/docs builds and checks for errors."""

import json
import re
import shutil
from pathlib import Path

import pytest
from harness.commands import run
from harness.images import REPOSITORY

from gpuhook import __version__

PARTS = (
    "docs", "scripts", "mkdocs.yml", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"
)  # fmt: skip
# Text that is appended to a page -> a part of the error that is reported for it.
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
    """A copy of the files that make up the site, with this tree's environment."""
    for name in PARTS:
        source = REPOSITORY / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    (tmp_path / ".venv").symlink_to(REPOSITORY / ".venv")
    return tmp_path


def test_the_documentation_site_is_built_with_all_pages(tree: Path) -> None:
    site = tree / ".work/site"
    (site / "search").mkdir(parents=True)
    (site / "search/search_index.json").touch()  # an index of an earlier build exists
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
    check_pages(site)


def check_pages(site: Path) -> None:
    """Check the parts of a page other than its text."""
    page = (site / "tutorial/simulated.html").read_text()
    assert f"gpuhook {__version__}" in page
    assert 'rel="prev"' in page
    assert 'class="md-footer__link md-footer__link--next"' in page
    # A picture links to its file. A picture of a terminal can be scrolled on a narrow screen.
    assert re.search(r'<a class="terminal" href="../images/list.svg"><img [^>]+></a>', page)
    drawing = (site / "index.html").read_text()
    assert re.search(r'<a href="images/overview.svg"><img [^>]+></a>', drawing)
    assert 'src="../javascripts/search.js"' in page
    assert "language-sh" in page
    assert "Compared with NVIDIA" in (site / "compare.html").read_text()
    assert 'href="compare.html"' in drawing
    # The index has words without the punctuation before them, so --gpus is found as gpus.
    config = json.loads((site / "search/search_index.json").read_text())["config"]
    separator = re.compile(config["separator"])
    assert separator.split("--gpus=all")[-2:] == ["gpus", "all"]
    assert separator.split("`nvidia.com/gpu`")[1:-1] == ["nvidia", "com", "gpu"]


def test_pages_link_to_their_source_for_editing(tree: Path) -> None:
    """The builder sets the repository's address. Pages without a source file have no link."""
    uri = "https://git.example/gpuhook/edit/main/docs/"
    run([tree / "scripts/docs"], env={"GPUHOOK_DOCS_EDIT_URI": uri}).ok()
    site = tree / ".work/site"
    assert f'href="{uri}faq.md"' in (site / "faq.html").read_text()
    for page in ("reference/commands", "compare", "CHANGELOG"):
        assert "git.example" not in (site / f"{page}.html").read_text()


SEARCHES = {
    "--gpus": "gpus", "-e X": "e X", "  --gpus  all": "  gpus  all", "gpu-py": "gpu-py",
    "+a -b": "a b", "": "", "-": "-",
}  # fmt: skip


def test_leading_dashes_are_removed_from_search_words() -> None:
    """The script changes only the queries that the theme sends to its worker."""
    script = (REPOSITORY / "docs/javascripts/search.js").read_text()
    program = f"""
        const sent = [];
        globalThis.Worker = class {{}};
        Worker.prototype.postMessage = (message) => sent.push(message);
        {script}
        const worker = new Worker();
        for (const text of {json.dumps([*SEARCHES])}) worker.postMessage({{type: 2, data: text}});
        worker.postMessage({{type: 0, data: "--gpus"}});
        console.log(JSON.stringify(sent.map((each) => each.data)));
    """
    done = run(["node", "-e", program]).ok()
    assert json.loads(done.stdout) == [*SEARCHES.values(), "--gpus"]


def test_every_fault_in_a_page_gives_a_warning(tree: Path) -> None:
    with (tree / "docs/faq.md").open("a") as page:
        page.writelines(f"\n\n{fault}\n" for fault in FAULTS)
    (tree / "docs/orphan.md").write_text("# No menu has this page\n")
    done = run([tree / "scripts/docs"]).failed()
    warnings = (done.stdout + done.stderr).split("WARNING")[1:]
    for said in (*FAULTS.values(), "orphan.md"):
        assert [each for each in warnings if said in each.partition("INFO")[0]], said


def test_a_folder_with_other_files_is_refused_and_not_emptied(tree: Path) -> None:
    done = run([tree / "scripts/docs", tree / "docs"]).failed()
    assert "name a folder that is new or empty" in done.stderr
    assert (tree / "docs/index.md").is_file()
