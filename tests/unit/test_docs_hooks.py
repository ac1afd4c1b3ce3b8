"""What the site's hooks see that mkdocs doesn't."""

import docs_hooks
import pytest


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
def test_a_block_that_would_end_its_list_is_found(text: str, lines: list[int]) -> None:
    assert docs_hooks.badly_indented(text) == lines


@pytest.mark.parametrize(
    ("html", "loaded"),
    [
        ('<script src="https://a.example/x.js"></script>', ["https://a.example/x.js"]),
        ('<img src="x.svg">', ["x.svg"]),
        ('<link rel="stylesheet" href="//a.example/x.css">', ["//a.example/x.css"]),
        ('<link rel="canonical" href="https://a.example">', []),
        ('<a href="https://a.example">x</a>', []),
    ],
)
def test_what_a_browser_would_load_is_found(html: str, loaded: list[str]) -> None:
    found = docs_hooks.Loaded()
    found.feed(html)
    assert [each for each in found.addresses if each] == loaded
