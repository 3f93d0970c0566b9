"""Fixtures that start whole meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Unpack

import pytest
from meshes import Mesh, MeshOptions, StartMesh, start
from tiny_models import make_tiny


@pytest.fixture
def start_mesh(tiny_llama: str) -> Iterator[StartMesh]:
    """`start_mesh(model=…, prefill=1, decode=1, dtype="fp32", extra=[…], environ={…})`; stopped after the test."""
    meshes: list[Mesh] = []

    def start_one(model: str = tiny_llama, **options: Unpack[MeshOptions]) -> Mesh:
        meshes.append(start(model, **options))
        return meshes[-1]

    yield start_one
    for mesh in meshes:
        mesh.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`tiny_model("qwen3")`: the folder of a tiny random model, made once a session."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> str:
        if architecture not in made:
            made[architecture] = make_tiny(architecture, tmp_path_factory.mktemp("models") / f"tiny-{architecture}")
        return str(made[architecture])

    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: Callable[[str], str]) -> str:
    """Folder of the tiny model that most tests use."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def mesh(tiny_llama: str) -> Iterator[Mesh]:
    """A mesh of one prefill and one decode worker in fp32, shared by tests that break nothing. Chunks are small."""
    shared = start(tiny_llama, extra=["--chunk-tokens=64"])
    yield shared
    shared.stop()


@pytest.fixture(scope="session")
def aggregated_mesh(tiny_llama: str) -> Iterator[Mesh]:
    """A mesh of one decode worker that prefills by itself, shared by tests that break nothing."""
    shared = start(tiny_llama, prefill=0)
    yield shared
    shared.stop()
