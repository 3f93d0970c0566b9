"""The engine: what prefill and decode share to turn token ids into the next token's logits, and logits into a token.

Data flows through the modules in this order:

    catalog    a model's name -> its folder on disk (converts the embedded model once)
    card       the folder -> what everybody must know about the model, without torch
    sequence   one request's tokens, what of them is computed, when it ends
    prefix     sequences that begin alike share their first blocks
    plan       the slices of one step -> where every token is written and what it may see
    attention  the rows of a step over the blocks, by torch or by the native kernels
    runner     one step: slices in, logits out; chooses one of two paths
      fast/      Llama-shaped models on a CPU, written out
      generic    every other model: model (weights, or a refusal by name), interface (the attention that transformers
                 calls), on a GPU graphs (decode steps as CUDA graphs) and flashinfer (their attention)
      native/    a CPU's kernels, used by both: products over packed weights, attention of single tokens, decode
                 steps as a whole
    sampling   logits in, token ids out: as `sampling_spec` says, from logits that `penalties` has changed
    logprobs   logits in, log-probabilities of tokens out
    limits     what the machine can do at best

The gateway imports `catalog`, `card` and `sampling_spec`, which do not import torch. A runner is one rank: it sees the
KV heads of its own arena and nothing else.
"""
