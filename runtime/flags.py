"""The command line is made from the fields of dataclasses: a field's comment is its help text."""

import argparse
import dataclasses
import difflib
import inspect
import itertools
import math
import operator
import os
import re
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Flag(NamedTuple):
    """What a field of a dataclass says of its flag."""

    kind: type  # int, float, bool or str
    default: Any
    help: str


def fields_of(cls, derived=()):
    """{name: Flag} for the fields of a dataclass, without those named in `derived`."""
    helps = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            helps |= comments_of(base)  # a field without a comment keeps the one of the class above

    return {
        field.name: Flag(field.type, field.default, helps.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.name not in derived
    }


def values_of(config, derived=()):
    """{name: value} for the fields of a dataclass object, without those named in `derived`."""
    return {name: getattr(config, name) for name in fields_of(type(config), derived)}


@cache
def comments_of(cls):
    """{field: comment} from the source of a class.

    A field's comment is the comment lines directly above it, and what stands behind it.
    """
    found = {}
    comment = []
    for line in inspect.getsource(cls).splitlines():
        field = re.match(r"    (\w+):", line)
        _, mark, words = line.partition("# ")
        if mark:
            comment.append(words.strip())
        if field and comment:
            found[field[1]] = " ".join(comment)
        if not line.lstrip().startswith("#"):
            comment = []
    return found


# ---- texts to values ----


def count(text):
    """A whole number, with or without a suffix: 400k, 1.2m, 3b.

    Raises ValueError for anything else, and for one above 10^15.
    """
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmb]?)", text.strip().lower().replace("_", ""))
    if not match:
        raise ValueError(text)
    number, suffix = match.groups()
    value = Fraction(number) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[suffix]
    if value.denominator > 1 or abs(value) > 10**15:
        raise ValueError(text)
    return int(value)


def utf8(text):
    """The text itself. Raises ValueError if the bytes it came from were not UTF-8."""
    os.fsencode(text).decode("utf-8")
    return text


def boolean(text):
    """true or false, in any case. Raises KeyError for anything else."""
    return {"true": True, "false": False}[text.lower()]


KINDS = {  # type: how a text becomes a value, and what the text must be
    int: (count, "a whole number up to 10^15, such as 32, 400k or 1.2m"),
    float: (float, "a number"),
    bool: (boolean, "true or false"),
    str: (utf8, "a text in UTF-8"),
}


# ---- checks of values, for the `check` method of a Config ----


def check_range(config, names, least=None, above=None, below=None, most=None):
    """Raises ValueError if the value of a field is outside of the limits that are given.

    The value itself may be `least` and `most`, but neither `above` nor `below`. NaN and infinity
    are always refused. Skipped are names that the config lacks, and fields that are None.
    """
    limits = [
        ("at least", operator.ge, least),
        ("above", operator.gt, above),
        ("below", operator.lt, below),
        ("at most", operator.le, most),
    ]
    limits = [row for row in limits if row[2] is not None]
    in_words = [f"{words} {readable(limit)}" for words, _, limit in limits]
    required = " and ".join(in_words)
    if required == "above 0":
        required = "a positive number"

    for name in names:
        value = getattr(config, name, None)
        if value is None:
            continue
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be finite")
        if not all(compare(value, limit) for _, compare, limit in limits):
            raise ValueError(f"{name} is {value}; it must be {required}")


def check_choice(config, name, valid):
    """Raises ValueError if a field is not one of the valid values."""
    value = getattr(config, name)
    if value not in valid:
        raise ValueError(f"{name} is {value!r}; valid: {', '.join(map(str, valid))}")


def readable(limit):
    """A limit as a person would write it: 2^31, not 2147483648."""
    if limit in (2**31, 2**32):
        return f"2^{limit.bit_length() - 1}"
    return str(limit)


# ---- the command line ----


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ValueErrors of one line."""

    def __init__(self, **options):
        super().__init__(prog=Path(sys.argv[0]).name, allow_abbrev=False, **options)
        self.flags = []  # those of add_groups, such as --inner-batch

    def error(self, message):
        if "expected one argument" in message:
            message += " (one that begins with a minus is written as in --lr=-1e-3)"
        raise ValueError(message.encode("unicode_escape").decode())

    def add_groups(self, groups, defaults):
        """Adds flags. groups: {title: {name: Flag}}; a flag that is there already is left out."""
        for title, fields in groups.items():
            group = self.add_argument_group(f"flags of {title}")
            for name, flag in fields.items():
                if flag_of(name) not in self.flags:
                    self.flags.append(flag_of(name))
                    default = defaults.get(name, flag.default)
                    self.add_flag(group, name, flag, default)

    def add_flag(self, group, name, flag, default):
        """Adds a flag to a group of the help."""
        text = flag.help
        says_default = re.search(r"\bdefault\b", text, re.IGNORECASE)
        is_usual = default == flag.default  # not one of a model or a method, which is to be said
        if default not in (None, "") and not (says_default and is_usual):
            text += f" [default {default}]"
        metavar = flag.kind.__name__
        group.add_argument(flag_of(name), metavar=metavar, help=text.replace("%", "%%"))

    def given(self, argv):
        """{name: text} of the flags that argv has, and the list of words that are no flag."""
        known, others = self.parse_known_args(argv)
        texts = {name: text for name, text in vars(known).items() if text is not None}
        for name, text in texts.items():
            if text == []:  # argparse drops the text of "--lr=--"
                texts[name] = "--"
        return texts, others


def flag_of(name):
    """inner_batch -> --inner-batch."""
    return "--" + name.replace("_", "-")


def expand(argv):
    """The command lines of a grid, one for each combination of values between commas.

    Never split are the path of an existing file or folder, and the value of --out.
    """
    choices = []  # for each word of argv, the words that may stand in its place
    previous = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            start = name + equals
        else:
            name, start, text = previous, "", word
        values = text.split(",")
        if name == "--out" or os.path.exists(text):  # false also of what cannot be a path
            values = [text]
        choices.append([start + value for value in dict.fromkeys(values)])
        previous = word
    return [list(words) for words in itertools.product(*choices)]


def peek(argv, name, default, valid=()):
    """The text of one flag, before the others are known.

    Raises ValueError if `valid` is given and the text is not in it.
    """
    parser = Parser(add_help=False)
    parser.add_argument(flag_of(name))
    texts, _ = parser.given(argv)
    value = texts.get(name, default)
    if valid and value not in valid:
        raise ValueError(f"{name} is {value!r}; valid: {', '.join(valid)}")
    return value


def parse(argv, fields, defaults, about, others=None, meant=None, usage="%(prog)s"):
    """{name: value} of the flags that argv has.

    fields: {title of a group: {name: Flag}}, as the help lists them. defaults: {name: value}, shown
    in the help. about: its first text. others: fields that are not valid now, but would be with the
    method that their title names. meant: {word: what people mean by it}, of words that are no flag.
    usage: what comes before the flags. Raises ValueError, in one line that says what is valid, for
    a flag that is unknown or not valid now, and for a value of the wrong kind.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=about, formatter_class=form, usage=f"{usage} [--FLAG VALUE ..]")
    parser.add_groups(fields, defaults)
    others = others or {}
    parser.add_groups(others, {})

    texts, unknown = parser.given(argv)
    if unknown:
        raise ValueError(explain_unknown(unknown[0], parser.flags, meant or {}))
    valid = {}
    for group in fields.values():
        valid |= group
    for name in texts:
        if name not in valid:
            owners = [title for title, group in others.items() if name in group]
            raise ValueError(f"{flag_of(name)} is valid only with --method {' | '.join(owners)}")

    values = {}
    for name, text in texts.items():
        convert, required = KINDS[valid[name].kind]
        try:
            values[name] = convert(text)
        except (ValueError, KeyError):
            raise ValueError(f"{flag_of(name)} is {text!r}; it must be {required}") from None
    return values


def explain_unknown(word, known, meant):
    """What to say of a word of the command line that is no flag."""
    word = word.partition("=")[0]
    similar = difflib.get_close_matches(word, known, n=1)
    if word in meant:
        guess = f"did you mean {meant[word]}? "
    elif word.startswith("-") and similar:
        guess = f"did you mean {similar[0]}? "
    else:
        guess = ""
    return f"unknown flag {word!r}; {guess}--help lists every flag"


# ---- settings as arguments of compiled functions ----


def traced(cls):
    """A decorator: makes a dataclass of settings an argument of functions that JAX compiles.

    Its floats are traced, that is, numbers that the compiled program is given at each call: one
    program, which is kept on disk, serves a sweep over learning rates. All other fields (sizes,
    names, true or false) are static: they decide the program, and another value compiles another
    one.
    """
    floats = [field.name for field in dataclasses.fields(cls) if field.type is float]
    others = [field.name for field in dataclasses.fields(cls) if field.type is not float]
    return jax.tree_util.register_dataclass(cls, data_fields=floats, meta_fields=others)
