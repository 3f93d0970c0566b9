"""Tokenizer and chat template against transformers' own, on a tiny model's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_tiny
from transformers import AutoTokenizer

from services.errors import InvalidArgument, StartError
from services.gateway.request import ChatPrompt, Message, TextPrompt, TokenPrompt
from services.gateway.text import Tokenizer

CHAT = ChatPrompt(
    field="messages",
    messages=[Message(role="system", content="Be <b>brief</b>."), Message(role="user", content="Wörter? 日本 🎉")],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny("llama", path)
    return path


def test_text_and_chat_become_the_tokens_that_transformers_makes(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    text = "the capital of France — 日本 🎉\n\n"
    assert ours.encode(TextPrompt(field="text", text=text)) == theirs(text)["input_ids"]
    messages = [{"role": m.role, "content": m.content} for m in CHAT.messages]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.render(CHAT) == rendered
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert ours.encode(CHAT) == list(expected["input_ids"])
    ids = ours.encode(CHAT)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_longest_token_bounds_what_any_token_covers(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.longest_token == max(map(len, AutoTokenizer.from_pretrained(folder).get_vocab()))
    text = "<|im_start|> assistant 日本 🎉" * 20
    assert len(text) <= tokenizer.longest_token * len(tokenizer.encode(TextPrompt(field="text", text=text)))


def test_templates_have_what_transformers_gives_them(folder: Path, tmp_path: Path) -> None:
    template = """{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- generation %}[{{ m.content | tojson }}]{% endgeneration %}
{%- endfor %}
{{- bos_token }}{{ strftime_now('%Y')[:2] }}"""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": {"content": "<s>", "__type": "AddedToken"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert Tokenizer.load(tmp_path).render(CHAT) == '["Wörter? 日本 🎉"]<s>20'


def test_a_template_that_refuses_is_bad_input(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidArgument, match="messages: the chat template refuses it: roles must alternate"):
        Tokenizer.load(tmp_path).encode(CHAT)


def test_a_model_without_a_template_takes_no_chat(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(InvalidArgument, match="no chat template"):
        tokenizer.encode(CHAT)
    assert tokenizer.encode(TokenPrompt(field="ids", token_ids=(3, 4))) == [3, 4]


def test_text_that_is_not_unicode_is_bad_input(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="not valid Unicode"):
        Tokenizer.load(folder).encode(TextPrompt(field="text", text="a\ud800"))


@pytest.mark.parametrize("content", [None, "{", '{"model": 3}'])
def test_a_folder_without_a_good_tokenizer_is_one_clear_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartError, match=r"tokenizer\.json") as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_gateway_does_not_import_torch() -> None:
    """It would cost every gateway 200 MB and four seconds."""
    check = "import sys, services.gateway.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
