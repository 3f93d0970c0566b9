"""Log-probabilities as the OpenAI answers write them: one way for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import JsonValue

from services.gateway.answer import LoggedToken

Json = dict[str, JsonValue]
BytesOf = Callable[[int], bytes]


def chat_logprobs(tokens: Sequence[LoggedToken], bytes_of: BytesOf) -> Json:
    """`choices[].logprobs` of a chat."""
    content: list[JsonValue] = [
        {
            **_entry(token.token_id, logprobs.logprob, bytes_of),
            "top_logprobs": [_entry(token_id, logprob, bytes_of) for token_id, logprob in logprobs.top],
        }
        for token in tokens
        if (logprobs := token.logprobs) is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[LoggedToken], bytes_of: BytesOf) -> Json:
    """`choices[].logprobs` of a completion. `text_offset` counts characters of the text, an echoed prompt's too."""
    return {
        "tokens": [_written(bytes_of(token.token_id)) for token in tokens],
        "token_logprobs": [None if token.logprobs is None else token.logprobs.logprob for token in tokens],
        "top_logprobs": [_alternatives(token, bytes_of) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _alternatives(token: LoggedToken, bytes_of: BytesOf) -> Json | None:
    """The token itself is always there, beside its alternatives."""
    if token.logprobs is None:
        return None
    own = (token.token_id, token.logprobs.logprob)
    return {_written(bytes_of(token_id)): logprob for token_id, logprob in (own, *token.logprobs.top)}


def _entry(token_id: int, logprob: float, bytes_of: BytesOf) -> Json:
    raw = bytes_of(token_id)
    return {"token": _written(raw), "logprob": logprob, "bytes": list(raw)}


def _written(raw: bytes) -> str:
    """The token as text; `bytes:\\xe2\\x82` for a part of a character, as OpenAI writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
