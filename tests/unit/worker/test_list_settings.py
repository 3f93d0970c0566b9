"""A worker whose settings are lists of what does not exist."""

from __future__ import annotations

import asyncio

import pytest

from services.decode import worker as decode
from services.decode.config import DecodeConfig
from services.errors import StartError
from services.prefill import worker as prefill
from services.prefill.config import PrefillConfig


@pytest.mark.parametrize("text", ["loss=1", "rate=fast"])
async def test_a_worker_refuses_to_start_with_a_fault_it_does_not_know_and_names_the_setting(text: str) -> None:
    for serving in (
        prefill.serve_worker(PrefillConfig(fault=text), asyncio.Event()),
        decode.serve_worker(DecodeConfig(fault=text), asyncio.Event()),
    ):
        with pytest.raises(StartError, match=f"^fault: .*{text.partition('=')[0]}"):
            await serving


@pytest.mark.parametrize("text", ["gold", "gold=0", "gold=1,gold=2"])
async def test_a_worker_refuses_to_start_with_weights_that_are_none_and_names_the_setting(text: str) -> None:
    for serving in (
        prefill.serve_worker(PrefillConfig(tenant_weight=text), asyncio.Event()),
        decode.serve_worker(DecodeConfig(tenant_weight=text), asyncio.Event()),
    ):
        with pytest.raises(StartError, match=r"^tenant-weight: .*gold"):
            await serving
