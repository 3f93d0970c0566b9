"""What workers have and do by themselves, before anybody asks for anything."""

from __future__ import annotations

import psutil
from asking import workers
from meshes import Mesh

KV_BYTES = 512 << 20  # what --kv-mib is unless it is given


def largest_mapping(process: psutil.Process) -> int:
    """Bytes in memory of what the process has mapped most of."""
    return max(mapping.rss for mapping in process.memory_maps(grouped=False))


def test_workers_have_their_memory_for_kv_before_they_use_it(mesh: Mesh) -> None:
    """The first write to a page would otherwise make a step wait."""
    children = mesh.children()
    for name in ("prefill-0", "decode-0"):
        assert largest_mapping(children[name]) >= KV_BYTES, name


async def test_prompts_go_by_their_known_length_and_answers_by_what_is_observed(mesh: Mesh) -> None:
    schedules = {worker.ref.name: worker.schedule for worker in await workers(mesh)}
    assert schedules["prefill-0"] == "auto (shortest)"
    assert schedules["decode-0"].startswith("auto (") and "shortest" not in schedules["decode-0"]
