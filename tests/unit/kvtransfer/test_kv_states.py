from __future__ import annotations

import inspect

import pytest

from kvtransfer import IllegalTransition, TransferError, errors
from kvtransfer.lease import Lease
from kvtransfer.states import (
    BUFFER_TRANSITIONS,
    RECEIVE_TRANSITIONS,
    SEND_TRANSITIONS,
    BufferState,
    Life,
    SendState,
)

TABLES = [SEND_TRANSITIONS, RECEIVE_TRANSITIONS, BUFFER_TRANSITIONS]
STATUS_NAMES = {
    "INTERNAL", "RESOURCE_EXHAUSTED", "NOT_FOUND", "FAILED_PRECONDITION", "ABORTED", "DEADLINE_EXCEEDED", "UNAVAILABLE",
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_every_state_has_a_row_and_can_be_reached(table):
    states = set(next(iter(table)).__class__)
    assert set(table) == states
    start = next(iter(type(next(iter(table)))))
    reached, todo = {start}, [start]
    while todo:
        for state in table[todo.pop()] - reached:
            reached.add(state)
            todo.append(state)
    assert reached == states


def test_a_life_follows_its_table():
    life = Life("offer t", SendState.OFFERED, SEND_TRANSITIONS)
    life.advance(SendState.SENDING)
    life.advance(SendState.SENT)
    assert life.state is SendState.SENT
    assert life.history == (SendState.OFFERED, SendState.SENDING, SendState.SENT)


def test_an_illegal_edge_tells_the_way_and_does_not_move():
    life = Life("offer t", SendState.OFFERED, SEND_TRANSITIONS)
    life.advance(SendState.DRAINING)
    with pytest.raises(IllegalTransition, match="offer t cannot go to sent; its way was offered → draining"):
        life.advance(SendState.SENT)
    assert life.state is SendState.DRAINING


def test_a_posted_buffer_never_becomes_quarantined_or_taken_anew_without_draining():
    assert BufferState.QUARANTINED not in BUFFER_TRANSITIONS[BufferState.POSTED]
    assert BUFFER_TRANSITIONS[BufferState.DRAINING] == {BufferState.FREE, BufferState.QUARANTINED}


def test_the_history_is_bounded():
    life = Life("buffer", BufferState.TAKEN, BUFFER_TRANSITIONS)
    for _ in range(100):
        life.advance(BufferState.POSTED)
        life.advance(BufferState.TAKEN)
    assert len(life.history) <= 16


def test_a_lease_ends_by_its_own_clock():
    now = 100.0
    lease = Lease.grant(5.0, lambda: now)
    assert (lease.remaining_s(lambda: 104.0), lease.expired(lambda: 104.9)) == (1.0, False)
    assert (lease.remaining_s(lambda: 106.0), lease.expired(lambda: 105.0)) == (0.0, True)


def test_every_error_has_a_status_and_is_drawn_in_the_tree():
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, TransferError)]
    assert len(classes) > 10
    for each in classes:
        assert each.code in STATUS_NAMES
        if each is not TransferError:
            (line,) = [line for line in errors.__doc__.splitlines() if f"── {each.__name__} " in line]
            assert f" {each.code} " in line
