"""What the pages show of results is what their logs give."""

import re
from pathlib import Path

import pytest
from logs import Run
from matplotlib.testing.compare import compare_images

import pages
import plot
from runtime import packed
from tables import USUAL

TITLE = "Losses after 32.8k tokens, batch 4.1k"
PAGE = f"""# A page

<!-- results/one.jsonl: {TITLE} -->

| old | table |
| --- | --- |
| 1 | 2 |

A sentence | with a bar.
<!-- results/two.jsonl: {TITLE} -->

<!-- results/one.jsonl: figure loss -->
![some losses](pictures/loss.png) and words.
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one page, and results in two files."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("pictures").mkdir()
    for name, speed in (("one", 0.5), ("two", 0.6)):
        runs = [Run(Path("runs"), method, speed=speed) for method in ("gn", "muon")]
        packed.add(f"results/{name}.jsonl", [packed.pack(run.folder) for run in runs])
    Path("README.md").write_text(PAGE)


def test_tables_and_figures_of_the_given_results_are_made_anew(project, capsys):
    """What stands around them, and those of other results, stay as they are."""
    assert plot.main(["results/one.jsonl", "--out", "f"]) == 0
    written = [Path.cwd() / name for name in ("README.md", "pictures/loss.png")]
    assert capsys.readouterr().out.splitlines()[-2:] == [*map(str, written)]
    table = plot.tables_and_figures("results/one.jsonl")[0][TITLE]
    assert "Gauss-Newton" in table
    old = "| old | table |\n| --- | --- |\n| 1 | 2 |\n"
    assert Path("README.md").read_text() == PAGE.replace(old, table)
    assert compare_images("f/loss.png", "pictures/loss.png", tol=0) is None

    assert plot.main([str(path) for path in Path("results").iterdir()]) == 0
    other = plot.tables_and_figures("results/two.jsonl")[0][TITLE]
    mark = f"<!-- results/two.jsonl: {TITLE} -->\n\n"
    assert other != table
    assert Path("README.md").read_text() == PAGE.replace(old, table).replace(
        mark, f"{mark}{other}\n"
    )


def test_who_draws_runs_of_their_own_changes_no_page(project):
    """Also beside published ones."""
    for paths in (["runs"], ["runs", "results/one.jsonl"], ["results"]):
        assert plot.main(paths) == 0
    assert Path("README.md").read_text() == PAGE and not [*Path("pictures").iterdir()]


def test_a_table_ends_before_the_sentence_behind_it():
    """Or Markdown would take it for a row."""
    page = "<!-- results/a.jsonl: b -->\n\nA sentence.\n"
    shown = pages.renew(page, {"results/a.jsonl": {"b": "| c |\n"}})
    assert shown == "<!-- results/a.jsonl: b -->\n\n| c |\n\nA sentence.\n"
    assert pages.renew(shown, {"results/a.jsonl": {"b": "| c |\n"}}) == shown


@pytest.mark.parametrize("behind", ["", "\nA sentence.\n", "Words.\n", "<!-- a mark -->\n"])
@pytest.mark.parametrize("now", [f"| d |\n\n{USUAL} lr 3.\n", "| d |\n"])
def test_the_line_on_usual_values_is_written_anew_with_its_table(now, behind):
    """And what is behind it stays, as it is the page's own."""
    mark = "<!-- results/a.jsonl: b -->\n\n"
    page = f"{mark}| c |\n\n{USUAL} lr 1.\n{behind}"
    shown = pages.renew(page, {"results/a.jsonl": {"b": now}})
    blank = "\n" if behind[:1].strip() else ""  # or Markdown would take the next line for a row
    assert shown == f"{mark}{now}{blank}{behind}"


def test_a_page_may_end_without_a_new_line():
    for last in ("| c |", f"| c |\n\n{USUAL} lr 1."):
        page = f"<!-- results/a.jsonl: b -->\n\n{last}"
        shown = pages.renew(page, {"results/a.jsonl": {"b": "| d |\n"}})
        assert shown == "<!-- results/a.jsonl: b -->\n\n| d |\n"


def test_runs_of_several_tasks_in_one_file_are_refused(project, capsys):
    other = Run(Path("runs"), "muon", d_model=99)
    packed.add("results/one.jsonl", [packed.pack(other.folder)])
    assert plot.main(["results/one.jsonl"]) == 2
    assert "must have runs of one network, text, tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "page, says",
    [
        (
            "<!-- results/one.jsonl: Lossless -->\n",
            "results/one.jsonl gives no 'Lossless'",
        ),
        (
            "<!-- results/one.jsonl: figure x -->\n![](x.png)\n",
            "gives no 'figure x'; it",
        ),
        (
            "<!-- results/one.jsonl: figure loss -->\n\nwords\n",
            "no picture follows the mark",
        ),
    ],
)
def test_a_mark_that_names_nothing_is_said(project, capsys, page, says):
    Path("README.md").write_text(page)
    page_before = PAGE.partition("A sentence")[0]  # this one is renewed first, if any is
    Path("A.md").write_text(page_before)
    assert plot.main(["results/one.jsonl"]) == 2
    assert says in capsys.readouterr().err
    assert Path("README.md").read_text() == page
    assert Path("A.md").read_text() == page_before


# ---- the pages of this project -------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    """{file: its tables and figures} of the files that the pages show."""
    return {file: plot.tables_and_figures(pages.ROOT / file) for file in pages.shown_files()}


@pytest.mark.parametrize("page", pages.all_pages(), ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_logs(page, made):
    """Where one is not, `python plot.py results/*.jsonl` writes it anew."""
    text = page.read_text(encoding="utf-8")
    assert pages.renew(text, {file: tables for file, (tables, _) in made.items()}) == text


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    anchors = []
    for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        anchors.append(words.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("page", pages.all_pages(), ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    """To files and headings of this project; links to elsewhere are not followed."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", pages.all_pages(), ids=lambda page: page.name)
def test_the_pictures_of_a_page_are_those_of_the_logs(page, made, tmp_path):
    """But for a few pixels of another version of matplotlib or of its fonts."""
    figures = {file: figures for file, (_, figures) in made.items()}
    for mark in pages.find_marks(page.read_text(encoding="utf-8")):
        if mark.picture:
            plot.write_picture(tmp_path / "now.png", pages.look_up(figures, mark))
            shown = page.parent / mark.picture
            assert compare_images(str(shown), str(tmp_path / "now.png"), tol=5) is None
