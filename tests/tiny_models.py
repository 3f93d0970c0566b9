"""Tiny models with random weights and a working tokenizer, made in a moment: the tests' stand-ins for real models."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

VOCAB = 352
CONTEXT_TOKENS = 2048
SLIDING_WINDOW = 24

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gpt2", "opt")
"""What `make_tiny` makes and the engine serves."""

REFUSED = ("falcon", "bloom", "gpt_oss")
"""What `make_tiny` makes and the engine must refuse."""

_BASE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
}

_CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", _BASE),
    "llama_biased": ("llama", {**_BASE, "attention_bias": True}),
    "llama_scaled": (
        "llama",
        {
            **_BASE,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("qwen2", _BASE),
    "qwen3": ("qwen3", {**_BASE, "head_dim": 32}),
    "gemma3": (
        "gemma3_text",
        {
            **_BASE,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **_BASE,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "mistral": ("mistral", {**_BASE, "sliding_window": SLIDING_WINDOW}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT_TOKENS}),
    "opt": (
        "opt",
        {
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": CONTEXT_TOKENS,
        },
    ),
    "falcon": ("falcon", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gpt_oss": ("gpt_oss", {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEXT = [
    "The quick brown fox jumps over the lazy dog and the dog does not mind at all.",
    "What is the capital of France? The capital of France is Paris.",
    "You are a helpful assistant. user system assistant",
    "One two three four five six seven eight nine ten, again and again.",
]


def make_tiny(architecture: str, folder: Path, seed: int = 0) -> Path:
    """Save a tiny random model of `architecture`, with its tokenizer and chat template; returns `folder`."""
    disable_progress_bar()
    tokenizer = _tokenizer()
    model_type, fields = _CONFIGS[architecture]
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Tied weights would make most random models repeat their last token.
        tie_word_embeddings=False,
        **fields,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Matrices are drawn wide enough that greedy text wanders; norms and biases keep some life too.
            spread = 0.25 if parameter.ndim > 1 else 0.1
            noise = torch.randn_like(parameter) * spread
            parameter.copy_(parameter + noise if parameter.ndim == 1 else noise)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with all bytes in its alphabet: it encodes and decodes any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT, trainer)
    assert bpe.get_vocab_size() == VOCAB, "every token id that a model may emit must decode"
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
    )
