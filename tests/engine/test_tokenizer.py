import json
import time
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pagedjax.core.errors import ConfigError, RequestError
from pagedjax.engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.golden import CASES

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "1 2", "12 3", "a b"]
TOKENS = ["<|end|>", "<|im_end|>", "<mark>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
KINDS = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(TOKENS) - 3)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def write_gguf(tmp_path):
    def write(*, pre="smollm", model="gpt2", tokens=TOKENS, kinds=KINDS, merges=MERGES, template=None, **ids):
        path = tmp_path / "tokens.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        if template:
            writer.add_chat_template(template)
        for name, value in ({"eos_token_id": 0} | ids).items():
            kind = gguf.GGUFValueType.BOOL if isinstance(value, bool) else gguf.GGUFValueType.UINT32
            writer.add_key_value(f"tokenizer.ggml.{name}", value, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def texts(tokenizer, ids):
    return [tokenizer.token_text(i) for i in ids]


def test_other_threads_run_while_a_long_text_is_encoded(write_gguf):
    tokenizer = load_tokenizer(write_gguf())
    text = "the 12 ab in " * 200_000
    with ThreadPoolExecutor(1) as others:
        encoding, num_turns = others.submit(tokenizer.encode, text), 0
        while not encoding.done():
            num_turns += 1
            time.sleep(0.002)
    assert num_turns > 20
    assert len(encoding.result()) > 200_000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:20])
def test_prompt_ids_and_texts_are_those_of_the_references(smollm2, case):
    ids = smollm2.encode(case["prompt"]) if "prompt" in case else smollm2.encode_chat(case["messages"])
    assert ids == case["prompt_ids"]
    assert smollm2.decode(case["greedy_ids"]) == case["text"]


def test_the_bundled_model_ends_at_im_end(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, {2})
    assert smollm2.special_token_ids == set(range(17))


@given(text=st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn")), max_size=60))
def test_a_text_survives_encoding(smollm2, text):
    # Planes past the sixth begin with bytes that this vocabulary lacks.
    text = "".join(char for char in text if ord(char) < 0x40000)
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_decoding_equals_that_of_the_tokenizers_library(smollm2, ids, skip):
    assert smollm2.decode(ids, skip) == smollm2._backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["", "a" * 10_000, " " * 10_000, "🙂\u200d!\n1" * 2_500])
def test_long_and_empty_texts_come_back_whole(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


def test_threads_share_one_tokenizer(smollm2):
    prompts = [f"thread {i}: the quick brown fox {i * i}" for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(smollm2.encode, prompts)) == [smollm2.encode(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["in", "1", "2", "3", "4", "!", "!", " the"]),
        ("starcoder", ["in", "1", "2", "3", "4", "!", "!", " the"]),
        ("qwen2", ["in", "1", "2", "3", "4", "!", "!", " the"]),
        ("llama-bpe", ["in", "123", "4", "!", "!", " the"]),
        ("gpt-2", ["in", "123", "4", "!", "!", " the"]),
    ],
)
def test_digits_split_as_the_pre_tokenizer_says(write_gguf, pre, expected):
    tokenizer = Tokenizer.from_gguf(write_gguf(pre=pre))
    assert texts(tokenizer, tokenizer.encode("in1234!! the")) == expected


def test_llama_splits_digits_from_the_left_by_threes(write_gguf):
    tokenizer = Tokenizer.from_gguf(write_gguf(pre="llama-bpe"))
    assert texts(tokenizer, tokenizer.encode("00123"))[-2:] == ["2", "3"]
    assert texts(tokenizer, tokenizer.encode("00123"))[:3] == ["0", "0", "1"]


def test_qwen_text_is_normalised(write_gguf):
    tokenizer = Tokenizer.from_gguf(write_gguf(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_llama_adds_bos_unless_told_otherwise(write_gguf):
    ids = {"bos_token_id": 1}
    assert Tokenizer.from_gguf(write_gguf(pre="llama-bpe", **ids)).encode("a")[0] == 1
    plain = Tokenizer.from_gguf(write_gguf(pre="llama-bpe", add_bos_token=False, **ids))
    assert 1 not in plain.encode("a")


def test_bos_and_eos_go_around_a_text_only_where_asked(write_gguf):
    tokenizer = Tokenizer.from_gguf(write_gguf(bos_token_id=1, add_bos_token=True, add_eos_token=True))
    inner = tokenizer.encode("ab", add_special_tokens=False)
    assert texts(tokenizer, inner) == ["ab"]
    assert tokenizer.encode("ab") == [1, *inner, 0]


def test_control_tokens_in_a_text_become_those_tokens(write_gguf):
    tokenizer = Tokenizer.from_gguf(write_gguf())
    assert tokenizer.encode("<|end|><mark>") == [0, 2]
    assert tokenizer.decode([0, 2]) == "<mark>"


def test_every_token_that_ends_an_answer_is_known(write_gguf):
    assert Tokenizer.from_gguf(write_gguf(eot_token_id=2)).eos_token_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"pre": "tekken"}, "'tekken'; known are"),
        ({"model": "llama"}, "SentencePiece"),
        ({"model": "bert"}, "'bert'"),
        ({"kinds": [1]}, "token_type"),
        ({"merges": ["xx yy"]}, "merges"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "occur twice"),
        ({"eos_token_id": 9999}, "9999"),
    ],
)
def test_a_vocabulary_that_cannot_be_followed_is_refused_by_name(write_gguf, change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Tokenizer.from_gguf(write_gguf(**change))


def test_lone_surrogates_are_the_callers_fault(write_gguf):
    with pytest.raises(RequestError, match="character 2"):
        Tokenizer.from_gguf(write_gguf()).encode("ab\ud800")


def test_a_text_larger_than_any_tokens_of_the_context_is_refused_without_tokenising_it(write_gguf, monkeypatch):
    tokenizer = Tokenizer.from_gguf(write_gguf())
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    assert len(tokenizer.encode("a" * 3 * longest, max_len=3)) >= 3
    monkeypatch.setattr(tokenizer, "_backend", None)
    with pytest.raises(RequestError, match="3 tokens") as refusal:
        tokenizer.encode("a" * (3 * longest + 1), max_len=3)
    assert refusal.value.code == "context_length_exceeded"


def test_ids_outside_the_vocabulary_stand_for_nothing(write_gguf):
    tokenizer = Tokenizer.from_gguf(write_gguf())
    assert tokenizer.decode([-1, tokenizer.vocab_size, 2]) == "<mark>"
    assert tokenizer.token_text(tokenizer.vocab_size) == ""


def test_a_vocabulary_larger_than_the_model_is_refused(write_gguf):
    tokenizer = Tokenizer.from_gguf(write_gguf())
    tokenizer.check_fits(tokenizer.vocab_size)
    with pytest.raises(ConfigError, match="different models"):
        tokenizer.check_fits(tokenizer.vocab_size - 1)


def test_a_chat_is_rendered_by_the_models_own_template(write_gguf):
    tokenizer = Tokenizer.from_gguf(write_gguf(template=TEMPLATE))
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "user: hi<|end|>"
    assert tokenizer.encode_chat(messages) == tokenizer.encode("user: hi<|end|>", add_special_tokens=False)


def test_a_model_without_a_template_refuses_chats(write_gguf):
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_gguf(write_gguf()).apply_chat_template([])


@pytest.fixture
def hf_directory(tmp_path):
    """Writes tokenizer.json of a byte-level tokenizer that adds <s> before a text, and the files beside it."""

    def write(*, backend=None, **files):
        backend = backend or byte_level()
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, contents in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(contents))
        return tmp_path

    return write


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "h"), ("▁h", "i")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def test_a_directory_names_its_special_tokens_and_ends(hf_directory):
    tokenizer = load_tokenizer(
        hf_directory(
            tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
            generation_config={"eos_token_id": [257, 3]},
        )
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, {257, 3})
    assert tokenizer.encode("a")[0] == 256
    assert tokenizer.decode(tokenizer.encode("née\n")) == "née\n"


def test_truncation_and_padding_in_the_file_are_ignored(hf_directory):
    backend = byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)
    assert len(load_tokenizer(hf_directory(backend=backend)).encode("abcdefgh", add_special_tokens=False)) == 8


def test_sentence_piece_decodes_bytes_and_spaces(hf_directory):
    tokenizer = load_tokenizer(hf_directory(backend=sentence_piece()))
    ids = tokenizer.encode("hi 🙂 hi")
    assert texts(tokenizer, ids)[0] == " hi"
    assert tokenizer.decode(ids) == " hi 🙂 hi"


def test_a_decoder_that_is_not_bytewise_is_refused(hf_directory):
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(hf_directory(backend=backend))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer_config": {"bos_token": 5}}, "bos_token"),
        ({"tokenizer_config": {"eos_token": {"content": ["</s>"]}}}, "eos_token"),
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template"),
        ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, "chat_template"),
        ({"tokenizer_config": {"chat_template": {"default": 5}}}, "chat_template"),
        ({"chat_template": {"chat_template": ["a"]}}, "chat_template"),
        ({"generation_config": {"eos_token_id": "2"}}, "eos_token_id"),
        ({"generation_config": {"eos_token_id": [2, None]}}, "eos_token_id"),
        ({"generation_config": [2]}, "generation_config"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(hf_directory, files, named):
    with pytest.raises(ConfigError, match=named):
        load_tokenizer(hf_directory(**files))


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_cannot_be_read_is_named(hf_directory, name):
    directory = hf_directory()
    (directory / name).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{name} is not UTF-8"):
        load_tokenizer(directory)
    (directory / name).unlink()
    (directory / name).mkdir()
    with pytest.raises(ConfigError, match=f"cannot read .*{name}"):
        load_tokenizer(directory)


@pytest.mark.parametrize("place", ["jinja", "field", "named"])
def test_a_template_is_found_wherever_it_is_kept(hf_directory, place):
    entry = {"field": TEMPLATE, "named": [{"name": "default", "template": TEMPLATE}]}
    config = {"eos_token": "</s>"} | ({"chat_template": entry[place]} if place in entry else {})
    directory = hf_directory(tokenizer_config=config)
    if place == "jinja":
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    rendered = load_tokenizer(directory).apply_chat_template([{"role": "user", "content": "hi"}])
    assert rendered == "user: hi</s>"
