"""Command lines as in GNU argp: abbreviations, grouped short options, both value forms; errors.

Source: the manual of the GNU C Library, "Argument Syntax" and "Argp".
"""

from gpuhook.base.errors import GpuhookError

PROGRAM = "nvidia-container-cli"

FLAG, VALUE, OPTIONAL = "flag", "value", "optional"


class UsageError(Exception):
    """An invalid command line; the text is argp's."""


class Option:
    """One option: its names, its kind of value, and its line in --help."""

    def __init__(self, name: str, letter: str = "", kind: str = FLAG, text: str = "") -> None:
        self.name = name
        self.letter = letter
        self.kind = kind
        self.text = text


HELP = (
    Option("help", "?", text="Give this help list"),
    Option("usage", text="Give a short usage message"),
    Option("version", "V", text="Print program version"),
)

Found = list[tuple[str, str | None]]


def parse(
    argv: list[str], options: tuple[Option, ...], *, in_order: bool
) -> tuple[Found, list[str]]:
    """Return the options as (name, value), and the other arguments.

    With ``in_order`` parsing stops at the first argument that isn't an option.
    Raises UsageError.
    """
    found: Found = []
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return found, rest + words
        if word.startswith("--"):
            found.append(_long(word, words, options))
        elif word.startswith("-") and word != "-":
            found += _letters(word[1:], words, options)
        elif in_order:
            return found, [word, *words]
        else:
            rest.append(word)
    return found, rest


def _long(word: str, words: list[str], options: tuple[Option, ...]) -> tuple[str, str | None]:
    name, equals, given = word[2:].partition("=")
    option = _by_name(name, options)
    value = given if equals else None
    if value is not None and option.kind == FLAG:
        raise UsageError(f"option '--{option.name}' doesn't allow an argument")
    if value is None and option.kind == VALUE:
        if not words:
            raise UsageError(f"option '--{option.name}' requires an argument")
        value = words.pop(0)
    return option.name, value


def _by_name(name: str, options: tuple[Option, ...]) -> Option:
    """Return the option with that name, or the only one with that prefix."""
    fitting = [option for option in options if option.name.startswith(name)]
    exact = [option for option in fitting if option.name == name]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if not fitting:
        raise UsageError(f"unrecognized option '--{name}'")
    names = " ".join(f"'--{option.name}'" for option in fitting)
    raise UsageError(f"option '--{name}' is ambiguous; possibilities: {names}")


def _letters(letters: str, words: list[str], options: tuple[Option, ...]) -> Found:
    """Parse short options after one dash: letters of flags, then optionally one with a value."""
    found: Found = []
    while letters:
        letter, letters = letters[0], letters[1:]
        option = next((one for one in options if one.letter == letter), None)
        if option is None:
            raise UsageError(f"invalid option -- '{letter}'")
        if option.kind == FLAG:
            found.append((option.name, None))
            continue
        value: str | None = letters or None
        if value is None and option.kind == VALUE:
            if not words:
                raise UsageError(f"option requires an argument -- '{letter}'")
            value = words.pop(0)
        found.append((option.name, value))
        letters = ""
    return found


def help_text(usage: str, about: str, options: tuple[Option, ...]) -> str:
    """Return the text of --help."""
    lines = [f"Usage: {PROGRAM} {usage}", about, ""]
    for option in (*options, *HELP):
        letter = f"-{option.letter}, " if option.letter else "    "
        value = {FLAG: "", VALUE: "=VALUE", OPTIONAL: "[=VALUE]"}[option.kind]
        lines.append(f"  {letter}--{option.name}{value}".ljust(29) + option.text)
    return "\n".join(lines) + "\n"


# gpuhook's error codes -> nvidia-container-cli's classes, which callers search in the text.
_CLASSES = {
    "request": "input error",
    "unsupported-capability": "input error",
    "unknown-device": "device error",
    "lost-device": "device error",
    "requirement": "requirement error",
    "config": "initialization error",
    "driver": "initialization error",
    "elf": "initialization error",
    "ldcache": "ldcache error",
    "cgroup": "mount error",
    "inject": "mount error",
}


class CliError(Exception):
    """An error of one of nvidia-container-cli's classes."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")


def worded(error: GpuhookError) -> str:
    """Return a gpuhook error in nvidia-container-cli's form."""
    return f"{_CLASSES.get(error.code, 'container error')}: {error}"
