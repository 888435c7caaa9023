"""Ids and back, GPT-2's vocabulary cut short, and vocabularies of the package `tokenizers`."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache, partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from conftest import AS_A_USER
from hypothesis import given
from hypothesis import strategies as st
from sample_text import CACHE, needs_vocabulary, serving, write_text

import data
from text import tokenizer
from text.encoding import NONE, encode
from text.workers import Workers

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
BYTES = tokenizer.tokenizer("bytes")
WORK = partial(encode, largest=NONE)  # of workers: nothing is held out


@pytest.fixture
def vocabulary(monkeypatch):
    if CACHE.exists():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))


@given(TEXT)
def test_bytes_decode_what_they_encode(s):
    ids = BYTES.encode(s)
    assert BYTES.decode(ids) == s and ids.dtype == np.uint16
    assert BYTES.end_of_text not in ids


@needs_vocabulary
def test_gpt2_cut_to_any_size_decodes_what_it_encodes(vocabulary):
    """Its merges are the first of the whole vocabulary; without a later one, ids are the same."""
    whole = tokenizer.tokenizer("gpt2", 50_257)
    assert (whole.vocab_size, whole.end_of_text) == (50_257, 50_256)
    assert list(whole.encode("Hello world")) == [15496, 995]  # as GPT-2 has it
    text = "The quick brown fox, naïve 中文 \n\n\t<|endoftext|> 12345 xyzzy" * 3
    for size in (0, 257, 1000, 32_000, 50_257):
        cut = tokenizer.tokenizer("gpt2", size)
        ids = cut.encode(text)
        assert cut.vocab_size == (size or 32_000) and cut.end_of_text == cut.vocab_size - 1
        assert ids.dtype == np.uint16 and ids.max() < cut.end_of_text and cut.decode(ids) == text
        common = " the"
        same = whole.encode(common)
        if same.max() < cut.end_of_text:
            np.testing.assert_array_equal(cut.encode(common), same)
    lengths = [len(tokenizer.tokenizer("gpt2", size).encode(text)) for size in (257, 1000, 32_000)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 2 * lengths[2]


@needs_vocabulary
@given(s=TEXT)
def test_gpt2_takes_any_text(s):
    with pytest.MonkeyPatch.context() as patch:
        if CACHE.exists():
            patch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))
        cut = tokenizer.tokenizer("gpt2")
    assert cut.decode(cut.encode(s)) == s


WORDS = [
    "they're",
    "'ll ",
    "1234",
    "a",
    "é",
    "中",
    "!?",
    " ",
    "  ",
    "\t",
    "\n\n",
    "\u3000",
    "\u0301",
]


@needs_vocabulary
@given(st.lists(st.sampled_from(WORDS) | TEXT).map("".join))
def test_gpt2_as_a_whole_has_the_ids_of_tiktoken(s):
    """Its pattern is written in another way, and cuts a text at the same places."""
    with pytest.MonkeyPatch.context() as patch:
        if CACHE.exists():
            patch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))
        whole = tokenizer.tokenizer("gpt2", 50_257)
        assert whole.encode(s).tolist() == tokenizer.gpt2().encode_ordinary(s)


def test_a_vocabulary_is_cut_to_merges_and_end_of_text(monkeypatch):
    """Of one with a single merge: 257 ids have no room for it; of 258 it is the last but one."""
    ranks = {bytes([i]): i for i in range(256)} | {b" t": 256}
    small = tokenizer.tiktoken.Encoding(
        "small", pat_str=r" ?\w+|\s+", mergeable_ranks=ranks, special_tokens={}
    )
    monkeypatch.setattr(tokenizer, "gpt2", lambda: small)
    for size, expected in ((257, [32, 116]), (258, [256])):
        cut = tokenizer.tokenizer("gpt2", size)
        assert cut.encode(" t").tolist() == expected and cut.end_of_text == size - 1
        assert cut.decode([*expected, 32, 116]) == " t t"
    assert len(cut.encode("")) == 0
    long = "\n" * 1_000_000 + "x"  # more than GPT-2's pattern takes at once
    assert cut.decode(cut.encode(long)) == long


def test_without_a_network_it_is_said_how_to_provide_the_vocabulary(monkeypatch, tmp_path):
    tokenizer.gpt2.cache_clear()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer.tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(
        ValueError, match="set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has it"
    ) as error:
        tokenizer.tokenizer("gpt2")
    tokenizer.gpt2.cache_clear()
    assert "\n" not in str(error.value)


def test_without_a_network_the_reason_is_short_and_what_works_is_named(monkeypatch, tmp_path):
    tokenizer.gpt2.cache_clear()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer.tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tokenizer.tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(ValueError, match="cannot be fetched .no connection to its server.;") as e:
        tokenizer.tokenizer("gpt2")
    assert "train.py --model tiny and --tokenizer bytes need no network" in str(e.value)


@needs_vocabulary
def test_a_tokenizer_is_made_once(vocabulary):
    """Every run of a grid asks for it."""
    assert tokenizer.tokenizer("gpt2", 300) is tokenizer.tokenizer("gpt2", 300)
    assert tokenizer.tokenizer("bytes") is tokenizer.tokenizer("bytes", 256)


@pytest.mark.parametrize(
    "bad", [("gpt2", 256), ("gpt2", 50_258), ("gpt2", -1), ("words", 0), ("", 0), ("bytes", 300)]
)
def test_bad_tokenizers_are_refused(bad):
    with pytest.raises(ValueError, match="bytes|257 to 50257"):
        tokenizer.tokenizer(*bad)


# ---- vocabularies of the package `tokenizers` ---------------------------------------------------

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="the package tokenizers, which is optional, is not installed",
)

BLANK = "\u2581"  # how T5's pieces write a blank
NO_TEXT = ["<pad>", "</s>", "<unk>", "<extra_id_1>", "<extra_id_0>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:/<>_|[]SEP"
BLANKS = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "always"}
FIRST = {"Sequence": {"id": "A", "type_id": 0}}
ENDED = {  # the package would add </s> to each text
    "type": "TemplateProcessing",
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
    ],
    "pair": [FIRST, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
}
# The package would cut each text off after so many ids.
SHORT = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}


def t5_like():
    """A file as T5's is built: a piece has a log probability; the last two pieces are no text."""
    pieces = [BLANK, f"{BLANK}the", f"{BLANK}of", "ing", *LETTERS]
    vocab = [[piece, 0.0] for piece in NO_TEXT[:3]]
    for number, piece in enumerate(pieces):
        vocab.append([piece, -2.0 - number / 10])
    vocab += [[piece, 0.0] for piece in NO_TEXT[3:]]
    added = []
    for number, (piece, _) in enumerate(vocab):
        if piece in NO_TEXT:
            switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": number, "content": piece, "special": True} | switches)
    words = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, BLANKS]}
    return {
        "version": "1.0",
        "truncation": SHORT,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": words,
        "post_processor": ENDED,
        "decoder": BLANKS,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": vocab},
    }


def gpt2_like(dropout=None):
    """A file as GPT-2's is built: all bytes and a merge. A run of blanks is an added piece."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    vocab |= {"th": 256, "<|endoftext|>": 257}
    made = Tokenizer(models.BPE(vocab, [("t", "h")], dropout=dropout))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|pad|>"])
    made.add_tokens(["    "])
    return json.loads(made.to_str())


def bert_like():
    """A file with a piece for each of a few words. The last of its pieces is that of all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"[SEP]": 0, "the": 1, "a": 2, "[UNK]": 3}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[UNK]", "[SEP]"])
    return json.loads(made.to_str())


LIKE = [t5_like, gpt2_like, bert_like]


@cache
def made(like):
    """The tokenizer of such a file."""
    return tokenizer.read_tokenizer("x.json", "x.json", json.dumps(like()).encode(), 0)


def write(path, content):
    """The path of a file with this content, as a str."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "small.json", t5_like())


# ---- its ids


@needs_library
def test_ids_are_the_most_probable_pieces_and_the_text_comes_back(path):
    """Nothing is added in front or behind; the file's limit of 9 ids is none."""
    tok = tokenizer.tokenizer(path)
    vocab = [piece for piece, _ in t5_like()["model"]["vocab"]]
    text = "the king of the of of of of of hall"
    ids = tok.encode(text)
    assert ids.dtype == np.uint16 and len(ids) > 9
    pieces = [vocab[i] for i in ids]
    assert pieces[:4] == [f"{BLANK}the", BLANK, "k", "ing"]
    assert "".join(pieces).replace(BLANK, " ") == " " + text
    assert tok.decode(ids) == text
    assert len(tok.encode("")) == 0 and tok.encode("").dtype == np.uint16


@needs_library
def test_t5_forgets_white_space_and_unknown_characters(path):
    tok = tokenizer.tokenizer(path)
    assert tok.decode(tok.encode("of\n\n  the \u00e9")) == "of the <unk>"


@needs_library
@pytest.mark.parametrize("like", LIKE)
@given(text=st.text(st.sampled_from("the a[]\n\u00e9 ")) | st.text("t h"))
def test_ids_are_those_of_the_package(like, text):
    """Where no name of a special piece is in the text, and no limit in the file."""
    from tokenizers import Tokenizer

    content = like() | {"truncation": None}
    whole = Tokenizer.from_str(json.dumps(content))
    expected = whole.encode(text, add_special_tokens=False).ids
    assert made(like).encode(text).tolist() == expected


NAMES = ["</s>", "<|endoftext|>", "[SEP]", "<extra_id_0>", "<unk>"]


@needs_library
@pytest.mark.parametrize("like", LIKE)
@given(words=st.lists(st.sampled_from([*NAMES, "the", " ", "a"])))
def test_no_text_ends_a_document(like, words):
    """The name of a piece that is no text is letters like all others. All ids are below V."""
    tok = made(like)
    for text in ("".join(words), " ".join(words)):
        ids = tok.encode(text)
        assert tok.end_of_text not in ids and ids.max(initial=0) < tok.vocab_size
        if like is gpt2_like:
            assert tok.decode(ids) == text
        if like is t5_like:  # all of these letters are known, so only white space is forgotten
            assert tok.decode(ids).replace(" ", "") == text.replace(" ", "")
            assert 2 not in ids


@needs_library
def test_the_package_alone_would_end_a_document_there():
    """Its switch for this is not enough: such a piece is the most probable one of T5's models."""
    from tokenizers import Tokenizer

    whole = Tokenizer.from_str(json.dumps(t5_like()))
    for is_text in (False, True):
        whole.encode_special_tokens = is_text
        assert 1 in whole.encode("the</s>a", add_special_tokens=False).ids


@needs_library
def test_added_pieces_that_are_text_stay():
    """The run of blanks has the last of the ids; the one before is no text."""
    tok = made(gpt2_like)
    assert tok.encode("a    a").tolist()[1] == 259 and tok.vocab_size == 260


@needs_library
def test_a_text_has_the_same_ids_each_time():
    """A file may ask for merges to be left out at random, for a training that is not ours."""
    content = json.dumps(gpt2_like(dropout=0.5)).encode()
    tok = tokenizer.read_tokenizer("x.json", "x.json", content, 0)
    assert tok.encode("th" * 100).tolist() == [256] * 100


@needs_library
def test_long_texts_are_encoded_in_pieces(monkeypatch):
    """Cut before a blank, words stay as they are. A text without any comes back all the same."""
    text = "the king of the hall " * 50
    whole = {like: made(like).encode(text) for like in LIKE}
    monkeypatch.setattr(tokenizer, "ENCODED_AT_ONCE", 30)
    for like in LIKE:
        np.testing.assert_array_equal(made(like).encode(text), whole[like])
    for unbroken in ("x" * 1000, " " * 1000, " " + "x" * 100):
        assert made(gpt2_like).decode(made(gpt2_like).encode(unbroken)) == unbroken
        pieces = tokenizer.cut_at_blanks(unbroken)
        assert "".join(pieces) == unbroken and max(map(len, pieces)) <= 30
        assert len(pieces) <= len(unbroken) / 29 + 2
    assert tokenizer.cut_at_blanks("") == [""]


@needs_library
def test_a_million_characters_without_a_blank():
    tok = made(gpt2_like)
    assert len(tok.encode("a" * 1_000_000)) == 1_000_000


# ---- sizes and names -----------------------------------------------------------------------------


@needs_library
def test_a_file_has_as_many_ids_as_its_text(path):
    """T5's last ids are no text, and are left out. A larger vocabulary has ids without a piece."""
    least = len(t5_like()["model"]["vocab"]) - 2
    tok = tokenizer.tokenizer(path)
    assert (tok.vocab_size, tok.end_of_text) == (least, 1)
    for size in (least + 1, 2**16):
        larger = tokenizer.tokenizer(path, size)
        assert larger.vocab_size == size
    assert larger.decode([3, 4, size - 1]) == tok.decode([3, 4])
    for size in (least - 1, -1, 2**16 + 1):
        with pytest.raises(ValueError, match=f"size is {size}; .* has {least} ids, and up to 655"):
            tokenizer.tokenizer(path, size)
    assert made(bert_like).vocab_size == 4  # the last id is that of unknown words


@needs_library
def test_ids_that_do_not_fit_into_16_bits_are_refused():
    content = t5_like()
    for number in range(2**16):
        content["model"]["vocab"].append([f"{BLANK}{number}", -20.0])
    with pytest.raises(ValueError, match="ids; valid are 65536 at most"):
        tokenizer.read_tokenizer("x.json", "x.json", json.dumps(content).encode(), 0)


@needs_library
def test_the_piece_that_ends_a_document_has_one_of_the_usual_names():
    ends = {like: made(like).end_of_text for like in LIKE}
    assert ends == {t5_like: 1, gpt2_like: 257, bert_like: 0}
    content = json.dumps(bert_like()).replace("[SEP]", "[end]").encode()
    with pytest.raises(ValueError, match="tokenizer x.json: it has no piece that ends .*</s>"):
        tokenizer.read_tokenizer("x.json", "x.json", content, 0)


@needs_library
def test_a_file_that_has_changed_is_another_vocabulary(path):
    """So its token files are in another folder; a flag with a digest finds the very same file."""
    tok = tokenizer.tokenizer(path)
    again = tokenizer.tokenizer(tok.flag, tok.vocab_size)
    assert again[:5] == tok[:5] and tok.flag.startswith(f"{path}#") and "/" not in tok.name
    write(Path(path), t5_like() | {"normalizer": {"type": "Lowercase"}})
    with pytest.raises(ValueError, match="small.json is not the same file any more: it has"):
        tokenizer.tokenizer(tok.flag, tok.vocab_size)
    assert tokenizer.tokenizer(path).name != tok.name


@needs_library
def test_a_name_may_have_the_sign_that_stands_before_a_digest(tmp_path):
    path = write(tmp_path / "c#.json", t5_like())
    tok = tokenizer.tokenizer(path)
    assert tokenizer.tokenizer(tok.flag).name == tok.name


@needs_library
@pytest.mark.parametrize("content", ["", "{}", "[1]", "\0", '{"model": {"type": "Unigram"}}'])
def test_what_is_no_vocabulary_is_said_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert data.main(["stdlib", "--tokenizer", str(path)]) == 2
    err = capsys.readouterr().err
    assert "bad.json: it is no vocabulary that the package" in err and err.count("\n") == 1


@needs_library
@pytest.mark.parametrize("name", ["no.json", "folder.json", "x" * 300 + ".json"])
def test_a_file_that_is_missing_is_said_in_one_line(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("folder.json").mkdir()
    assert data.main(["stdlib", "--tokenizer", name]) == 2
    err = capsys.readouterr().err
    assert f"tokenizer {name}: there is no such file" in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["t5", "vocabulary.json"])
def test_without_the_package_it_is_said_how_to_get_it(capsys, monkeypatch, name):
    """Nothing is downloaded before, and no file is looked for."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # its import fails
    assert data.main(["stdlib", "--tokenizer", name]) == 2
    expected = f"tokenizer {name} needs the package tokenizers: pip install tokenizers\n"
    assert capsys.readouterr().err == f"data.py: {expected}"


# ---- token files ---------------------------------------------------------------------------------


@needs_library
def test_token_files_hold_ids_with_an_end_and_count_the_bytes_of_the_text(tmp_path, path):
    """The text's own bytes, also those that T5 forgets. The folder is another one where V is."""
    documents = [f"the   \u00e9 king</s>\n\n {n}\n\n" for n in range(30)]
    rows = [json.dumps({"text": text}) + "\n" for text in documents]
    corpus = tmp_path / "text.jsonl"
    corpus.write_text("".join(rows), encoding="utf-8")
    for size in (0, 300):
        tok = tokenizer.tokenizer(path, size)
        found = data.prepare(str(corpus), tok, 4, folder=tmp_path / "data")
        meta = found.meta
        assert meta["train_bytes"] + meta["val_bytes"] == len("".join(documents).encode())
        sides = {"train": found.train[0][:], "val": found.val[:]}
        for side, ids in sides.items():
            assert (ids == tok.end_of_text).sum() == meta[f"{side}_documents"]
            assert len(ids) == meta[f"{side}_tokens"]
    assert len(list(tmp_path.glob("data/text-small-*"))) == 2


@needs_library
def test_workers_make_the_tokenizer_again(path):
    """By its file. They have its ids and one thread each, and none says a word about processes."""
    tok = tokenizer.tokenizer(path)
    chunks = [[f"the king {n}", "of</s>"] for n in range(20)]
    with Workers(tok, 2) as workers:
        for chunk, sides in zip(chunks, workers.map(WORK, chunks), strict=True):
            np.testing.assert_array_equal(sides["train"].ids, WORK(tok, chunk)["train"].ids)
        if sys.platform == "linux":
            threads = workers.pool.submit(os.listdir, "/proc/self/task").result()
            assert len(threads) == 2  # one waits for the end of the parent
    write(Path(path), t5_like() | {"normalizer": {"type": "Lowercase"}})
    with Workers(tok, 1) as workers, pytest.raises(ValueError, match="not the same file any more"):
        list(workers.map(WORK, chunks))


# ---- t5 ------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """A Hugging Face that has nothing but T5's vocabulary. It notes what it is asked for."""

    asked = []

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.asked.append(self.path)
        is_there = self.path == "/google-t5/t5-base/resolve/main/tokenizer.json"
        body = json.dumps(t5_like()).encode() if is_there else b"{}"
        self.send_response(200 if is_there else 404)
        for name, value in {"ETag": '"2"', "X-Repo-Commit": "1" * 40}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    with serving(Hub) as address:
        yield address


@needs_library
def test_t5_is_downloaded_once_and_tokenizes_by_many_processes(hub, tmp_path):
    """The second command, with a shorter text and without a network, finds the vocabulary kept."""
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    for address, count in ((hub, 1100), ("http://127.0.0.1:9", 20)):
        documents = [f"{number} {'the ' * 1030}\n\n" for number in range(count)]
        text = write_text(tmp_path / f"{count}.txt", documents)
        command = [sys.executable, data.__file__, text, "--tokenizer", "t5"]
        environment = AS_A_USER | home | {"HF_ENDPOINT": address}
        pipes = {"capture_output": True, "text": True, "timeout": 200}
        done = subprocess.run(command, cwd=tmp_path, env=environment, **pipes)
        assert done.returncode == 0, done.stderr
        assert f"{count * 19 // 20:,} documents" in done.stdout
        assert "TOKENIZERS_PARALLELISM" not in done.stderr and "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("data/*-t5-*"))) == 2
    asked = [name for name in Hub.asked if "t5-base" in name]
    assert len(asked) == 2  # which file is there, and the file


@needs_library
def test_workers_need_no_network_for_t5(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(tokenizer, "t5_file", lambda: path)
    tok = tokenizer.tokenizer("t5")
    assert tok.name.startswith("t5-") and tok.flag.startswith("t5#")
    with Workers(tok, 1) as workers:
        (sides,) = workers.map(WORK, [["the king"]])
    np.testing.assert_array_equal(sides["train"].ids[:-1], tok.encode("the king"))


@needs_library
@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_it_is_said_how_to_provide_t5(tmp_path, offline):
    environment = AS_A_USER | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    command = [sys.executable, data.__file__, "stdlib", "--tokenizer", "t5"]
    pipes = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **pipes)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    reason = ["no connection to http", "HF_HUB_OFFLINE is set"][int(offline)]
    assert f"its vocabulary cannot be fetched ({reason}" in done.stderr
    assert "set HF_HOME to a folder" in done.stderr and "--tokenizer FILE.json" in done.stderr
