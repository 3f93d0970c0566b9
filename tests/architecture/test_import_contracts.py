"""The doors of `.importlinter`, and what it cannot say: which kinds of files import generated code and gRPC."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Files that make calls.
CLIENTS = ("peers", "kv_control", "hand_off", "client", "calls", "generate", "transfer_child", "transfer_target")
PACKAGES = ("kvtransfer", "services", "loadtest")


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imported(path: Path) -> set[str]:
    """Names of everything that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def namers(*packages: str) -> set[str]:
    """Modules that import one of the packages, or say its name as `importlib.import_module` wants it."""
    named = {
        name
        for name, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in packages
    }
    return named.union(*(importers(package) for package in packages))


def importers(package: str) -> set[str]:
    return {
        name
        for name, path in modules()
        if any(one == package or one.startswith(f"{package}.") for one in imported(path))
    }


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "0 broken" in done.stdout


def test_generated_code_stays_in_servicers_clients_and_converters() -> None:
    kinds = {"__main__", "servicer", *CLIENTS, "convert", "identity", "phases", "workers"}
    assert {name for name in importers("diptych") if name.rpartition(".")[2] not in kinds} == set()


def test_grpc_stays_in_servicers_clients_and_the_rpc_package() -> None:
    kinds = {"__main__", "servicer", *CLIENTS}
    outside = {name for name in importers("grpc") if not name.startswith("services.rpc.")}
    assert {name for name in outside if name.rpartition(".")[2] not in kinds} == set()


def test_ucx_and_cupy_have_one_door_each() -> None:
    assert namers("ucxx", "ucp") == {"kvtransfer.transport.ucx_library"}
    assert namers("cupy") == {"kvtransfer.device"}


def test_the_tokenizer_is_loaded_by_the_gateway_alone() -> None:
    assert importers("tokenizers") <= {"services.gateway.text"}


def test_every_package_is_installed() -> None:
    """A package that pyproject.toml does not list works in a checkout and is missing from the wheel."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {
        ".".join(path.parent.relative_to(ROOT).parts) for p in PACKAGES for path in (ROOT / p).rglob("__init__.py")
    }
    assert there | {"diptych", "diptych.v1"} == listed
