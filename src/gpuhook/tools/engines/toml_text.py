"""Editor of hand-written TOML files that keeps comments, order and layout.

The text is changed only where the document changes. It is parsed again afterwards, and must
contain exactly the wanted document.
"""

import tomllib

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines.merge import Document


def parse(text: str, path: str) -> Document:
    """Return the document; EngineError if the text isn't TOML."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise EngineError(
            f"{path} is not valid TOML: {error}",
            "Correct it and run this again; the file was not changed",
        ) from None


def render(document: Document, header: str) -> str:
    """Return a document as the text of a new file, with comment lines before it."""
    comments = "".join(f"# {line}\n" for line in header.split("\n"))
    return f"{comments}\n{plain(document)}"


def plain(document: Document) -> str:
    """Return a document as text."""
    from gpuhook.tools.engines.toml_edit import new  # noqa: PLC0415 - tomlkit takes 10 ms

    return new(document)


def edited(text: str, wanted: Document, path: str) -> str:
    """Return ``text`` edited to contain ``wanted``."""
    before = parse(text, path)
    if before == wanted:
        return text
    from gpuhook.tools.engines import toml_edit  # noqa: PLC0415 - tomlkit takes 10 ms

    try:
        text = toml_edit.edited(text, before, wanted)
    except toml_edit.ERRORS as error:
        raise _refusal(path, str(error)) from error
    if parse(text, path) != wanted:
        raise _refusal(path, "its tables are written in several places")
    return text


def _refusal(path: str, why: str) -> EngineError:
    return EngineError(
        f"{path} can't be edited without changing other parts: {why}",
        "Write each of its tables once, in one place, and run this again; the file was not changed",
    )
