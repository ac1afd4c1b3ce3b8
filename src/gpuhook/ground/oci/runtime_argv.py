"""Read a low-level runtime's command line: verb, bundle, log, root.

What engines write is read: it means the same to runc 1.1 to 1.4 and to crun 1.8 to 1.28.
Where only one of them takes a command line, or each in its own way, none is read. The tests
compare all this with the real programs.
"""

from gpuhook.ground.names import CREATING_VERBS

# Options before the verb and after create and run, those that take a value and those that don't.
_VALUES_BEFORE = frozenset(
    {"--root", "--log", "--log-format", "--log-level", "--rootless", "--cgroup-manager"}
)
_FLAGS_BEFORE = frozenset({"--debug", "--systemd-cgroup"})
_VALUES_AFTER = frozenset(
    {
        "--bundle", "-b", "--config", "-f", "--pid-file", "--console-socket", "--pidfd-socket",
        "--preserve-fds",
    }
)  # fmt: skip
_FLAGS_AFTER = frozenset(
    {"--no-pivot", "--no-new-keyring", "--no-subreaper", "--detach", "-d", "--keep"}
)
# With these a runtime tells of itself, or knows no such option: it creates nothing.
_TELLING = frozenset({"--help", "-h", "-?", "--usage", "--version", "-v", "-V"})


class Arguments:
    """What a command line means to us.

    ``verb`` is create or run where the runtime creates a container if it takes the command
    line at all, and then ``bundle`` is the folder, None for the working directory, and ``config``
    the file that crun reads in place of the bundle's config.json, "" for none. Any other verb, and
    the empty one, is for the runtime alone; what comes after it is in ``rest``. ``log`` is the file
    that the engine reads errors from, if it gave one. ``root`` is the folder in which the runtime
    keeps its containers, "" for its own choice, and ``container`` the id of the one that is
    created. ``unclear`` is a word with which a container may be created, and that not all runtimes
    read in one way; it is empty where all is clear.
    """

    def __init__(self, argv: list[str]) -> None:
        """Read the words after the program's name."""
        self.verb = ""
        self.bundle: str | None = None
        self.config = ""
        self.log: str | None = None
        self.root = ""
        self.container = ""
        self.rest: tuple[str, ...] = ()
        self.unclear = ""
        unclear = self._read(argv)
        if unclear is not None and not CREATING_VERBS.isdisjoint(argv):
            self.unclear = unclear or "an empty word"

    def _read(self, argv: list[str]) -> str | None:
        """Read options, the verb, and for create and run options and the id.

        Returns the first word that is none of these.
        """
        verb = ""
        ids = 0
        words = iter(argv)
        for word in words:
            if word[:1] not in ("", "-"):
                if verb:
                    ids += 1
                    self.container = word
                elif word in CREATING_VERBS:
                    verb = word
                else:
                    self.verb = word
                    self.rest = (*words,)
                    return None
                continue
            name, equals, value = word.partition("=")
            if ids or word[:3] in ("-b=", "-f="):  # crun takes the = for part of the path
                return word
            if word in _TELLING:
                return None
            if name in (_VALUES_AFTER if verb else _VALUES_BEFORE):
                given = value if equals else next(words, None)
                if given is None:
                    return None  # every runtime refuses that
                if given[:1] in ("", "-"):
                    return word
                self._take(name, given)
            elif name not in (_FLAGS_AFTER if verb else _FLAGS_BEFORE):
                return word
        # Every runtime refuses to create none, or two at once.
        self.verb = verb if ids == 1 else ""
        return None

    def _take(self, name: str, value: str) -> None:
        """Note an option's value."""
        if name in ("--bundle", "-b"):
            self.bundle = value
        elif name in ("--config", "-f"):
            self.config = "" if value == "config.json" else value  # crun's name for the bundle's
        elif name == "--root":
            self.root = value
        elif name == "--log":
            elsewhere = value.partition(":")[0] in ("file", "journald", "syslog")  # crun's words
            self.log = None if elsewhere else value
