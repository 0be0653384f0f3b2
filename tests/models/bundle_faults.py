"""Faults of the slot table and of its users, and the rule that each of them breaks where records share spans."""

from __future__ import annotations

from tests.models import channel_model as rules
from tests.models.bundle_model import Bundler, Header

from penstock._pipeline.channels.slots import SlotTable, Span

__all__ = ["BUNDLERS", "TABLES"]


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
        """Do nothing: the process is killed before."""


class CountsBundlesOnce(Bundler):
    def arrive(self, bundle: Header) -> None:
        self.sequence = bundle.sequence
        self.arrivals.append(bundle._replace(records=1))


class RecoversEverything(Bundler):
    def recover(self, sequence: int) -> list[Header]:
        return super().recover(0 * sequence)


class RecoversNothing(Bundler):
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


TABLES: dict[type[SlotTable], str] = {
    FreesWithTheFirst: rules.CREDIT,
    HasMoreThanIsFree: rules.ONE_OWNER,
    KeepsWhatItGaveBack: rules.ONE_OWNER,
}


BUNDLERS: dict[type[Bundler], str] = {
    PublishesBeforeItWrites: rules.BYTES,
    CountsBundlesOnce: rules.CREDIT,
    RecoversEverything: rules.BELIEVED,
    RecoversNothing: rules.DELIVERED,
    ReleasesWholeBundles: rules.CREDIT,
    LetsGoBeforeItIsRead: rules.CREDIT,
}
