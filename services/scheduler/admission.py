"""Whether the head of the line may go: pure arithmetic on a decode worker's KV memory.

A request counts with its prompt and the tokens that each of its answers is expected to have, in whole blocks, from its
placement until it is finished. Expected are EXPECTED_NEW_TOKENS at most: clients that set no limit ask for the rest of
the context and use little of it, and a worker that was promised too much computes its youngest request again instead of
failing. What is placed on a worker stays within its blocks, so that few requests wait for memory there while prefill
holds their KV; where running requests give way to others, within those of host memory as well. A request alone on a
worker always goes.
"""

from __future__ import annotations

from services.cluster.record import WorkerRecord

EXPECTED_NEW_TOKENS = 512


def counted_tokens(prompt_tokens: int, max_new_tokens: int, block_tokens: int, *, answers: int = 1) -> int:
    """What a request counts for: its expected tokens in whole blocks.

    Several answers share the prompt's full blocks, except one that ends with the prompt: its last token gives them
    their first one. Each has its own from there on.
    """
    block = max(1, block_tokens)
    shared = max(0, prompt_tokens - 1) // block * block
    own = prompt_tokens - shared + min(max_new_tokens, EXPECTED_NEW_TOKENS)
    return shared + answers * -(-own // block) * block


def bound_tokens(worker: WorkerRecord) -> int:
    """Most counted tokens on a worker."""
    return worker.placed_tokens


def has_room(placed_tokens: int, counted: int, bound: int) -> bool:
    """Whether a request of `counted` tokens may be placed beside `placed_tokens`."""
    return placed_tokens == 0 or placed_tokens + counted <= bound


def longest_tokens(worker: WorkerRecord) -> int:
    """Longest sequence that the worker can ever hold: its context or its memory, whichever is smaller."""
    return min(worker.context_tokens, worker.capacity_tokens)


def ever_fits(worker: WorkerRecord, tokens: int) -> bool:
    """Whether the worker could hold a sequence of `tokens` if it were empty."""
    return tokens <= longest_tokens(worker)
