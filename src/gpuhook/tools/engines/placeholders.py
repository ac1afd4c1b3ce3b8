"""Placeholders in an engine's file, of which another program makes the one that is read.

What is copied from such a file into another one would keep them for ever. Comments don't count.
"""

import re
from collections.abc import Container, Iterator

from gpuhook.ground.errors import EngineError, shown

_FORMS = re.compile(
    r"""
    \$\{[A-Za-z_][\w.-]*(?:[:?+=-][^}\n]*)?\}   # ${NAME}, ${NAME:-default}
    | \$\([A-Za-z_]\w*\)                        # $(NAME)
    | (?<=["'])\$[A-Z_][A-Z0-9_]+(?=["'/:])     # "$NAME"
    | \{\{[^\n]*?\}\} | \{%[^\n]*?%\}           # {{ name }}, {% if name %}
    | <%[^\n]*?%>                               # <%= name %>
    | (?<!\\u0040)@@?[A-Z][A-Z0-9_]+@@?          # @NAME@, and none with an escaped @
    | %[A-Z][A-Z0-9_]+%                         # %NAME%
    | __[A-Z][A-Z0-9_]*[A-Z0-9]__               # __NAME__
    """,
    re.VERBOSE,
)
# What a # may be in without beginning a comment, and comments.
_PARTS = re.compile(
    r"\{\{[^\n]*?\}\}|'''.*?'''|\"\"\".*?\"\"\"|'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"|#[^\n]*",
    re.DOTALL,
)


def find(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, placeholder) of each one in TOML or JSON."""
    plain = _PARTS.sub(lambda found: "" if found[0][0] == "#" else found[0], text)
    for found in _FORMS.finditer(plain):
        yield plain.count("\n", 0, found.start()) + 1, found[0]


def check(engine: str, path: str, text: str, own: Container[str] = ()) -> None:
    """Raise EngineError for a file with placeholders; ``own`` are some that the engine replaces."""
    for line, found in find(text):
        if found not in own:
            raise EngineError(
                f"{path}, line {line}, has the placeholder {shown(found)}: another program makes "
                f"of it the file that {engine} reads",
                f"Name that file with --config; or write {found[0]} as \\u{ord(found[0]):04x} "
                "where this is no placeholder",
            )
