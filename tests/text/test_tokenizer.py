"""Ids and back, and GPT-2's vocabulary cut short."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_text import CACHE, needs_vocabulary

from text import tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
BYTES = tokenizer.tokenizer("bytes")


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
    "bad", [("gpt2", 256), ("gpt2", 50_258), ("gpt2", -1), ("words", 0), ("bytes", 300)]
)
def test_bad_tokenizers_are_refused(bad):
    with pytest.raises(ValueError, match="bytes|257 to 50257"):
        tokenizer.tokenizer(*bad)
