"""Detection of placeholders in a file that is a template of an engine's configuration.

Settings copied from a template into another file would keep their placeholders. Comments are
ignored.
"""

import re
from collections.abc import Container, Iterator

from gpuhook.base.errors import EngineError, shown

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
# Strings, in which a # starts no comment, and comments.
_PARTS = re.compile(
    r"\{\{[^\n]*?\}\}|'''.*?'''|\"\"\".*?\"\"\"|'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"|#[^\n]*",
    re.DOTALL,
)


def find(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, placeholder) for each placeholder in TOML or JSON."""
    plain = _PARTS.sub(lambda found: "" if found[0][0] == "#" else found[0], text)
    for found in _FORMS.finditer(plain):
        yield plain.count("\n", 0, found.start()) + 1, found[0]


def check(engine: str, path: str, text: str, own: Container[str] = ()) -> None:
    """Raise EngineError for a file with placeholders, except ``own``, which the engine replaces."""
    for line, found in find(text):
        if found not in own:
            raise EngineError(
                f"{path}, line {line}, has the placeholder {shown(found)}: it is the template of "
                f"the file that {engine} reads",
                f"Name that file with --config; or write {found[0]} as \\u{ord(found[0]):04x} "
                "if this isn't a placeholder",
            )
