"""Command lines for low-level runtimes: realistic and absurd ones."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from harness.parsers import WORK

Options = dict[str, bool]  # option without dashes -> whether it takes a value

BUNDLES = ("b1", "b2", "./b3", "b4/", f"{WORK}/b5", "b6/sub", "é", "two\nlines\n", "\udcff\udcfe")
SPECS = ("config.json", "other.json", f"{WORK}/b1/other.json", "b1/other.json", "b2/config.json")
VALUES = {
    "bundle": BUNDLES,
    "b": BUNDLES,
    "config": SPECS,
    "f": SPECS,
    "log": (f"{WORK}/log-1", f"{WORK}/log-2", f"file:{WORK}/log-3"),
    "log-format": ("json", "text"),
    "log-level": ("debug", "error", "warning"),
    "root": ("state", "create", f"{WORK}/state"),
    "rootless": ("true", "false", "auto"),
    "criu": ("criu", "create"),
    "cgroup-manager": ("cgroupfs", "disabled", "systemd"),
    "preserve-fds": ("0", "1"),
}
FILES = ("file", "create", "b1", f"{WORK}/file")
NAMES = ("id", "id2", "create", "run", "start", "b1")
ODD = (
    "", "-", "--", "=", "=b1", "b 1", "*", "$(id)", "\\", "'", "é", "\udcff", "two\nlines", "-x",
    "-b", "--bundle", "--bundle=b2", "-bb2", "--log", "--root", "create", "run", "start", "restore",
    "false", "--unknown", "---bundle", "--=x", "-=x", "--pidfd-socket", "--HANG=0", "config.json",
)  # fmt: skip
# Options that --help doesn't show, or doesn't show in every version.
HIDDEN_BEFORE = {"criu": True, "log-level": True, "cgroup-manager": True, "program-name": True}
HIDDEN_AFTER = {"config": True, "pidfd-socket": True, "keep": False, "program-name": True}
TELLING = {"help", "h", "?", "usage", "version", "v", "V"}  # options that only print something

# Arguments after create or run that gpuhook once misread, or could misread.
TWISTED = (
    ["--bundle=", "id"], ["--bundle", "", "id"], ["-b", "", "id"], ["-b=", "id"], ["--", "-b"],
    ["--", "--bundle=b1"], ["--", "--bundle", "b1"], ["--bundle=b2", "--", "--bundle=b1"],
    ["b1", "id", "-b"], ["--bundle=b2", "b1", "id", "--bundle"], ["-bundle", "b1"], ["-bundle=b1"],
    ["-bundle=b1", "id"], ["-b=b1", "id"], ["-bb1", "id"], ["-fother.json", "id"], ["--", "-h"],
    ["--config", "b1/other.json", "-b", "b2", "id"], ["-b", "b2", "-f", "./config.json", "id"],
    ["--pid-file", "file", "--b=b1", "--pidfd-socket", "id", "-b"], ["--no-pivot", "id", "-b=b1"],
    ["--pid-file", "--pidfd-socket", "b1", "id", "-b"], ["--keep", "id", "--bundle", "b1"],
)  # fmt: skip

OTHER_VERBS = (
    "start", "delete", "state", "kill", "exec", "ps", "list", "events", "update", "pause", "resume",
    "features", "spec", "checkpoint", "restore", "mounts", "help", "h", "init", "what", "creat",
    "CREATE", "", "-",
)  # fmt: skip
OTHER_OPTIONS = {
    "force": False, "f": False, "all": False, "a": False, "process": True, "p": True, "tty": False,
    "t": False, "env": True, "e": True, "detach": False, "d": False, "pid-file": True, "user": True,
    "format": True, "stats": False, "bundle": True, "b": True, "image-path": True, "regex": True,
    "resources": True, "r": True, "memory": True, "rootless": False, "no-pivot": False, "cwd": True,
}  # fmt: skip


def options(text: str) -> Options:
    """Return the options that the text of a --help lists."""
    found: Options = {}
    for line in re.findall(r"^ +(-.*?)(?:   |$)", text, re.MULTILINE):
        names = re.findall(r"(?:^|, )--?([\w?-]+)", line)
        found |= dict.fromkeys(names, "=" in line or " value" in line)
    return found


@dataclass
class CommandLines:
    """Generator of command lines with the options that a runtime's --help lists.

    ``before`` has the options before the verb. ``after`` has the options that may follow each
    verb that creates a container.
    """

    chance: Random
    before: Options
    after: dict[str, Options]

    def some(self) -> list[str]:
        """Make a command line."""
        chance = self.chance
        argv: list[str] = []
        for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 3))):
            argv += self.option(self.before, HIDDEN_BEFORE)
        if chance.random() < 0.04:
            argv.append(chance.choice(("--", *ODD)))
        if chance.random() < 0.8:
            verb = chance.choice(("create", "create", "run"))
            argv += [verb, *self.to_create(self.after[verb])]
        else:
            argv += [chance.choice(OTHER_VERBS), *self.to_do_otherwise()]
        return self.spoilt(argv) if chance.random() < 0.12 else argv

    def to_create(self, known: Options) -> list[str]:
        """Make the words after create or run: options, an id, and sometimes one more option."""
        chance = self.chance
        words: list[str] = []
        for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4))):
            words += self.option(known, HIDDEN_AFTER)
        words += ["--"] * (chance.random() < 0.06)
        words += [chance.choice(NAMES if chance.random() < 0.97 else ODD)]
        if chance.random() < 0.2:
            words += self.option(known, HIDDEN_AFTER)
        return words

    def to_do_otherwise(self) -> list[str]:
        """Make the words after a verb other than create or run."""
        words: list[str] = []
        for _ in range(self.chance.choice((0, 1, 1, 2, 3))):
            if self.chance.random() < 0.5:
                words += self.option(OTHER_OPTIONS, {})
            else:
                words += [self.chance.choice((*NAMES, *ODD, "9", "KILL"))]
        return words

    def option(self, known: Options, hidden: Options) -> list[str]:
        """Spell an option, usually with a value only if it takes one."""
        chance = self.chance
        names = [name for name in known if name not in TELLING or chance.random() < 0.1]
        names += ["bundle", "bundle", "b"] if "bundle" in known else []
        if hidden and chance.random() < 0.07:
            names = list(hidden)
        name = chance.choice(names)
        spelled = list(spellings(name, self.value(name), chance.randrange(1, len(name) + 1)))
        likely = spelled[:2] if (known | hidden)[name] else spelled[2:3]
        return chance.choice(likely if chance.random() < 0.7 else spelled)

    def value(self, name: str) -> str:
        """Make a value for an option."""
        if self.chance.random() < 0.1:
            return self.chance.choice(ODD)
        return self.chance.choice(VALUES.get(name, FILES))

    def spoilt(self, argv: list[str]) -> list[str]:
        """Remove a word, insert one or swap two."""
        place, other = (self.chance.randrange(len(argv)) for _ in range(2))
        how = self.chance.randrange(3)
        if how == 0:
            return argv[:place] + argv[place + 1 :]
        if how == 1:
            return [*argv[:place], self.chance.choice(ODD), *argv[place:]]
        argv[place], argv[other] = argv[other], argv[place]
        return argv

    def systematic(self) -> Iterator[tuple[str, list[str]]]:
        """Yield pairs of an option and a command line, for each option, spelling and place.

        For the command lines in TWISTED, the first item is the verb.
        """
        for name in self.before | HIDDEN_BEFORE:
            for spelled in every_spelling(name):
                yield name, [*spelled, "create", "--bundle", "b1", "id"]
                yield name, [*spelled, "create", "start"]
                yield name, [*spelled, "start", "create"]
        seen: Options = {}
        for verb, known in self.after.items():
            yield from ((verb, [verb, *words]) for words in TWISTED)
            for name in known | HIDDEN_AFTER:
                yield name, [verb, f"--{name}", "--bundle", "b1"]
                yield name, [verb, f"--{name}", "-b", "b1", "id"]
                yield name, [verb, f"--{name}", "--", "id"]
                yield name, [verb, "b1", "id", f"--{name}"]
                # The same code reads the options of both verbs, so the second gets only the usual
                # spellings.
                usual = list(spellings(name, good(name), len(name)))
                for spelled in usual[:3] if name in seen else every_spelling(name):
                    yield name, [verb, *spelled, "--bundle", "b1", "id"]
                for spelled in usual[:3] if name in seen else usual:
                    yield name, [verb, "-b", "b1", *spelled, "id"]
                    yield name, [verb, "--bundle=b1", "id", *spelled]
            seen |= known | HIDDEN_AFTER


def spellings(name: str, value: str, cut: int) -> Iterator[list[str]]:
    """Yield the ways to write an option; ``cut`` is the length of an abbreviation.

    The first two are for an option with a value, the third is for one without a value.
    """
    usual = f"--{name}" if len(name) > 1 else f"-{name}"
    yield [usual, value]
    yield [f"{usual}={value}" if len(name) > 1 else f"-{name}{value}"]
    yield [usual]
    yield [f"-{name}={value}"]
    yield [f"-{name}", value]
    yield [f"-{name}"]
    yield [f"--{name[:cut]}={value}"]
    yield [f"--{name[:cut]}", value]
    yield [f"--{name[:cut]}"]
    yield [f"--{name}=true"]
    yield [f"--{name}=false"]
    yield [f"-d{name}{value}"]
    yield [f"-d{name}", value]


def good(name: str) -> str:
    """Return a valid value for an option."""
    return VALUES.get(name, FILES)[0]


def every_spelling(name: str) -> Iterator[list[str]]:
    """Yield the ways to write an option with a valid value, including some abbreviations."""
    value = good(name)
    yield from spellings(name, value, len(name))
    for cut in sorted({1, 2, 4, len(name) // 2, len(name) - 1} & set(range(1, len(name)))):
        yield from ([f"--{name[:cut]}={value}"], ["--" + name[:cut], value], ["--" + name[:cut]])


def command_lines(helped: dict[str, str], seed: int) -> CommandLines:
    """Return a generator of command lines for a runtime.

    ``helped`` maps verbs to the output of their --help, and an empty string to that of the
    runtime.
    """
    after = {verb: options(helped[verb]) for verb in ("create", "run")}
    return CommandLines(Random(seed), options(helped[""]), after)  # noqa: S311 - no secret
