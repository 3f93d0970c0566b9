"""Some rows of the fault table; `make faults` runs the whole of it."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.fault_run import run_row
from loadtest.fault_table import rows_like

NAMED = (
    "sender/SIGKILL/mid-piece",
    "sender/link-cut/posted",
    "receiver/lost-acknowledgement/acknowledged",
    "sender/restarted/posted",
)


@pytest.mark.slow
async def test_after_a_fault_nothing_is_held_no_wrong_byte_is_used_and_a_whole_transfer_works() -> None:
    rows = rows_like(",".join(NAMED))
    assert len(rows) == len(NAMED)
    outcomes = await asyncio.gather(*(run_row(row) for row in rows))
    assert {outcome.row.name: outcome.error for outcome in outcomes if outcome.error} == {}
    for outcome in outcomes:
        assert outcome.settled_s[outcome.row.survivor.value] <= outcome.row.deadline_s(outcome.row.survivor)
