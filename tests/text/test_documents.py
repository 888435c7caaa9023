"""Sources give their documents again and again, through failures of a network too."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from runtime import command
from text import documents

SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "c4-sample"


def read(corpus):
    return [document for source in documents.sources(str(corpus)) for document in source.read()]


def test_stdlib_is_real_text_on_every_machine():
    """Some hundred files, all text, none of them tests or other people's packages."""
    (source,) = documents.sources("stdlib")
    paths = [Path(path) for path, *_ in source.stamp]
    assert len(paths) > 300 and any(p.name == "argparse.py" for p in paths)
    root = next(p for p in paths if p.name == "argparse.py").parent
    folders = {folder for path in paths for folder in path.relative_to(root).parts}
    assert not folders & {"site-packages", "test", "tests"}
    assert sum(map(len, source.read())) > 5_000_000 and not source.held_out


def test_what_a_build_wrote_is_no_source(tmp_path):
    for name in ("_sysconfigdata_x.py", "a.py", "b.pyc"):
        (tmp_path / name).touch()
    assert [path.name for path in documents.stdlib_files(tmp_path)] == ["a.py"]


def test_a_python_without_source_is_said(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").touch()  # tests are not read
    with pytest.raises(ValueError, match="no .py files"):
        documents.stdlib_files(tmp_path)


def test_a_files_stamp_changes_with_it(tmp_path):
    """Also where it is as long as before."""
    (tmp_path / "a.txt").write_text("one")
    stamps = [documents.sources(str(tmp_path / "a.txt"))[0].stamp]
    for text_of, time in (("two", 1), ("three", 1)):
        (tmp_path / "a.txt").write_text(text_of)
        os.utime(tmp_path / "a.txt", ns=(time, time))
        stamps.append(documents.sources(str(tmp_path / "a.txt"))[0].stamp)
    assert len({str(stamp) for stamp in stamps}) == 3


@pytest.mark.skipif(not SAMPLE.exists(), reason="no sample of C4 beside the repository")
def test_documents_of_c4():
    """Files as C4 is distributed: 1,320 documents, the validation file held out."""
    assert len(read(SAMPLE)) == 1320
    assert [s.held_out for s in documents.sources(str(SAMPLE))] == [False, False, True]


def test_names_of_nothing_are_refused(tmp_path):
    (tmp_path / "a.pdf").touch()
    (tmp_path / "empty").mkdir()
    missing = ["no/such.txt", "", "x" * 5000]
    unreadable = [tmp_path / "a.pdf", tmp_path / "empty"]
    for names, says in ((missing, "that is there"), (unreadable, "end in .txt")):
        for name in names:
            with pytest.raises(ValueError, match=says):
                documents.sources(str(name))


# ---- C4 over a network ---------------------------------------------------------------------------


class Hub:
    """In place of Hugging Face: every file has ten documents.

    The next attempts fail as `failures` says, each (documents that come before, error).
    """

    config = SimpleNamespace(HF_HUB_OFFLINE=False, HF_ENDPOINT="http://127.0.0.1:9")

    def __init__(self, failures):
        self.failures = failures
        self.attempts = 0

    def load_dataset(self, path, data_files, split, streaming):
        assert (path, split, streaming) == ("allenai/c4", "train", True)
        self.attempts += 1
        stop, error = self.failures.pop(0) if self.failures else (10, None)
        for i in range(stop):
            yield {"text": f"{data_files['train']} {i}"}
        if error:
            raise error


@pytest.fixture
def pauses(monkeypatch):
    """How long was waited."""
    found = []
    monkeypatch.setattr(documents.time, "sleep", found.append)
    return found


@pytest.fixture
def network(monkeypatch):
    """There is one."""
    monkeypatch.setattr(documents, "find_network", lambda address: None)


@pytest.mark.usefixtures("network")
def test_c4_is_streamed_and_goes_on_after_failures(monkeypatch, pauses, capsys):
    """No document is lost or comes twice. Pauses grow while nothing comes, and begin anew then."""
    refused, forbidden = (0, ConnectionError("refused")), (0, OSError("403"))
    cut, limited = (4, EOFError()), (4, TimeoutError("429\nmore"))
    hub = Hub([refused, forbidden, cut, limited])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    validation, first, *others = documents.sources("c4")
    assert validation.held_out and not first.held_out and len(others) == 1023
    assert list(first.read()) == [f"en/c4-train.00000-of-01024.json.gz {i}" for i in range(10)]
    assert pauses == [1, 2, 1, 2] and hub.attempts == 5
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "data c4: refused; trying again in 1 s"
    assert said[3] == "data c4: 429; trying again in 2 s"


@pytest.mark.usefixtures("network")
def test_c4_gives_up_in_the_end(monkeypatch, pauses):
    hub = Hub([(0, ConnectionError("no route"))] * 99)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(OSError, match="data c4: no route .attempt 11, the last"):
        next(documents.sources("c4")[0].read())
    assert pauses == list(documents.PAUSES)


@pytest.mark.parametrize("is_offline", [False, True])
def test_without_a_network_c4_gives_up_at_once_and_says_what_works(
    monkeypatch, pauses, capsys, is_offline
):
    """Three attempts, three seconds. A switch of Hugging Face's library counts as none."""
    documents.find_network.cache_clear()
    hub = Hub([])
    hub.config = SimpleNamespace(HF_HUB_OFFLINE=is_offline, HF_ENDPOINT="http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(OSError, match="--data stdlib or --data PATH") as error:
        next(documents.sources("c4")[0].read())
    why = "HF_HUB_OFFLINE is set" if is_offline else "no connection to http://127.0.0.1:9"
    assert f"data c4: {why} (attempt 3, the last); without a network" in str(error.value)
    assert pauses == [1, 2] and hub.attempts == 0
    pauses.clear()
    with pytest.raises(OSError, match="attempt 2, the last"):
        next(documents.sources("c4", first_pauses=[5])[0].read())
    assert pauses == [5]


def test_a_network_that_goes_away_is_waited_for(monkeypatch, pauses):
    """It is looked for until it was there once."""
    answers = [requests.exceptions.ConnectTimeout(), requests.exceptions.SSLError()]

    def head(address, timeout):
        raise answers.pop(0)

    documents.find_network.cache_clear()
    monkeypatch.setattr(requests, "head", head)
    monkeypatch.setitem(sys.modules, "datasets", Hub([(3, ConnectionError("gone"))] * 5))
    assert len(list(documents.sources("c4")[0].read())) == 10
    assert pauses == [1, 1, 2, 5, 10, 30] and not answers
    documents.find_network.cache_clear()


@pytest.mark.parametrize("error", [command.Stop(2), TypeError()])
def test_neither_a_signal_nor_a_mistake_is_a_failure_of_the_network(pauses, error):
    def read():
        raise error
        yield

    with pytest.raises(type(error)):
        list(documents.patient(read))
    assert pauses == []
