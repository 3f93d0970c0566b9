"""The model's tokenizer and chat template, without torch: the gateway is small.

transformers' own AutoTokenizer imports torch, so the same `tokenizer.json` is read with the `tokenizers` library, and
the chat template is rendered in an environment set up like transformers' one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from services.errors import InvalidArgument, StartError
from services.gateway.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from services.gateway.token_bytes import TokenBytes

Json = dict[str, object]


class Tokenizer:
    """Renders, encodes and decodes. Thread-safe."""

    def __init__(self, tokenizer: FastTokenizer, chat_template: str, special_tokens: dict[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab()
        self.longest_token = max(map(len, vocab), default=1)
        """Characters of the longest token; byte-level vocabularies count bytes, which are no fewer."""
        self._bytes = TokenBytes(vocab, self.decode)
        self._special_tokens = special_tokens
        self._template = _environment().from_string(chat_template) if chat_template else None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads the tokenizer of the model in `folder`. Raises StartError when there is none."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise StartError(f"{folder} has no tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        try:
            return cls(FastTokenizer.from_file(str(file)), _chat_template(folder, config), _special_tokens(config))
        except jinja2.TemplateError as error:
            raise StartError(f"{folder}: its chat template is not valid: {error}") from error
        except Exception as error:  # the library raises nothing more special for a bad file
            raise StartError(f"{file} cannot be read: {error}") from error

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt as the model sees it. Raises InvalidArgument where it cannot be rendered."""
        match prompt:
            case TokenPrompt():
                return list(prompt.token_ids)
            case TextPrompt():
                return list(self._encoding(prompt.field, prompt.text, special=True).ids)
            case ChatPrompt():
                # The template writes the special tokens itself.
                return list(self._encoding(prompt.field, self.render(prompt), special=False).ids)

    def encode_text(self, prompt: TextPrompt) -> tuple[list[int], list[int]]:
        """Token ids as `encode` gives them, and for each the complete characters of the text before it."""
        encoding = self._encoding(prompt.field, prompt.text, special=True)
        offsets: list[int] = []
        offset = end = 0
        for token_begin, token_end in encoding.offsets:
            # Some tokenizers cut the space off a word's place; a token that was added stands nowhere, at (0, 0).
            offset = max(offset, min(token_begin, end))
            offsets.append(offset)
            end = max(end, token_end)
        return list(encoding.ids), offsets

    def render(self, chat: ChatPrompt) -> str:
        """The conversation as one text, ready for the answer."""
        if self._template is None:
            raise InvalidArgument(chat.field, "this model has no chat template; send plain text")
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise InvalidArgument(chat.field, f"the chat template refuses it: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, special tokens included: the answer's text is these in a row, as far as it is valid."""
        return self._bytes[token_id]

    def _encoding(self, field: str, text: str, *, special: bool) -> Encoding:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidArgument(field, "is not valid Unicode text") from None
        return self._tokenizer.encode(text, add_special_tokens=special)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _chat_template(folder: Path, config: Json) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _special_tokens(config: Json) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def _read_json(file: Path) -> Json:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartError(f"{file} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
