"""The command line, made from the fields of dataclasses: a field's comment is its help, so both are written once."""

import argparse
import dataclasses
import inspect
import itertools
import re
import sys
from fractions import Fraction
from pathlib import Path


def fields_of(cls, derived=()):
    """The fields of a dataclass that are flags, {name: (type, default, help)}; those in `derived` are not."""
    sources = [inspect.getsource(c) for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c)]
    comments = dict(re.findall(r"^    (\w+): .*?#\s*(.*)$", "\n".join(sources), re.M))  # the last one of a name counts
    return {
        f.name: (f.type, f.default, comments.get(f.name, "")) for f in dataclasses.fields(cls) if f.name not in derived
    }


def count(text):
    """A whole number, with or without a suffix: 400k, 1.2m, 3b. Raises ValueError where it is none, or beyond 10^15."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmb]?)", text.strip().lower().replace("_", ""))
    if not match:
        raise ValueError(text)
    value = Fraction(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2]]
    if value.denominator > 1 or abs(value) > 10**15:
        raise ValueError(text)
    return int(value)


def utf8(text):
    """The text. Raises ValueError where its bytes were none."""
    return text.encode().decode()


def boolean(text):
    """true or false. Raises KeyError where it is neither."""
    return {"true": True, "false": False}[text.lower()]


KINDS = {  # how a text becomes a value, and what it must be
    int: (count, "a whole number such as 32, 400k or 1.2m"),
    float: (float, "a number"),
    bool: (boolean, "true or false"),
    str: (utf8, "a text in UTF-8"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ValueErrors of one line."""

    def __init__(self, **options):
        super().__init__(prog=Path(sys.argv[0]).name, allow_abbrev=False, **options)

    def error(self, message):
        raise ValueError(message.encode("unicode_escape").decode())

    def given(self, argv):
        """{name: text} of the flags that argv has, and the words that are none of them."""
        known, others = self.parse_known_args(argv)
        return {name: text if text != [] else "--" for name, text in vars(known).items() if text is not None}, others


def exists(text):
    """Whether there is a file or folder of this name; a name too long for one is none."""
    try:
        return Path(text).exists()
    except OSError:
        return False


def expand(argv):
    """The command lines of a grid, one for each combination of values between commas.

    Not split are paths that exist, and what --out and --generate are given.
    """
    options = []
    for before, word in zip(["", *argv], argv, strict=False):
        name, equals, text = word.partition("=") if word.startswith("--") else (before, "", word)
        start = name + equals if word.startswith("--") else ""
        values = [text] if name in ("--out", "--generate") or exists(text) else dict.fromkeys(text.split(","))
        options.append([start + value for value in values])
    return [list(words) for words in itertools.product(*options)]


def peek(argv, name, default, valid=()):
    """The value of one flag, before the others are known. Raises ValueError where it is not one of `valid`, if any."""
    parser = Parser(add_help=False)
    parser.add_argument(f"--{name}")
    value = parser.given(argv)[0].get(name, default)
    if valid and value not in valid:
        raise ValueError(f"{name} is {value!r}; valid: {', '.join(valid)}")
    return value


def parse(argv, fields, defaults, about):
    """What the command line sets, {name: value}; `fields` as from fields_of, `defaults` for the help.

    Raises ValueError, in one line that says what would be valid, for an unknown flag or a value of the wrong kind.
    """
    flag = lambda name: "--" + name.replace("_", "-")
    parser = Parser(description=about)
    for name, (kind, _, comment) in fields.items():
        shown = "" if defaults[name] is None else f" [default {defaults[name]}]"
        parser.add_argument(flag(name), metavar=kind.__name__, help=(comment + shown).replace("%", "%%"))
    given, unknown = parser.given(argv)
    if unknown:
        raise ValueError(f"unknown flag {unknown[0]!r}; valid with this method: {', '.join(map(flag, fields))}")
    values = {}
    for name, text in given.items():
        convert, what = KINDS[fields[name][0]]
        try:
            values[name] = convert(text)
        except (ValueError, KeyError):
            raise ValueError(f"{flag(name)} is {text!r}; it must be {what}") from None
    return values
