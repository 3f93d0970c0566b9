"""Every span name there is. One request is one trace, below the caller's own span when it sends a W3C context:

gateway.request       gateway    the whole request: request_id, model, answers, prompt_tokens, completion_tokens,
│                                finish_reason (of the first answer)
├── gateway.tokenize  gateway    rendering and tokenizing
├── scheduler.place   scheduler  queue_s, prefill_worker, decode_worker, local_prefill_reason
├── prefill.queue     prefill    waiting inside the prefill worker
├── prefill.compute   prefill    prompt_tokens, chunks, cached_tokens
├── decode.queue      decode     waiting for blocks
├── kv.transfer       decode     bytes, pieces, transport, encoding, gigabytes_per_second, exposed_s
└── decode.run        decode     finish_reason (also "cancelled": a stop string, a client that went away), recomputed,
                                 preemptions, swapped_bytes, waited_s, lowest_level; events: preempted, resumed,
                                 demoted, promoted, kept, dropped, swap out, swap in, with level and detail

Attributes are named `diptych.…`; the middle column is the service (`service.name` is `diptych-…`). A prompt that the
decode worker computes itself has no prefill.queue and no kv.transfer, and its prefill.compute comes from decode. A
request that is placed again has the spans of every placement.
"""

from __future__ import annotations

GATEWAY_REQUEST = "gateway.request"
GATEWAY_TOKENIZE = "gateway.tokenize"
SCHEDULER_PLACE = "scheduler.place"
PREFILL_QUEUE = "prefill.queue"
PREFILL_COMPUTE = "prefill.compute"
KV_TRANSFER = "kv.transfer"
DECODE_QUEUE = "decode.queue"
DECODE_RUN = "decode.run"
