"""Line of a key in TOML text, for error messages and for `validate`.

It reads headers and keys as users usually write them. The tables of a list ([[a.b]]) are a.b.0,
a.b.1 and so on. If a key is hidden, for example in an inline table, the result is the line of the
nearest enclosing key, or None.
"""


def line_of(text: str, key: str) -> int | None:
    """Return the number of the line, from 1, that sets the dotted ``key``."""
    best: tuple[int, int] | None = None  # (length of the matching part, line)
    prefix = ""
    lists: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            prefix = _dotted(stripped.strip("[] \t").split("]")[0])
            if stripped.startswith("[["):
                lists[prefix] = lists.get(prefix, -1) + 1
                if key == prefix:
                    return number
                prefix = f"{prefix}.{lists[prefix]}"
            found = prefix
        elif "=" in stripped and not stripped.startswith("#"):
            name = _dotted(stripped.split("=", 1)[0])
            found = f"{prefix}.{name}" if prefix else name
        else:
            continue
        if key == found:
            return number
        if key.startswith(found + ".") and (best is None or len(found) > best[0]):
            best = (len(found), number)
    return best[1] if best else None


def _dotted(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
