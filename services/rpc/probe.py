"""`python -m services.rpc.probe HOST:PORT` exits 0 when the gRPC server there says that it serves: a health check."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIMIT_S = 3.0


def serves(address: str) -> bool:
    """Whether the server at HOST:PORT answers SERVING within LIMIT_S."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m services.rpc.probe HOST:PORT")
    sys.exit(0 if serves(sys.argv[1]) else 1)
