"""What everybody must know about a model before its weights are loaded. Reads JSON; does not import torch."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from services.engine.errors import ModelNotFound, UnsupportedArchitecture

# config.json names the same thing differently; the first name that is there wins.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads",)
_HIDDEN = ("hidden_size", "n_embd")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx")

_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

Json = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """A model, as far as a request, a block or a layout depends on it."""

    name: str  # the name it is served under
    path: Path
    architecture: str  # the class in config.json, e.g. "LlamaForCausalLM"
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_tokens: int  # prompt and answer together
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # equal where the weights, the tokenizer and the configuration are equal


def read_card(path: Path, name: str) -> ModelCard:
    """Read the card of the model in folder `path`.

    Raises ModelNotFound when the folder holds no model, UnsupportedArchitecture when its config.json does not describe
    a decoder-only text model.
    """
    config = _read_json(path / "config.json")
    if config is None:
        raise ModelNotFound(f"{path} holds no model: it has no config.json")
    if config.get("is_encoder_decoder"):
        raise UnsupportedArchitecture(f"{_architecture(config)} is an encoder-decoder; only decoders are served")
    heads = _whole(config, _HEADS)
    return ModelCard(
        name=name,
        path=path,
        architecture=_architecture(config),
        layers=_whole(config, _LAYERS),
        kv_heads=_optional(config, _KV_HEADS) or heads,
        head_dim=_optional(config, ("head_dim",)) or _whole(config, _HIDDEN) // heads,
        vocab=_whole(config, ("vocab_size",)),
        context_tokens=_whole(config, _CONTEXT),
        eos_token_ids=_eos(_read_json(path / "generation_config.json") or {}, config),
        fingerprint=_fingerprint(path),
    )


def _read_json(path: Path) -> Json | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFound(f"{path} is not a JSON object")
    return content


def _architecture(config: Json) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(config.get("model_type", "a model without a name"))


def _optional(config: Json, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _whole(config: Json, names: tuple[str, ...]) -> int:
    value = _optional(config, names)
    if value is None:
        raise UnsupportedArchitecture(f"{_architecture(config)} says no {names[0]} in its config.json")
    return value


def _eos(generation: Json, config: Json) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    return ()


def _fingerprint(path: Path) -> str:
    """Hash what is small whole, and of the weights the tables of contents and samples: the rest would take seconds."""
    digest = hashlib.sha256()
    for name in _CONFIG_FILES:
        fields = _read_json(path / name) or {}
        # Who saved the model, and from where, changes nothing.
        said = {key: fields[key] for key in fields if key != "transformers_version" and not key.startswith("_")}
        digest.update(name.encode() + b"\0" + json.dumps(said, sort_keys=True).encode())
    for name in _TOKENIZER_FILES:
        file = path / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.name.encode() + b"\0")
        _digest_weights(digest, file)
    return digest.hexdigest()[:32]


def _digest_weights(digest: hashlib._Hash, file: Path) -> None:
    sample_bytes = 4096
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ModelNotFound(f"{file} is not a safetensors file")
        (header_bytes,) = struct.unpack("<Q", prefix)
        digest.update(prefix + stream.read(min(header_bytes, size)))
        for sixteenth in range(16):
            stream.seek(sixteenth * size // 16)
            digest.update(stream.read(sample_bytes))
