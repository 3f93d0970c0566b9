"""The engine: what prefill and decode share to turn token ids into the next token's logits, and logits into a token.

It runs transformers' own model code over a paged KV cache. Data flows through the modules in this order:

    catalog    a model's name -> its folder on disk (converts the embedded model once)
    card       the folder -> what everybody must know about the model, without torch
    model      the folder -> weights in memory, or a refusal by name
    sequence   one request's tokens, what of them is computed, when it ends
    prefix     sequences that begin alike share their first blocks
    plan       the slices of one step -> where every token is written and what it may see
    attention  the attention function that transformers calls: writes and reads the blocks
    runner     one step: slices in, logits out
    sampling   logits in, token ids out: as `sampling_spec` says, from logits that `penalties` has changed
    logprobs   logits in, log-probabilities of tokens out

The gateway imports `catalog`, `card` and `sampling_spec`, which do not import torch. A runner is one rank: it sees the
KV heads of its own arena and nothing else.
"""
