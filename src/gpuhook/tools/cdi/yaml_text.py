"""CDI specs as YAML that all parsers read alike, and YAML documents that engines ignore."""

import re
from typing import Any

import yaml

from gpuhook.core.cdi import yaml_reader

# Text that all YAML 1.1 parsers read as a string without quotes. All else is quoted: Go's parser
# reads 1e3 as a number, others read 0:1 as a base-60 number.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./=,+-]*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, with strings quoted unless they are unambiguously strings."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - a list may occur twice
        """Write no aliases, which don't help a reader."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    # protects: quoted-strings
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def to_yaml(document: dict[str, Any]) -> str:
    """Return a spec as the text of a YAML file."""
    width = 1 << 20  # no line is folded
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, explicit_start=True, indent=4, width=width
    )
    return text


def second_document(data: bytes) -> int | None:
    """Return the line of the second document, None if there is none.

    Comments and empty documents don't count. The first document must be readable.
    """
    first_ended, line = False, 0
    try:
        for event in yaml.parse(data, Loader=yaml_reader.LOADER):
            if isinstance(event, yaml.DocumentEndEvent):
                first_ended = True
            elif first_ended and isinstance(event, yaml.DocumentStartEvent):
                line = _line(event.start_mark)
            elif first_ended and _says_something(event):
                return line
    except yaml.MarkedYAMLError as error:
        return _line(error.problem_mark or error.context_mark)
    except (yaml.YAMLError, ValueError, OverflowError):  # a character that YAML doesn't allow
        return line or None
    return None


def _says_something(event: yaml.Event) -> bool:
    if isinstance(event, yaml.ScalarEvent):
        return bool(event.value)
    return isinstance(event, yaml.NodeEvent)


def _line(mark: "Any") -> int:  # of PyYAML or of libyaml
    return 1 if mark is None else mark.line + 1
