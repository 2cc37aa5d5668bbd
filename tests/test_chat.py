"""The tokenizer of a directory, chat templates in their sandbox, and text that streams."""

from __future__ import annotations

import json
import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nemotron_mamba2.chat import StreamDecoder, Tokenizer
from nemotron_mamba2.errors import CheckpointError, RequestError

BOS, EOS, TURN = "<s>", "</s>", "<|turn|>"


def byte_level(*, adds_bos=False):
    """A byte-level BPE tokenizer, as the real checkpoints have: 256 bytes, a few merges, three special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[BOS, EOS, TURN],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["In the beginning was the word, and the word was good. " * 4], trainer)
    if adds_bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return tokenizer


BYTE_LEVEL = Tokenizer(byte_level(), special_tokens={"bos_token": BOS, "eos_token": EOS})


def tokens_of(data: bytes) -> list[int]:
    """One token per byte, which splits every character that is not ASCII."""
    characters = bytes_to_characters()
    return [BYTE_LEVEL.token_id(characters[byte]) for byte in data]


def bytes_to_characters():
    """GPT-2's printable stand-ins for bytes, as byte-level vocabularies spell them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def write_directory(path, *, config=None, jinja=None, adds_bos=False):
    byte_level(adds_bos=adds_bos).save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    return path


def chat(source, **options):
    options.setdefault("special_tokens", {"bos_token": BOS, "eos_token": EOS})
    return Tokenizer(byte_level(), chat_templates={"default": source}, **options)


HELLO = [{"role": "user", "content": "hello"}]


# tokenizer --------------------------------------------------------------------------------------------------------


def test_a_directory_with_tokenizer_json_alone_is_enough(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path))
    ids = tokenizer.encode("In the beginning 🐍")
    assert tokenizer.decode(ids) == "In the beginning 🐍"
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template_names == ()
    assert tokenizer.vocab_size == byte_level().get_vocab_size()


@pytest.mark.parametrize("spelling", [BOS, {"content": BOS, "lstrip": False, "special": True}])
def test_special_tokens_are_text_or_objects(tmp_path, spelling):
    config = {"bos_token": spelling, "eos_token": EOS, "pad_token": None}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, config=config))
    assert tokenizer.bos_token_id == tokenizer.token_id(BOS) == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.special_token_id("pad_token") is None


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("says", [None, False, True])
def test_bos_is_added_once_and_only_where_the_checkpoint_says(tmp_path, adds_bos, says):
    config = {"bos_token": BOS} | ({} if says is None else {"add_bos_token": says})
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, config=config, adds_bos=adds_bos))
    plain = tokenizer.encode("the word", add_special_tokens=False)
    expected = adds_bos if says is None else says
    assert tokenizer.encode("the word") == ([0, *plain] if expected else plain)
    assert BOS not in tokenizer.decode([0, *plain])
    assert tokenizer.decode([0, *plain], skip_special_tokens=False) == BOS + "the word"


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_files_that_do_not_parse_are_named_in_one_line(tmp_path, file, content):
    write_directory(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(file)) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match="surrogate"):
        BYTE_LEVEL.encode("a\ud83d")


# chat templates ---------------------------------------------------------------------------------------------------


def test_templates_come_as_string_list_or_file(tmp_path):
    one = write_directory(tmp_path, config={"chat_template": "one"})
    assert Tokenizer.from_directory(one).render_chat(HELLO) == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    write_directory(tmp_path, config={"chat_template": named})
    assert Tokenizer.from_directory(tmp_path).render_chat(HELLO, template="tool_use") == "three"
    write_directory(tmp_path, jinja="four")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.render_chat(HELLO) == "four"
    assert tokenizer.chat_template_names == ("default", "tool_use")


def test_a_template_sees_messages_tokens_and_variables():
    tokenizer = chat(
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message.role == 'skip' %}{% continue %}{% endif %}\n"
        "<{{ message['role'] }}>{{ message.content }}{{ eos_token }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
        "{{ ' thinking' if enable_thinking is defined and enable_thinking }}{{ ' tools' if tools }}"
    )
    messages = [{"role": "skip", "content": "x"}, *HELLO]
    text = tokenizer.render_chat(messages, enable_thinking=True, tools=[{"name": "f"}])
    assert text == f"{BOS}<user>hello{EOS}\n<assistant> thinking tools"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == f"{BOS}<user>hello{EOS}\n"


def test_json_in_templates_is_plain():
    tokenizer = chat("{{ messages[0] | tojson }}|{{ messages[0] | tojson(indent=1) }}")
    content = {"role": "user", "content": "<é & 'x'>"}
    expected = json.dumps(content, ensure_ascii=False) + "|" + json.dumps(content, ensure_ascii=False, indent=1)
    assert tokenizer.render_chat([content]) == expected


def test_the_date_and_generation_marks_render():
    tokenizer = chat("{% generation %}{{ messages[0].content }}{% endgeneration %} {{ strftime_now('%Y') }}")
    assert re.fullmatch(r"hello \d{4}", tokenizer.render_chat(HELLO))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must\nalternate') }}",
        "{% if %}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at_all }}",
        "{{ 1 // 0 }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{% include 'other' %}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_one_line(source):
    with pytest.raises(RequestError, match="chat template 'default'") as caught:
        chat(source).render_chat(HELLO)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_template_says_so():
    with pytest.raises(RequestError, match="which has: none"):
        BYTE_LEVEL.render_chat(HELLO)
    with pytest.raises(RequestError, match="which has: default"):
        chat("x").render_chat(HELLO, template="other")


@pytest.mark.parametrize("messages", [[], ["hello"], [{"content": "x"}], [{"role": 3}]])
def test_messages_of_the_wrong_form_are_refused(messages):
    with pytest.raises(RequestError, match="messages"):
        chat("x").render_chat(messages)


# streaming --------------------------------------------------------------------------------------------------------


def stream(ids, stop=()):
    decoder = StreamDecoder(BYTE_LEVEL, stop=stop)
    return [decoder.push(token) for token in ids] + [decoder.finish()], decoder


def test_a_character_waits_for_its_last_byte():
    pieces, _ = stream(tokens_of("é🐍!".encode()))
    assert pieces == ["", "é", "", "", "", "🐍", "!", ""]


def test_broken_bytes_come_out_at_the_end_at_the_latest():
    pieces, _ = stream(tokens_of(b"a\xf0\x9f"))
    assert pieces == ["a", "", "", "\ufffd"]


def test_a_stop_string_over_many_tokens_never_shows():
    pieces, decoder = stream(tokens_of(b"go on STOP never"), stop=("STOP",))
    assert "".join(pieces) == "go on "
    assert pieces[:6] == list("go on ")
    assert decoder.stopped == "STOP"


def test_what_only_began_like_a_stop_string_comes_out():
    pieces, decoder = stream(tokens_of(b"a STO"), stop=("STOP",))
    assert pieces == ["a", " ", "", "", "", "STO"]
    pieces, _ = stream(tokens_of(b"aSTSTxOP"), stop=("STOP", "TSTy"))
    assert "".join(pieces) == "aSTSTxOP"
    assert decoder.stopped is None


def test_a_stop_string_inside_an_emoji_run():
    pieces, decoder = stream(tokens_of("a🐍🛑b".encode()), stop=("🛑",))
    assert "".join(pieces) == "a🐍"
    assert decoder.stopped == "🛑"


def test_a_stop_string_of_one_merged_token():
    ids = BYTE_LEVEL.encode("was the word, and")
    assert len(ids) < len("was the word, and")
    pieces, _ = stream(ids, stop=("e wo",))
    assert "".join(pieces) == "was th"


def test_special_tokens_show_only_when_asked_for():
    ids = [*BYTE_LEVEL.encode("the"), 2, *BYTE_LEVEL.encode("word")]
    decoder = StreamDecoder(BYTE_LEVEL, skip_special_tokens=False)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == f"the{TURN}word"
    assert "".join(stream(ids)[0]) == "theword"


all_ids = st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60)
texts = st.text(max_size=30).map(lambda text: tokens_of(text.encode()))
merged = st.text(alphabet="In the beginning was 🐍é", max_size=60).map(BYTE_LEVEL.encode)
broken = st.lists(
    st.sampled_from([0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x90, 0x8D, 0xFF]), max_size=200
).map(lambda data: tokens_of(bytes(data)))


@given(st.one_of(all_ids, texts, merged, broken))
def test_the_pieces_are_the_whole(ids):
    pieces, _ = stream(ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


@given(st.one_of(texts, merged), st.lists(st.text(alphabet="the 🐍é", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(ids, stops):
    whole = BYTE_LEVEL.decode(ids)
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    pieces, decoder = stream(ids, stop=tuple(stops))
    assert "".join(pieces) == (whole[: min(ends)[1]] if ends else whole)
    assert (decoder.stopped is not None) == bool(ends)


@given(st.text(max_size=40))
def test_text_never_waits_without_a_reason(text):
    ids = tokens_of(text.encode())
    decoder = StreamDecoder(BYTE_LEVEL)
    shown = ""
    for count, token in enumerate(ids, 1):
        shown += decoder.push(token)
        whole = text.encode()[:count].decode(errors="ignore")
        assert shown == whole or text.encode()[:count].decode().endswith("\ufffd")


def test_a_long_run_of_broken_bytes_stays_cheap():
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, ids, **options):
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids, **options)

    ids = tokens_of(b"\xff\xf0\x9f" * 700)
    decoder = StreamDecoder(Counting(byte_level()))
    text = "".join(map(decoder.push, ids)) + decoder.finish()
    assert text == BYTE_LEVEL.decode(ids)
    assert decoded < 100 * len(ids)
