"""Text in and out: the tokenizer of a checkpoint, its chat template, and text that streams.

`Tokenizer` reads tokenizer.json, tokenizer_config.json and chat_template.jinja. A template is a program written by
whoever made the checkpoint: it runs in jinja2's sandbox, sees nothing but the messages, and whatever goes wrong in it
is the caller's one-line `RequestError`.

`StreamDecoder` turns tokens into text as they come. It gives out only what later tokens cannot change: a character
whose bytes are spread over several tokens waits for its last one, and text that may be the start of a stop string
waits until it is one or is not. So the pieces, joined, are the text of all tokens decoded at once.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from .errors import CheckpointError, RequestError

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are not yet, or never, a character
_LONGEST_CHARACTER_BYTES = 4
_WINDOW_TOKENS = 48  # beyond this many tokens without a safe cut, one is looked for


class Tokenizer:
    """The tokenizer of a checkpoint, with its chat template."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        add_bos_token: bool | None = None,
    ) -> None:
        """special_tokens: name in templates (`bos_token`, …) → text; chat_templates: name → jinja source, the usual
        one under "default"; add_bos_token: what tokenizer_config.json says, None when it is silent."""
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        self._add_bos_token = add_bos_token
        self._compiled: dict[str, jinja2.Template] = {}  # a template compiles once, in tens of milliseconds

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer files of a checkpoint directory.

        Raises: CheckpointError when tokenizer.json is missing or a file does not parse.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file}: expected the tokenizer of the checkpoint, found no such file")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises the bare class
            raise CheckpointError(f"{file}: not a tokenizer that can be read: {_one_line(error)}") from None
        config = _read_config(directory / "tokenizer_config.json")
        templates = _templates(config.get("chat_template"), directory)
        special = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        add_bos = config.get("add_bos_token")
        return cls(
            tokenizer,
            special_tokens={name: text for name, text in special.items() if text is not None},
            chat_templates=templates,
            add_bos_token=add_bos if isinstance(add_bos, bool) else None,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, or None."""
        return self.special_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, or None."""
        return self.special_token_id("eos_token")

    @property
    def chat_template_names(self) -> tuple[str, ...]:
        """Names of the chat templates; empty when the checkpoint has none."""
        return tuple(self._chat_templates)

    def special_token_id(self, name: str) -> int | None:
        """Id of a token that tokenizer_config.json names, such as "pad_token"; None when it names none."""
        text = self._special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def token_id(self, text: str) -> int | None:
        """Id of the token with exactly this text, or None."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. With add_special_tokens, what the checkpoint puts around one is added (its bos).

        Raises: RequestError when the text holds a lone surrogate, which no UTF-8 can write.
        """
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError("prompt: expected Unicode text, came half of a surrogate pair")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and self._add_bos_token is not None:
            plain: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            has_bos = len(ids) > len(plain) and ids[0] == bos
            if self._add_bos_token and not has_bos:
                return [bos, *ids]
            if has_bos and not self._add_bos_token:
                return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no character become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str = "default",
        **template_variables: Any,
    ) -> str:
        """The conversation as the text that the model was trained on; encode it with add_special_tokens=False.

        messages: each with "role" and "content"; add_generation_prompt: end with the opening of the assistant's turn;
        template: which one, where the checkpoint has several; template_variables: what else the template reads
        (tools=…, enable_thinking=…).

        Raises: RequestError when there is no such template, no message, or the template refuses the messages.
        """
        source = self._chat_templates.get(template)
        if source is None:
            known = ", ".join(self._chat_templates) or "none"
            raise RequestError(f"chat template {template!r}: not in the checkpoint, which has: {known}")
        if not messages:
            raise RequestError("messages: expected at least one, came none")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f'messages[{index}]: expected an object with "role" and "content", came {message!r}')
        variables = {"tools": None, "documents": None, **self._special_tokens, **template_variables}
        try:
            if template not in self._compiled:
                self._compiled[template] = _environment().from_string(source)
            return self._compiled[template].render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # a template is a foreign program: it may raise anything
            raise RequestError(f"chat template {template!r}: {_one_line(error)}") from None


class StreamDecoder:
    """Text of one growing sequence of tokens. It ends at the stop string that is complete first."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # tokens since the last cut but one: spacing of a token depends on the one before
        self._cut = 0  # how many of them have been given out for good
        self._shown_chars = 0  # characters of the window's text that left it
        self._held = ""  # text that may be the start of a stop string
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None while there was none. Nothing comes out after it."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Take one token; returns the text that is now certain, often "" and never any of a stop string."""
        if self._stopped is not None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = len(text) - _unfinished_chars(text)
        new = text[self._shown_chars : certain]
        self._shown_chars = max(self._shown_chars, certain)
        if certain == len(text) and new:
            self._cut_at(len(self._window))
        elif len(self._window) - self._cut > _WINDOW_TOKENS:
            self._cut_inside(text)
        return self._release(new)

    def finish(self) -> str:
        """The text that was held back, once no more tokens come."""
        if self._stopped is not None:
            return ""
        new = self._decode(self._window)[self._shown_chars :]
        text = self._release(new) + self._held
        self._window, self._cut, self._shown_chars, self._held = [], 0, 0, ""
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _cut_at(self, place: int) -> None:
        """Forget all tokens but those after the last cut, which give the next one its spacing."""
        self._window = self._window[self._cut :]
        self._cut = place - self._cut
        self._shown_chars = len(self._decode(self._window[: self._cut]))

    def _cut_inside(self, text: str) -> None:
        """Find a cut in a long run of broken bytes, which would be decoded again in full for every token.

        A cut is safe where both sides, decoded alone, give the same text, and the right one is longer than any
        character is.
        """
        shown = self._shown_chars
        latest = len(self._window) - 2 * _LONGEST_CHARACTER_BYTES
        for place in range(latest, latest - _LONGEST_CHARACTER_BYTES, -1):
            left = self._decode(self._window[:place])
            if left + self._decode(self._window[place:]) == text and len(left) <= shown:
                self._window, self._cut, self._shown_chars = self._window[place:], 0, shown - len(left)
                return

    def _release(self, new: str) -> str:
        """Add text to what is held and return what cannot belong to a stop string."""
        text = self._held + new
        ends = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            _, start, self._stopped = min(ends)
            self._held = ""
            return text[:start]
        keep = _stop_start_chars(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _unfinished_chars(text: str) -> int:
    """How many characters at the end may still turn into others: bytes of one character, so at most three."""
    trailing = len(text) - len(text.rstrip(_UNFINISHED))
    return min(trailing, _LONGEST_CHARACTER_BYTES - 1)


def _stop_start_chars(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is the start of a stop string."""
    longest = max((len(stop) for stop in stops), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file}: not JSON: {_one_line(error)}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(config).__name__}")
    return config


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8: {_one_line(error)}") from None


def _templates(entry: object, directory: Path) -> dict[str, str]:
    """Chat templates by name: one string, or a list of {name, template}; a file of its own goes before both."""
    templates: dict[str, str] = {}
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        for item in entry:
            if not (
                isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
            ):
                raise CheckpointError(
                    f"{directory / 'tokenizer_config.json'}: chat_template: expected name and template, found {item!r}"
                )
            templates[item["name"]] = item["template"]
    elif entry is not None:
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: chat_template: expected a string or a list, "
            f"found {type(entry).__name__}"
        )
    own = directory / "chat_template.jinja"
    if own.is_file():
        templates["default"] = _read_text(own)
    for file in sorted(directory.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _token_text(value: object) -> str | None:
    """A special token is written as its text, or as an object whose "content" is the text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that published templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes < > & ' for web pages; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
