"""Channel and server options, set on purpose.

Message limit 16 MiB: a prompt of a million token ids is 4–5 MB; KV never goes through gRPC. Keepalive: a peer whose
machine vanished is noticed within `KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS`; a killed process is noticed at once by its
closed socket. A process that stands still keeps its socket open and its kernel answers for it: only the missing answer
to a ping tells, for which gRPC waits a minute unless `grpc.http2.ping_timeout_ms` says less. The server allows pings as
often as our clients send them: without `grpc.http2.min_ping_interval_without_data_ms` it would end idle streams with
too_many_pings.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 4_000

Options = list[tuple[str, int]]

_BOTH: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: Options = [
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a silent second server
]

CHANNEL_OPTIONS: Options = [
    *_BOTH,
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.client_idle_timeout_ms", 60_000),  # a dead worker is not called again, and not reconnected to for ever
    ("grpc.enable_retries", 0),  # retries are the gateway's decision
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
