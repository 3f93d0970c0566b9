from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest

from services.cli.topology import MeshOptions, mesh_children
from services.config import ServiceConfig, load

OPTIONS = MeshOptions(grpc_port=1001, http_port=1002, scheduler_port=1003, redis="unix:///r", cores=(0, 1))


def by_name(options: MeshOptions) -> dict[str, list[str]]:
    return {child.name: list(child.argv) for child in mesh_children(options)}


def test_a_mesh_is_gateway_scheduler_and_the_workers_asked_for() -> None:
    names = set(by_name(replace(OPTIONS, prefill=2, decode=1)))
    assert names == {"prefill-0", "prefill-1", "decode-0", "scheduler", "gateway"}


def test_zero_prefill_workers_are_the_aggregated_mode_and_the_gateway_expects_none() -> None:
    children = by_name(replace(OPTIONS, prefill=0, decode=2))
    assert set(children) == {"decode-0", "decode-1", "scheduler", "gateway"}
    assert "--expect=0:2" in children["gateway"]


def test_step_threads_and_services_are_told_their_cores() -> None:
    children = {child.name: child for child in mesh_children(OPTIONS)}
    assert {"--step-cores=0", "--other-cores=1"} <= set(children["decode-0"].argv)
    assert {"--step-cores=1", "--other-cores=1"} <= set(children["prefill-0"].argv)
    assert all("--other-cores=1" in child.argv for child in children.values())


def test_the_gateway_is_stopped_before_all_others() -> None:
    stages = {child.name: child.stop_stage for child in mesh_children(OPTIONS)}
    assert stages.pop("gateway") < min(stages.values())


@pytest.mark.parametrize(
    ("child", "module", "config"),
    [
        ("gateway", "services.gateway.config", "GatewayConfig"),
        ("scheduler", "services.scheduler.config", "SchedulerConfig"),
        ("prefill-0", "services.prefill.config", "PrefillConfig"),
        ("decode-0", "services.decode.config", "DecodeConfig"),
    ],
)
def test_every_flag_is_one_that_the_service_knows(child: str, module: str, config: str) -> None:
    argv = by_name(OPTIONS)[child]
    service = child.partition("-")[0]
    assert argv[:3] == [sys.executable, "-m", f"services.{service}"]
    kind = vars(importlib.import_module(module))[config]
    loaded = load(kind, service, "", argv[3:])
    assert isinstance(loaded, ServiceConfig)
    assert loaded.host == "127.0.0.1"
    assert loaded.port == {"gateway": 1001, "scheduler": 1003}.get(service, 0)


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--port=abc"], {}, "--port"),
        (["--port=70000"], {}, "--port"),
        (["--nope"], {}, "--nope"),
        ([], {"DIPTYCH_PORT": "zzz"}, "DIPTYCH_PORT"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(
    flags: list[str],
    environ: dict[str, str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as raised:
        load(ServiceConfig, "scheduler", "", flags)
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("scheduler: ") and said.count("\n") == 1 and named in said
