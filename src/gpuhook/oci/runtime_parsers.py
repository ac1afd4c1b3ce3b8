"""Read any command line of a low-level runtime as runc's and crun's own parsers do.

Sources: runc(8) and runc-create(8), versions 1.1 to 1.4, whose options Go's package flag reads
after urfave/cli has put them before the operands; crun(1), versions 1.8 to 1.28, whose options
argp of the GNU C library reads. The tests compare both with the real programs.

Imported only for what runtime_argv can't read by itself.
"""

import os

from gpuhook.names import CREATING_VERBS

# The options of all versions; True: it takes a value.
_RUNC_GLOBAL = {
    "root": True, "log": True, "log-format": True, "rootless": True, "criu": True,
    "debug": False, "systemd-cgroup": False,
}  # fmt: skip
_RUNC_CREATE = {
    "bundle": True, "b": True, "console-socket": True, "pidfd-socket": True, "pid-file": True,
    "preserve-fds": True, "no-pivot": False, "no-new-keyring": False,
}  # fmt: skip
_RUNC_RUN = {**_RUNC_CREATE, "detach": False, "d": False, "keep": False, "no-subreaper": False}
_CRUN_GLOBAL = {
    "root": True, "log": True, "log-format": True, "log-level": True, "rootless": True,
    "cgroup-manager": True, "debug": False, "systemd-cgroup": False, "program-name": True,
    "HANG": False,
}  # fmt: skip
_CRUN_CREATE = {
    "bundle": True, "b": True, "config": True, "f": True, "console-socket": True,
    "pid-file": True, "preserve-fds": True, "no-new-keyring": False, "no-pivot": False,
    "no-subreaper": False, "program-name": True, "HANG": False,
}  # fmt: skip
_CRUN_RUN = {**_CRUN_CREATE, "detach": False, "d": False, "keep": False}
# With these a runtime tells of itself and does nothing else.
_TELLING = frozenset({"help", "h", "?", "usage", "version", "v", "V"})

Meaning = tuple[str, str | None, str, str | None]


def read(argv: list[str], *, crun: bool | None = None) -> tuple[Meaning, bool]:
    """Return what ``argv`` means: verb, bundle, spec and log, as Arguments has them.

    ``crun`` tells whether crun or runc reads it. Not told, read it as the one that takes it;
    as runc, if both do: then the second value is True if it has another meaning for crun.
    """
    reading: Reading = _Getopt(argv) if crun else _Go(argv)
    if crun is not True and not reading.sound:
        reading = _better(reading, _Go11(argv))
    if crun is not None:
        return reading.meaning(), False
    other = _Getopt(argv)
    differs = other.meaning() != reading.meaning()
    return _better(reading, other).meaning(), differs and other.sound and reading.sound


def sound_readings(argv: list[str]) -> "list[Reading]":
    """Return what ``argv`` is to those runtimes that aren't known to refuse it."""
    return [reading for kind in (_Go, _Go11, _Getopt) if (reading := kind(argv)).sound]


class Reading:
    """What both ways to read have in common: what is found, and where it may stand."""

    options_before: dict[str, bool]
    options_after: dict[str, dict[str, bool]]

    def __init__(self, argv: list[str]) -> None:
        self.sound = True  # nothing was found that the runtime is known to refuse
        self.tells = False  # it only tells of itself
        self.verb = ""
        self.bundle: str | None = None
        self.config = "config.json"
        self.log: str | None = None
        rest = self.read_options(argv, self.options_before)
        if rest and not self.tells:
            self.verb = rest[0]
            if self.creates:
                ids = self.read_options(rest[1:], self.options_after[self.verb])
                self.sound = self.sound and (self.tells or len(ids) == 1)
        if self.tells:
            self.verb = ""

    @property
    def creates(self) -> bool:
        """Whether the verb creates a container."""
        return self.verb in CREATING_VERBS

    def meaning(self) -> Meaning:
        """Return what Arguments has."""
        return self.verb, self.bundle, self.config, self.log

    def read_options(self, argv: list[str], known: dict[str, bool]) -> list[str]:
        """Read options up to the first operand; return what follows."""
        if known is not self.options_before:
            argv = self.arranged(argv, known)
        index = 0
        while index < len(argv) and len(argv[index]) > 1 and argv[index][0] == "-":
            word = argv[index]
            index += 1
            if word == "--":
                break
            for name, glued in self.split(word, known):
                value = glued
                # NVIDIA's runtime takes a bundle before the verb, too, though no other does.
                if value is None and (known.get(name) or name in ("bundle", "b")):
                    self.sound = self.sound and index < len(argv)
                    value = argv[index] if index < len(argv) else None
                    index += 1
                self.tells = self.tells or (name in _TELLING and value is None)
                self.sound = self.sound and (name in known or name in _TELLING)
                if value is not None:
                    self.take(name, value)
        return argv[index:]

    def take(self, name: str, value: str) -> None:
        """Note an option's value."""
        if name in ("bundle", "b"):
            self.bundle = value
        elif name == "log":
            self.log = value

    def arranged(self, argv: list[str], _known: dict[str, bool]) -> list[str]:
        """Return what follows create and run in the order in which it is read."""
        return argv

    def split(self, word: str, _known: dict[str, bool]) -> list[tuple[str, str | None]]:
        """Split a word into its options and their values, if these are glued to it."""
        name, equals, value = _undashed(word).partition("=")
        return [(name, value if equals else None)]


class _Go(Reading):
    """runc: options with one dash or two, anywhere, never shortened."""

    options_before = _RUNC_GLOBAL
    options_after = {"create": _RUNC_CREATE, "run": _RUNC_RUN}  # noqa: RUF012 - typing is slow

    def arranged(self, argv: list[str], known: dict[str, bool]) -> list[str]:
        """Put the options first, as urfave/cli 1.22 does.

        It takes the next word for a value even of an option that has none, so that an operand
        can become the value of an option that comes later.
        """
        options: list[str] = []
        operands: list[str] = []
        value_follows = False
        for index, word in enumerate(argv):
            name, equals, _ = _undashed(word).partition("=")
            if word[:1] == "-" and (name in known or name in _TELLING):
                options.append(word)
                value_follows = not equals
            elif value_follows:
                options.append(word)
                value_follows = False
            elif word == "--":
                return options + operands + argv[index:]
            else:
                operands.append(word)
        return options + operands


class _Go11(_Go):
    """runc 1.1, for which an option that it doesn't know is the value of one before it."""

    options_after = {  # noqa: RUF012 - as above
        verb: {name: takes for name, takes in known.items() if name != "pidfd-socket"}
        for verb, known in _Go.options_after.items()
    }


class _Getopt(Reading):
    """crun: long options that may be shortened, clusters of short ones, all before the id."""

    options_before = _CRUN_GLOBAL
    options_after = {"create": _CRUN_CREATE, "run": _CRUN_RUN}  # noqa: RUF012 - as above

    def split(self, word: str, known: dict[str, bool]) -> list[tuple[str, str | None]]:
        """Split a word into its options and their values, if these are glued to it."""
        if word.startswith("--"):
            [(name, value)] = super().split(word, known)
            if name not in known:
                name = next((long for long in (*known, *_TELLING) if long.startswith(name)), name)
            return [(name, value)]
        found: list[tuple[str, str | None]] = []
        for place, letter in enumerate(word[1:], 2):
            if known.get(letter):
                return [*found, (letter, word[place:] or None)]
            found.append((letter, None))
        return found

    def take(self, name: str, value: str) -> None:
        """Note an option's value."""
        if name in ("config", "f"):
            # The default name is looked for in the bundle, any other one here.
            self.config = value if value == "config.json" else os.path.abspath(value)
        elif name == "log":
            kind, colon, place = value.partition(":")
            elsewhere = colon and kind in ("journald", "syslog")
            self.log = None if elsewhere else place if colon and kind == "file" else value
        else:
            super().take(name, value)


def _better(one: Reading, other: Reading) -> Reading:
    return max(one, other, key=lambda reading: (reading.sound, reading.creates))


def _undashed(word: str) -> str:
    return word[2:] if word.startswith("--") else word[1:]
