"""CDI documents as YAML that every reader takes for the same."""

import re
from typing import Any

import yaml

# What every reader of YAML 1.1 takes for text as it stands. All else is quoted: Go's reader takes
# 1e3 for a number, others 0:1 for one to the base 60.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./=,+-]*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


class _Dumper(yaml.SafeDumper):
    """PyYAML's, with strings quoted wherever it isn't plain that they are strings."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - a list may stand there twice
        """Write everything out: an alias saves a reader nothing."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    # protects: quoted-strings
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def to_yaml(document: dict[str, Any]) -> str:
    """Return a document as the text of a YAML file."""
    width = 1 << 20  # no line is folded
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, explicit_start=True, indent=4, width=width
    )
    return text
