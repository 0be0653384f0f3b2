from penstock import TrainBatch
from penstock._pipeline.accounting.ledger import Ledger
from penstock._pipeline.accounting.retention import Retention
from penstock._schemas import GroupId
from penstock.testing import group

A, B = GroupId("env", "a"), GroupId("env", "b")


def test_what_is_kept_for_several_groups_is_kept_until_all_of_them_are_saved() -> None:
    retention = Retention[str]()
    retention.keep("file", A, 0b11)
    retention.keep("file", B, 0b1)

    assert retention.save(A, 0b11) == [("file", 0b11)]
    assert "file" in retention
    assert retention.save(B, 0b1) == [("file", 0b1)]
    assert "file" not in retention


def test_a_repetition_that_is_saved_is_saved_for_all_that_is_kept_for_it_and_reported_once() -> None:
    retention = Retention[str]()
    retention.keep("first", A, 0b011)
    retention.keep("second", A, 0b110)

    assert retention.save(A, 0b010) == [("first", 0b010), ("second", 0b010)]
    assert retention.save(A, 0b010) == []
    assert list(retention) == ["first", "second"]


def test_a_checkpoint_saves_its_own_and_dropped_groups_and_not_later_ones() -> None:
    ledger, retention = Ledger(), Retention[str]()
    records = {name: group(instance_id=name) for name in ("saved", "trained later", "in flight", "dropped")}
    for name, record in records.items():
        ledger.hand_over(record)
        retention.keep_record(name, record)
    ledger.commit(TrainBatch.pack([records["saved"]]), step=1)
    committed = ledger.committed
    ledger.commit(TrainBatch.pack([records["trained later"]]), step=2)
    ledger.end(records["dropped"].ids, "filtered", "zero variance")

    saved = retention.save_checkpoint(committed, ledger)

    assert sorted(kept for kept, _, _ in saved) == ["dropped", "saved"]
    assert list(retention) == ["trained later", "in flight"]


def test_what_is_discarded_is_kept_for_nothing_and_leaves_the_others() -> None:
    retention = Retention[str]()
    retention.keep("first", A, 0b1)
    retention.keep("first", B, 0b1)
    retention.keep("second", B, 0b1)

    retention.discard("first")
    retention.discard("never kept")

    assert list(retention) == ["second"]
    assert retention.save(A, 0b1) == []
