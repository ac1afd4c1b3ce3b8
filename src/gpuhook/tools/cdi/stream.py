"""Detection of further YAML documents in a CDI file, which engines ignore."""

from typing import Any

import yaml

from gpuhook.core.cdi import yaml_reader


def rest(data: bytes) -> int | None:
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
