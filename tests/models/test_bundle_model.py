"""Every interleaving of placing, flushing, reading and letting go of records that share spans, and of a crash."""

from __future__ import annotations

import pytest
from tests.models import channel_model as rules
from tests.models.bundle_model import Bundler, Header, search
from tests.models.explore import Broken

from penstock._pipeline.channels.slots import SlotTable, Span

SCOPES: dict[tuple[int, ...], int] = {(1, 1, 1, 1): 7436, (1, 2, 3, 1): 1429, (3, 2, 1, 2): 2253}
"""Half slots of each record, and how many states that comes to; see `tests/models/test_channel_model.py`."""


@pytest.mark.parametrize("halves", SCOPES)
def test_every_rule_holds_in_every_state(halves: tuple[int, ...]) -> None:
    assert search(halves) == SCOPES[halves]


class FreesWithTheFirst(SlotTable):
    def release(self, start: int, generation: int, records: int = 1) -> Span:
        span = self._live.get(start)
        return super().release(start, generation, span.records if span and span.generation == generation else records)


class HasMoreThanIsFree(SlotTable):
    def allocate(self, count: int, most: int = 0) -> Span | None:
        span = super().allocate(count, most)
        if span is not None:
            span.count = max(span.count, most)
        return span


class KeepsWhatItGaveBack(SlotTable):
    def trim(self, span: Span, count: int) -> int:
        fewer = super().trim(span, count)
        span.count += fewer
        return fewer


class PublishesBeforeItWrites(Bundler):
    def write(self, start: int, slots: int) -> None:
        """Too late: it is killed before."""


class CountsBundlesOnce(Bundler):
    def arrive(self, bundle: Header) -> None:
        self.sequence = bundle.sequence
        self.arrivals.append(bundle._replace(records=1))


class SalvagesEverything(Bundler):
    def recover(self, sequence: int) -> list[Header]:
        return super().recover(0 * sequence)


class SalvagesNothing(Bundler):
    def recover(self, sequence: int) -> list[Header]:
        return super().recover(sequence)[:0]


class ReleasesWholeBundles(Bundler):
    def release(self, index: int) -> None:
        lease = self.leases.pop(index)
        self.leases = [each for each in self.leases if each.bundle != lease.bundle]
        self.back.append((lease.bundle.slot, lease.bundle.generation))


class LetsGoBeforeItIsRead(Bundler):
    def take(self) -> None:
        super().take()
        self.back.append((self.leases[-1].bundle.slot, self.leases[-1].bundle.generation))


TABLES = {FreesWithTheFirst: rules.CREDIT, HasMoreThanIsFree: rules.ONE_OWNER, KeepsWhatItGaveBack: rules.ONE_OWNER}

LINES = {
    PublishesBeforeItWrites: rules.BYTES,
    CountsBundlesOnce: rules.CREDIT,
    SalvagesEverything: rules.BELIEVED,
    SalvagesNothing: rules.DELIVERED,
    ReleasesWholeBundles: rules.CREDIT,
    LetsGoBeforeItIsRead: rules.CREDIT,
}


@pytest.mark.parametrize("table", TABLES)
def test_a_fault_of_the_table_breaks_a_rule(table: type[SlotTable]) -> None:
    with pytest.raises(Broken) as broken:
        search((1, 2, 3, 1), table=table)

    assert broken.value.rule == TABLES[table]


@pytest.mark.parametrize("line", LINES)
def test_a_fault_around_it_breaks_a_rule(line: type[Bundler]) -> None:
    with pytest.raises(Broken) as broken:
        search((1, 2, 3, 1), bundler=line)

    assert broken.value.rule == LINES[line]
