"""OpenAI's text_offset: where in the text each token's first new character stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.engine.detokenizer import Detokenizer
from serving.answers.offsets import TextOffsets

BOS, MARK = 0, 1
TOKENS = [
    b"<s>",
    b"<mark>",
    b"a",
    b" the",
    b"\xc3",
    b"\xa9",
    b"\xf0\x9f",
    b"\x99",
    b"\x82",
    b"\xe2\x80\x94x",
    b"\xff",
    b"",
]
IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)


class PieceTokenizer:
    vocab_size = len(TOKENS)
    special_token_ids = frozenset({BOS, MARK})

    def token_bytes(self, token_id):
        return TOKENS[token_id]

    def decode(self, token_ids, skip_special_tokens=True):
        hidden = self.special_token_ids if skip_special_tokens else ()
        return b"".join(TOKENS[i] for i in token_ids if i not in hidden).decode("utf-8", "replace")


def ids(*pieces):
    return [TOKENS.index(piece) for piece in pieces]


def offsets(skip_special_tokens=True):
    return TextOffsets(PieceTokenizer(), skip_special_tokens=skip_special_tokens)


def lengths_certain_before(token_ids, skip):
    """How long the text was before each of the tokens, as the engine gives it out."""
    detokenizer, text = Detokenizer(PieceTokenizer(), skip_special_tokens=skip), ""
    for token_id in token_ids:
        yield len(text)
        text += detokenizer.push([token_id])


@given(IDS, IDS, st.booleans())
def test_an_offset_counts_the_characters_that_the_tokens_before_made_certain(prompt_ids, token_ids, skip):
    found, prompt = offsets(skip), PieceTokenizer().decode(prompt_ids, skip_special_tokens=skip)
    of_prompt = found.of_prompt(prompt_ids, prompt, is_written=False)
    assert of_prompt == list(lengths_certain_before(prompt_ids, skip))
    assert found.of_answer(token_ids) == [len(prompt) + n for n in lengths_certain_before(token_ids, skip)]


def test_the_parts_of_one_character_share_its_offset():
    pieces = ids(b"a", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99", b"\x82", b"a")
    assert offsets().of_answer(pieces) == [0, 1, 1, 2, 2, 2, 3]


def test_offsets_go_on_from_delta_to_delta():
    found, pieces = offsets(), ids(b" the", b"\xc3", b"\xa9", b"a")
    assert [offset for piece in pieces for offset in found.of_answer([piece])] == [0, 4, 4, 5]


@pytest.mark.parametrize(("skip", "expected"), [(True, [0, 1, 1]), (False, [0, 1, 7])])
def test_a_special_token_takes_room_only_where_it_shows(skip, expected):
    assert offsets(skip).of_answer([*ids(b"a"), MARK, *ids(b"a")]) == expected


def test_in_a_written_prompt_special_tokens_show_only_where_they_were_spelt_out():
    found = offsets().of_prompt([BOS, *ids(b"a"), MARK, *ids(b"a")], "a<mark>a", is_written=True)
    assert found == [0, 0, 1, 7]


def test_an_answer_begins_behind_the_prompt_as_it_was_written():
    """A tokenizer may put a space before a text, or compose characters: its tokens are not what was written."""
    found = offsets()
    assert found.of_prompt(ids(b" the"), "the", is_written=True) == [0]
    assert found.of_answer(ids(b"a")) == [3]
