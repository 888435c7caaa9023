"""The text is one sequence, whatever a run reads of it, and is tokenized no further than needed."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import documents_of, write_c4, write_text

import data
from runtime.command import BadInput
from text import documents, groups, token_files
from text.encoding import hash_of

BYTES = data.tokenizer("bytes")


@pytest.fixture
def eight_files(tmp_path, monkeypatch):
    """A folder of eight files in C4's format, each large enough for a group, and one held out."""
    monkeypatch.setattr(groups, "GROUP", 1000)
    monkeypatch.setattr(token_files, "SMALL", 1000)
    monkeypatch.chdir(tmp_path)
    for i in range(8):
        write_c4(tmp_path / "c" / f"c4-train.{i}.json.gz", documents_of(2 + i % 3, seed=i))
    write_c4(tmp_path / "c" / "c4-validation.0.json.gz", documents_of(3, seed=99))
    return "c"


def texts_of(ids):
    """The documents that an array of ids holds, each of which ends with end-of-text."""
    *found, rest = BYTES.decode(ids[:]).split("\0")
    assert rest == ""
    return found


def made():
    """The numbers of the shards that are finished."""
    return sorted(int(path.stem) for path in Path("data").glob("*/*.json"))


def wait_until(condition):
    """Waits until condition() is true, half a minute at most."""
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come")


# ---- which files make a group --------------------------------------------------------------------


def source(size, held_out=False):
    return documents.Source("a", 1, size, [], None, held_out)


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=12))
def test_groups_are_files_in_order_of_so_many_bytes(files):
    """Each file in one group, if it is not held out; only the last group may have fewer bytes."""
    sources = groups.in_order([source(size, held_out) for size, held_out in files])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "GROUP", 100)
        divided = groups.divide(sources)
    held_out = sum(held_out for _, held_out in files)
    assert [n for group in divided for n in group] == list(range(held_out, len(files)))
    for group in divided[:-1]:
        sizes = [sources[n].size for n in group]
        assert sum(sizes) >= 100 and sum(sizes[:-1]) < 100


def test_a_small_corpus_is_one_group():
    """So it is shuffled as a whole, and exactly 5% of it is held out."""
    assert groups.divide([source(2**20)] * 255) == [list(range(255))]
    assert len(groups.divide([source(2**20)] * 257)) == 2
    assert groups.GROUP == token_files.SMALL


def test_each_file_of_c4_is_a_group():
    sources = groups.in_order(documents.c4())
    assert groups.divide(sources) == [[number] for number in range(1, 1025)]


# ---- the sequence --------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    context=st.integers(2, 6),
    seed=st.integers(0, 99),
)
def test_an_epoch_reads_the_groups_one_after_another(lengths, context, seed):
    """Every window of every group once: the first time in order of the groups."""
    ends = np.cumsum(lengths)
    text = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    counts = [data.windows(ids, context) for ids in text]
    total = sum(counts)
    if total == 0:
        return
    rows = data.sequences(text, context, seed, range(3 * total))
    assert (np.diff(rows) == 1).all()
    group_of = np.searchsorted(ends, rows[:, 0], side="right")
    assert group_of[:total].tolist() == np.repeat(range(len(text)), counts).tolist()
    for epoch in range(3):
        of_epoch = slice(epoch * total, (epoch + 1) * total)
        assert len(set(rows[of_epoch, 0])) == total
        changes = np.diff(group_of[of_epoch]) != 0
        assert changes.sum() == np.count_nonzero(counts) - 1  # a group is read in one go


def test_later_epochs_read_the_groups_in_other_orders():
    text = [np.arange(100 * i, 100 * i + 50) for i in range(6)]
    rows = data.sequences(text, 7, 3, range(4 * 42))[:, 0].reshape(4, 42)
    orders = [list(dict.fromkeys((epoch // 100).tolist())) for epoch in rows]
    assert orders[0] == [0, 1, 2, 3, 4, 5]
    assert all(sorted(order) == orders[0] for order in orders)
    assert len(set(map(tuple, orders))) == 4
    inside = [(epoch[epoch // 100 == 2] % 100).tolist() for epoch in rows]
    assert len(set(map(tuple, inside))) == 4
    first = [(rows[0][rows[0] // 100 == group] % 100).tolist() for group in range(6)]
    assert len(set(map(tuple, first))) == 6


def test_groups_behind_a_sequence_are_not_touched():
    class Text(list):
        def __getitem__(self, group):
            assert group < 2
            return super().__getitem__(group)

    text = Text(np.arange(100) for _ in range(4))
    assert data.sequences(text, 9, 0, range(22)).shape == (22, 10)


# ---- made as far as needed -----------------------------------------------------------------------


def test_before_a_run_the_files_are_tokenized_that_it_needs_at_once(eight_files):
    """All that is held out, and groups until there are so many tokens in windows."""
    first = sum(len(text) + 1 for text in documents_of(2, seed=0))
    in_windows = (first - 1) // 64 * 64
    for need, count in ((0, 1), (in_windows, 1), (in_windows + 1, 2), (float("inf"), 8)):
        corpus = data.prepare(eight_files, BYTES, 64, need)
        assert made() == list(range(count + 1))
        for group in range(count):
            assert texts_of(corpus.train[group]) == documents_of(2 + group % 3, seed=group)
        assert texts_of(corpus.val) == documents_of(3, seed=99)
        meta = corpus.meta
        assert (meta["train_files"], meta["val_files"], meta["later_files"]) == (
            count,
            1,
            8 - count,
        )
        assert meta["train_documents"] == sum(2 + group % 3 for group in range(count))
        assert meta["val_documents"] == 3
        assert meta["documents"] == meta["train_documents"] + 3
    assert len(list(Path("data").iterdir())) == 1


def test_the_next_group_is_made_while_one_is_read_and_no_more_than_that(eight_files):
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    time.sleep(0.5)
    assert made() == [0, 1]
    corpus.train[0]
    wait_until(lambda: made() == [0, 1, 2])
    assert texts_of(corpus.train[1]) == documents_of(3, seed=1)
    wait_until(lambda: made() == [0, 1, 2, 3])
    corpus.train.close()


def test_what_will_not_be_read_is_not_made(eight_files):
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=100)
    corpus.train[0]
    time.sleep(0.5)
    assert not corpus.train.makers and made() == [0, 1]


def test_a_longer_run_begins_with_the_batches_of_a_shorter_one(eight_files):
    """Though the one has made two groups and the other all; and the hashes are the same."""
    long = data.prepare(eight_files, BYTES, 64)
    expected = data.sequences(long.train, 64, 5, range(3000))
    for path in Path("data").glob("*/*"):
        path.unlink()
    short = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    for first in range(0, 3000, 100):
        found = data.sequences(short.train, 64, 5, range(first, first + 100))
        np.testing.assert_array_equal(found, expected[first : first + 100])
    assert len(short.train.hashes) > 2
    assert short.train.hashes.items() <= long.train.hashes.items()
    assert len(set(long.train.hashes.values())) == 8
    short.train.close()


def test_where_no_file_is_held_out_later_groups_do_not_change_validation(tmp_path, monkeypatch):
    """It is of the first groups that have a window of it; here of the first three of forty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(groups, "GROUP", 1000)
    monkeypatch.setattr(token_files, "SMALL", 1000)
    Path("c").mkdir()
    texts = [documents_of(1, seed=i) for i in range(40)]
    limit = sorted(hash_of(text) for (text,) in texts)[3]
    monkeypatch.setattr(token_files.Holdout, "compute", lambda *_: limit)
    for i, documents_of_file in enumerate(texts):
        write_text(Path("c") / f"{i:02}.txt", documents_of_file)
    held_out = [text for (text,) in texts if hash_of(text) <= limit]
    assert len(held_out) == 4
    few = data.prepare("c", BYTES, 64, 0)
    assert texts_of(few.val) == held_out[:1]
    every = data.prepare("c", BYTES, 64)
    assert texts_of(every.val) == held_out[:1]
    assert every.meta["sha256"]["val"] == few.meta["sha256"]["val"]
    trained_on = [text for group in range(40) for text in texts_of(every.train[group])]
    assert sorted(trained_on + held_out) == sorted(text for (text,) in texts)


# ---- the maker -----------------------------------------------------------------------------------


def test_a_maker_that_is_killed_is_said_and_another_one_goes_on(eight_files):
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    wait = groups.Maker.wait

    def kill_and_wait(maker):
        os.kill(maker.process.pid, signal.SIGKILL)
        wait(maker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups.Maker, "wait", kill_and_wait)
        with pytest.raises(OSError, match="the process that tokenizes has ended"):
            corpus.train[1]
    assert texts_of(corpus.train[1]) == documents_of(3, seed=1)
    corpus.train.close()


def test_a_group_that_is_lost_after_its_maker_has_ended_is_made_again(eight_files):
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    corpus.train[0]
    corpus.train.makers[1].process.join()
    (path,) = Path("data").glob("*/00002.train.bin")
    path.unlink()
    assert texts_of(corpus.train[1]) == documents_of(3, seed=1)
    corpus.train.close()


def test_what_a_maker_has_failed_at_is_tried_again_when_it_is_needed(eight_files):
    """As where the disk was full then, and has room now."""
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    corpus.train.look_ahead(1)
    os.kill(corpus.train.makers[1].process.pid, signal.SIGKILL)
    corpus.train.makers[1].process.join()
    assert texts_of(corpus.train[1]) == documents_of(3, seed=1)
    corpus.train.close()


def test_two_threads_may_ask_for_one_group(eight_files):
    """As two runs of a grid do, whose batches are read ahead."""
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(corpus.train.__getitem__, [1, 1]))
    assert [texts_of(ids) for ids in both] == 2 * [documents_of(3, seed=1)]
    corpus.train.close()


def test_a_maker_waits_for_a_network_that_was_there_before(eight_files, monkeypatch):
    """It is a process of its own, but not the first that reads this corpus."""
    asked = []
    monkeypatch.setattr(groups.documents, "sources", lambda *args, **more: asked.append(more) or [])
    sent = []
    pipe = SimpleNamespace(send=sent.append)
    for name in ("begin", "give_way"):
        monkeypatch.setattr(groups, name, lambda: None)
    groups.make_in_process(pipe, eight_files, ("bytes", 0), Path("data/x"), [0], b"")
    assert asked == [{"first_pauses": documents.PAUSES}]
    assert "its files have changed" in str(sent[0])


def test_a_maker_does_not_say_again_what_is_left_out(eight_files, capfd):
    Path("c", "picture.png").write_bytes(b"x")
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    assert capfd.readouterr().err.count("picture.png") == 1
    assert texts_of(corpus.train[1]) == documents_of(3, seed=1)
    corpus.train.close()
    assert "picture.png" not in capfd.readouterr().err


def test_closing_ends_the_maker(eight_files):
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    corpus.train[0]
    corpus.train.close()
    assert not corpus.train.makers[1].process.is_alive()


def test_a_bad_file_is_said_when_a_run_comes_to_it(eight_files):
    Path("c", "c4-train.1.json.gz").unlink()
    Path("c", "c4-train.1.jsonl").write_text("no JSON\n" * 1000)
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    assert texts_of(corpus.train[0]) == documents_of(2, seed=0)
    for _ in range(2):  # whoever asks again is told the same
        with pytest.raises(BadInput, match="c4-train.1.jsonl: line 1 is no JSON object: "):
            corpus.train[1]
    corpus.train.close()


def test_nothing_is_made_of_a_text_that_was_closed(eight_files):
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    corpus.train.close()
    with pytest.raises(OSError, match="closed"):
        corpus.train[2]
    assert not corpus.train.makers


def test_what_is_finished_waits_for_no_other_process(eight_files, monkeypatch):
    """Such as one that works on a later group, in the same folder."""
    write_text(Path("a.txt"), documents_of(200))  # no whole file of it is held out
    for corpus in (eight_files, "a.txt"):
        data.prepare(corpus, BYTES, 64, 0)

    def locked(path):
        raise AssertionError("it waits")

    monkeypatch.setattr(token_files, "locked", locked)
    monkeypatch.setattr(groups, "locked", locked)
    for corpus in (eight_files, "a.txt"):
        data.prepare(corpus, BYTES, 64, 0)
    with pytest.raises(ValueError):
        data.prepare("a.txt", BYTES, 10**6, 0)


def test_a_corpus_that_has_changed_while_it_was_read_is_said(eight_files):
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    write_c4(Path("c", "c4-train.5.json.gz").absolute(), documents_of(9))
    with pytest.raises(BadInput, match="its files have changed"):
        corpus.train[1]


def test_a_group_that_is_damaged_is_made_again_when_it_is_read(eight_files):
    data.prepare(eight_files, BYTES, 64)
    (path,) = Path("data").glob("*/00004.train.bin")
    path.write_bytes(path.read_bytes()[::-1])
    corpus = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    assert texts_of(corpus.train[3]) == documents_of(2, seed=3)
    corpus.train.close()


def test_a_process_that_makes_nothing_waits_for_one_that_does(eight_files):
    """As those of a run on several machines do, but for the first."""
    one = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9)
    other = data.prepare(eight_files, BYTES, 64, 0, read_at_most=10**9, makes_groups=False)
    other.train[0]
    assert not other.train.makers
    one.train[0]
    assert texts_of(other.train[1]) == documents_of(3, seed=1)
    one.train.close()
    other.train.close()
    with pytest.raises(OSError, match="closed"):
        other.train[3]


def test_either_side_may_be_too_short(eight_files):
    validation = sum(len(text) + 1 for text in documents_of(3, seed=99))
    data.prepare(eight_files, BYTES, validation - 1)
    with pytest.raises(ValueError, match=f"{validation} validation tokens in"):
        data.prepare(eight_files, BYTES, validation)
    for path in Path("c").glob("c4-train*"):
        path.unlink()
    write_c4(Path("c", "a.json.gz").absolute(), ["x" * 63])
    with pytest.raises(ValueError, match="64 training tokens in 4 documents"):
        data.prepare(eight_files, BYTES, 64)
