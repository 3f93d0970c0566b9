from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from services.cli.up import claim_ports, up
from services.errors import StartError


def test_a_port_in_use_is_named_with_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(
            StartError, match=rf"--grpc-port: cannot listen on 127\.0\.0\.1:{port}: Address already in use"
        ):
            claim_ports({"grpc_port": port})


def test_help_names_the_defaults() -> None:
    """They were shown by the services and not by the command that people start with."""
    words = " ".join(CliRunner().invoke(up, ["--help"]).stdout.split())
    assert all(
        f"default: {value}" in words for value in ("smollm2", "1", "50051", "8000", "50052", "bf16", "256", "512")
    )


def test_a_port_wanted_twice_is_refused() -> None:
    port = claim_ports({"grpc_port": 0})["grpc_port"]
    with pytest.raises(StartError, match="--http-port"):
        claim_ports({"grpc_port": port, "http_port": port})


def test_zero_takes_free_ports_and_never_the_same_one() -> None:
    ports = claim_ports(dict.fromkeys("abcdef", 0))
    assert len(set(ports.values())) == 6
    assert 0 not in ports.values()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--prefill", "-1"], "--prefill"), (["--decode", "0"], "--decode"), (["--dtype", "int3"], "--dtype")],
)
def test_bad_flags_are_named_and_nothing_starts(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(up, arguments)
    assert result.exit_code == 2
    assert word in result.output


def test_a_variable_of_the_wrong_type_is_named() -> None:
    result = CliRunner(env={"DIPTYCH_KV_MIB": "lots"}).invoke(up, [])
    assert result.exit_code == 2
    assert "kv-mib" in result.output.lower()
    assert "DIPTYCH_KV_MIB" in result.output


def test_the_supervisor_imports_neither_grpc_nor_torch() -> None:
    heavy = "{'grpc', 'torch', 'transformers', 'asyncio'}"
    code = f"import sys, services.cli.up; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
