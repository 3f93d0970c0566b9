"""Every span and event name there is. One request is one trace:

gateway.request             the whole request: ids, model, tokens, finish reason
├── gateway.tokenize        rendering and tokenizing
├── scheduler.place         in the scheduler; queue time, chosen workers
├── prefill.queue           waiting inside the prefill worker
├── prefill.compute         chunks, cached tokens
├── decode.queue            waiting for blocks, then for the hand-off
├── kv.transfer             on the receiver: bytes, pieces, transport, GB/s, exposed time
└── decode.run              decoding; events for what happens to the request in between
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
