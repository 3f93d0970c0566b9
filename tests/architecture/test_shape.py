"""What the house style asks of the whole tree."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.config import ServiceConfig

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for package in ("kvtransfer", "services", "loadtest") for path in (ROOT / package).rglob("*.py"))
SERVICES = ("gateway", "scheduler", "prefill", "decode")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_can_be_read_in_one_go(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    functions = (
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno and f.end_lineno - f.lineno >= 60}
    assert long == {}


def test_files_are_named_after_what_is_in_them() -> None:
    assert {
        relative(path) for path in SOURCES if path.stem in {"utils", "helpers", "common", "misc", "manager"}
    } == set()


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_starts_with_the_same_files(service: str) -> None:
    folder = ROOT / "services" / service
    assert all((folder / f"{name}.py").exists() for name in ("__main__", "config", "servicer"))


def configs() -> Iterator[type[ServiceConfig]]:
    for service in SERVICES:
        for value in vars(importlib.import_module(f"services.{service}.config")).values():
            if isinstance(value, type) and issubclass(value, ServiceConfig):
                yield value


def test_there_are_fewer_than_thirty_keys_over_the_whole_product() -> None:
    keys = {field.name for config in configs() for field in dataclasses.fields(config)}
    assert 10 < len(keys) < 30


def test_every_key_explains_itself() -> None:
    for config in configs():
        for field in dataclasses.fields(config):
            assert str(field.metadata["help"]).endswith("."), f"{config.__name__}.{field.name}"


def test_every_redis_key_is_in_the_documented_table() -> None:
    documented = ast.get_docstring(ast.parse((ROOT / "services/cluster/keys.py").read_text())) or ""
    used: set[str] = set()
    for path in (ROOT / "services").rglob("*"):
        if path.suffix in {".py", ".lua"} and path.name != "keys.py":
            used |= set(re.findall(r"""["'f](diptych:[a-z_:-]+)""", path.read_text()))
    assert used == set(), "keys are built in services/cluster/keys.py"
    built = set(re.findall(r"""["'](diptych:[a-z_-]+)""", (ROOT / "services/cluster/keys.py").read_text()))
    assert built
    assert {key for key in built if key not in documented} == set()


def test_span_names_come_from_one_file() -> None:
    names = importlib.import_module("services.telemetry.spans")
    spans = {value for key, value in vars(names).items() if key.isupper()}
    assert len(spans) == 8
    assert all(span in (names.__doc__ or "") for span in spans)
    for path in SOURCES:
        if path.name == "spans.py":
            continue
        tree = ast.parse(path.read_text())
        docs = {id(n.body[0].value) for n in ast.walk(tree) if _has_docstring(n)}  # type: ignore[attr-defined]
        literals = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs}
        assert not literals & spans, relative(path)


def _has_docstring(node: ast.AST) -> bool:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, kinds) and ast.get_docstring(node) is not None


def test_nothing_walks_all_redis_keys_or_pickles() -> None:
    for path in (*(ROOT / "services").rglob("*.py"), *(ROOT / "services").rglob("*.lua")):
        text = path.read_text()
        assert not re.search(r"""call\(["']KEYS["']|scan_iter|import pickle|FLUSH""", text), relative(path)
