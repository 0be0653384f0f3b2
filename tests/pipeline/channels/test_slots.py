import pytest

from penstock._pipeline.channels.slots import SlotTable, Span
from penstock.errors import IllegalTransition, RecordTooLarge, StaleDescriptor


def allocated(table: SlotTable, count: int) -> Span:
    span = table.allocate(count)
    assert span is not None
    return span


def published(table: SlotTable, count: int, sequence: int = 1) -> Span:
    span = allocated(table, count)
    table.publish(span, sequence)
    return span


def test_spans_are_adjacent_slots_at_the_lowest_address() -> None:
    table = SlotTable(10)

    spans = [allocated(table, 3) for _ in range(3)]

    assert [(span.start, span.count) for span in spans] == [(0, 3), (3, 3), (6, 3)]
    assert table.allocate(2) is None
    assert table.free_slots == 1


def test_a_released_span_is_the_next_to_be_used() -> None:
    table = SlotTable(10)
    first, _ = published(table, 4), published(table, 4)

    table.release(first.start, first.generation)

    assert allocated(table, 4).start == first.start


def test_neighbours_that_are_free_become_one_run_in_any_order_of_release() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1], [1, 2, 0], [2, 0, 1]):
        table = SlotTable(9)
        spans = [published(table, 3) for _ in range(3)]
        for index in order:
            table.release(spans[index].start, spans[index].generation)
        assert allocated(table, 9).start == 0


def test_a_record_larger_than_all_slots_is_an_error_not_a_wait() -> None:
    with pytest.raises(RecordTooLarge, match="at most 4 slots, got one of 5"):
        SlotTable(4).allocate(5)


def test_each_use_of_a_slot_is_a_new_generation() -> None:
    table = SlotTable(1)
    generations = []
    for _ in range(3):
        span = published(table, 1)
        generations.append(span.generation)
        table.release(span.start, span.generation)
    assert generations == [1, 2, 3]


def test_a_late_release_of_an_earlier_generation_is_refused_and_changes_nothing() -> None:
    table = SlotTable(1)
    old = published(table, 1)
    table.release(old.start, old.generation)
    new = published(table, 1, sequence=2)

    with pytest.raises(StaleDescriptor, match="generation 1, but the slot is in generation 2"):
        table.release(old.start, old.generation)

    assert new.state == "published"
    assert table.free_slots == 0


def test_a_release_of_a_slot_that_begins_no_span_is_refused() -> None:
    table = SlotTable(4)
    published(table, 3)
    with pytest.raises(StaleDescriptor, match="slot 1, generation 1, but the slot is free"):
        table.release(1, 1)


def test_an_illegal_transition_names_the_history_of_the_slot() -> None:
    table = SlotTable(2)
    span = published(table, 1, sequence=7)

    with pytest.raises(IllegalTransition) as raised:
        table.publish(span, 8)

    assert str(raised.value) == (
        "cannot publish slot 0: expected state writing, got published; "
        "its history: allocated as generation 1, published as record 7"
    )


def test_what_is_being_written_cannot_be_released_and_what_is_published_not_trimmed() -> None:
    table = SlotTable(2)
    writing, ready = allocated(table, 1), published(table, 1)

    with pytest.raises(IllegalTransition, match="cannot release slot 0: expected state published, got writing"):
        table.release(writing.start, writing.generation)
    with pytest.raises(IllegalTransition, match="cannot trim slot 1: expected state writing, got published"):
        table.trim(ready, 1)


def test_a_table_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        SlotTable(0)
