"""The figures and tables of the pages, which `python plot.py results/*.jsonl` makes from the logs.

A comment in a page names a file of packed runs, and a table or a figure that is made from it. What
it names follows it:

    <!-- results/tiny.jsonl: Losses after 2.62m tokens, batch 131k -->

    | method | loss | ..

    <!-- results/tiny.jsonl: figure loss -->
    ![what the figure shows](docs/loss.png)

The line on usual values below a table (see tables.py) belongs to it, and is replaced too. So no
number in a table is typed by hand, and every one can be traced to a run.
"""

import re
from pathlib import Path
from typing import NamedTuple

from runtime.command import BadInput
from tables import USUAL

ROOT = Path(__file__).parent
MARK = re.compile(r"<!-- (?P<file>results/\S+\.jsonl): (?P<name>[^\n]+?) -->\n+")
REST_OF_LINE = r"[^\n]*(\n|\Z)"
TABLE = re.compile(rf"(\|{REST_OF_LINE})*(\n{USUAL}{REST_OF_LINE})?")
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<path>[^)]+)\)")
FIGURE = "figure "  # what the name of a figure begins with


class Mark(NamedTuple):
    """A comment in a page, and the place of what follows it."""

    file: str  # of packed runs, such as results/tiny.jsonl
    name: str  # the title of a table, or "figure" and the name of a figure
    start: int  # of the table or picture, in the page's text
    end: int
    picture: str | None  # its path, relative to the page; None for a table


def all_pages():
    """The paths of the pages, a list."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def find_marks(text):
    """The Marks in a page's text. Raises BadInput for a figure's mark without a picture."""
    marks = []
    for match in MARK.finditer(text):
        file, name = match["file"], match["name"]
        if name.startswith(FIGURE):
            follows = PICTURE.match(text, match.end())
            if not follows:
                raise BadInput(f"no picture follows the mark of {name} of {file}")
            marks.append(Mark(file, name, *follows.span(), follows["path"]))
        else:
            follows = TABLE.match(text, match.end())
            marks.append(Mark(file, name, *follows.span(), None))
    return marks


def shown_files():
    """The files of packed runs that the pages name, in order."""
    files = []
    for page in all_pages():
        for mark in find_marks(page.read_text(encoding="utf-8")):
            files.append(mark.file)
    return [*dict.fromkeys(files)]


def renew(text, tables):
    """A page's text in which tables are replaced; tables: {file: {title: table}}.

    Tables of other files stay. Raises BadInput if a file has no table of the title.
    """
    for mark in reversed(find_marks(text)):  # from the end, so that places stay true
        if mark.picture or mark.file not in tables:
            continue
        table = look_up(tables, mark)
        rest = text[mark.end :]
        if rest and not rest.startswith("\n"):
            table += "\n"  # or Markdown would take the next line for a row
        text = text[: mark.start] + table + rest
    return text


def look_up(found, mark):
    """What a Mark names; found: {file: {name: a table or a figure}}. Raises BadInput."""
    of_file = found[mark.file]
    name = mark.name.removeprefix(FIGURE)
    if name not in of_file:
        raise BadInput(f"{mark.file} gives no {mark.name!r}; it gives {', '.join(of_file)}")
    return of_file[name]
