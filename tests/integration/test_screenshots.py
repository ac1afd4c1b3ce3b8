"""Pictures in the documentation, which show the current output of the commands."""

import re
from pathlib import Path

from harness.commands import run
from harness.images import REPOSITORY
from harness.installation import Installation

PICTURES = REPOSITORY / "docs/images"
# The doctor's picture isn't among them: it shows the software of the machine that it was made on.
SAME_EVERYWHERE = ("stats", "list", "explain")


def words(picture: Path) -> list[str]:
    """Return the texts of a picture.

    The drawing around them depends on rich's version.
    """
    return re.findall(r"<text [^>]*>([^<]*)</text>", picture.read_text())


def test_screenshots_match_the_current_command_output(
    installation: Installation, tmp_path: Path
) -> None:
    names = [name for name in SAME_EVERYWHERE if (PICTURES / f"{name}.svg").exists()]
    assert {"stats", "list"} <= {*names}
    run([REPOSITORY / "scripts/screenshots", "--output", tmp_path, *names]).ok()
    for name in names:
        drawn = words(tmp_path / f"{name}.svg")
        assert len(drawn) > 10
        assert drawn == words(PICTURES / f"{name}.svg"), "run scripts/screenshots"


def test_screenshots_load_nothing_remote_and_contain_no_local_path() -> None:
    for picture in PICTURES.glob("*.svg"):
        text = picture.read_text()
        assert not re.search(r"url\(.http|@import|<script|<image", text)
        assert str(REPOSITORY) not in text
