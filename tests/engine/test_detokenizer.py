import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pagedjax.engine.detokenizer import Detokenizer
from pagedjax.engine.tokenizer import Tokenizer
from pagedjax.engine.vocabulary import Vocabulary

SPECIAL, MARK = 256, 257
WORDS = ["ab", "abc", "END", "\n\n", "é", " 🙂", "🙂"]


def byte_tokenizer(words=WORDS) -> Tokenizer:
    """Ids 0–255 are the bytes of that value, 256 is special, 257 is added and visible, then whole words."""
    alphabet = stand_ins()
    spelt = ["".join(alphabet[byte] for byte in word.encode()) for word in words]
    tokens = [*(alphabet[byte] for byte in range(256)), "<|end|>", "<mark>", *spelt]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(dict.fromkeys(tokens))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<mark>", special=False)])
    return Tokenizer(Vocabulary(backend, None, None, frozenset({SPECIAL})))


def stand_ins() -> list[str]:
    """GPT-2's letter for each byte, found by asking `tokenizers` about one character of each kind."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters: dict[int, str] = {}
    for code in [*range(0x80), *range(0x80, 0x800), *range(0x800, 0x10000, 0x40), *range(0x10000, 0x110000, 0x1000)]:
        if not 0xD800 <= code < 0xE000:
            spelt = level.pre_tokenize_str(chr(code))[0][0]
            letters |= dict(zip(chr(code).encode(), spelt, strict=True))
    unused = iter(chr(n) for n in range(0x100, 0x144) if chr(n) not in letters.values())
    return [letters[byte] if byte in letters else _latin(byte, unused) for byte in range(256)]


def _latin(byte, unused) -> str:
    # Bytes that UTF-8 never holds stand for themselves where printable.
    return chr(byte) if chr(byte).isprintable() else next(unused)


TOKENIZER = byte_tokenizer()
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
TEXTS = st.text(st.sampled_from("abcEND\n é🙂\u200dก"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abcEND\n"), min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def pieces(ids, *, size=1, **options) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, **options)
    out = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*out, detokenizer.finish()]


@given(IDS, st.booleans(), st.integers(1, 5))
def test_pieces_of_any_ids_concatenate_to_the_decoded_whole(ids, skip, size):
    assert "".join(pieces(ids, size=size, skip_special_tokens=skip)) == TOKENIZER.decode(ids, skip)


@given(IDS, STOPS)
def test_stops_that_never_come_change_nothing(ids, stop):
    whole = TOKENIZER.decode(ids)
    stop = tuple(text for text in stop if text not in whole)
    assert "".join(pieces(ids, stop=stop)) == whole


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 family", "ภาษาไทย", "naïve 你好", "e\u0301"])
def test_no_piece_ends_inside_a_character(text):
    out = pieces(list(text.encode()))
    assert "".join(out) == text
    assert "\ufffd" not in "".join(out)
    assert all(piece == "" or piece in text for piece in out)


def test_a_character_left_half_shows_only_at_the_end():
    assert pieces(list("🙂".encode()[:3])) == ["", "", "", "\ufffd"]


def test_bytes_that_are_no_text_become_replacement_characters_at_once():
    assert pieces([0xFF, ord("a")]) == ["\ufffd", "a", ""]


def test_a_half_character_survives_a_hidden_token():
    first, *rest = "é".encode()
    assert pieces([first, SPECIAL, *rest]) == ["", "", "é", ""]


def test_hidden_tokens_are_special_ones_only():
    assert "".join(pieces([MARK, SPECIAL])) == "<mark>"
    assert "".join(pieces([MARK, SPECIAL], skip_special_tokens=False)) == "<mark><|end|>"


def first_stop(text, stop):
    """Where the first complete stop string lies, by definition: (start, end, stop)."""
    ends = [(end, -len(s), s) for s in stop for end in range(len(text) + 1) if text[:end].endswith(s)]
    if not ends:
        return None
    end, negative, found = min(ends)
    return end + negative, end, found


@given(TEXTS, STOPS, st.booleans(), st.integers(1, 4))
def test_text_ends_at_the_first_complete_stop_however_tokens_fall(text, stop, include, size):
    detokenizer = Detokenizer(TOKENIZER, stop=stop, include_stop_str_in_output=include)
    ids = list(text.encode())
    out = "".join(detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)) + detokenizer.finish()
    expected = first_stop(text, stop)
    if expected is None:
        assert (out, detokenizer.stopped) == (text, None)
    else:
        start, end, found = expected
        assert (out, detokenizer.stopped) == (text[: end if include else start], found)


@given(TEXTS, STOPS)
def test_what_is_held_back_is_the_longest_possible_stop_prefix(text, stop):
    detokenizer = Detokenizer(TOKENIZER, stop=stop)
    shown = "".join(detokenizer.push([byte]) for byte in text.encode())
    if detokenizer.stopped is None:
        prefixes = [s[:n] for s in stop for n in range(len(s)) if text.endswith(s[:n])]
        assert shown == text[: len(text) - max(map(len, prefixes))]


def test_a_stop_string_inside_one_token_drops_the_rest_of_it():
    detokenizer = Detokenizer(TOKENIZER, stop=("b",))
    assert detokenizer.push([TOKENIZER.encode("x")[0], 258 + WORDS.index("abc")]) == "xa"
    assert detokenizer.stopped == "b"
    assert detokenizer.push([ord("z")]) == ""
    assert detokenizer.finish() == ""


def test_the_first_min_tokens_tokens_are_no_part_of_a_stop():
    detokenizer = Detokenizer(TOKENIZER, stop=("ab",), min_tokens=3)
    assert "".join(detokenizer.push([ord(c)]) for c in "abab") == "abab"
    assert detokenizer.stopped is None
    assert detokenizer.push([ord("a")]) == ""
    detokenizer.push([ord("b")])
    assert detokenizer.stopped == "ab"
