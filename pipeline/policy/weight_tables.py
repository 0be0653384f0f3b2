"""Tables: tensors that a module computes when it is made, and that no state_dict holds. Rotary frequencies, above all.

They do not travel: a sampler's model has its own, made from its own configuration. What travels is what they are and
the hash of their bytes, so that two configurations which differ in nothing but numbers do not go unnoticed. A table is
a non-persistent buffer; what a module keeps as a plain attribute has no name that two sides could compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import xxhash
from torch import Tensor, nn

from .weight_memory import bytes_of
from .weight_specs import TableSpec

__all__ = ["published_tables", "table_differences", "tables_of"]


def tables_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every table of `model`: its name, the module that has it, and its name there. In all places where it stands."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():  # noqa: SLF001 (torch has no other way to ask)
            if buffer is not None and name in module._non_persistent_buffers_set:  # noqa: SLF001 (as above)
                yield f"{prefix}.{name}" if prefix else name, module, name


def published_tables(model: nn.Module) -> tuple[TableSpec, ...]:
    """What the tables of `model` are as they stand.

    >>> import torch
    >>> class Rotary(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("inv_freq", torch.ones(2), persistent=False)
    >>> print(*published_tables(Rotary()))
    float32 [2] of xxh3 8574b1eb820552229b6204a3f4c0dfc5

    Raises:
        TypeError: one is on the meta device: it has no numbers yet.
    """
    specs = [_spec_of(name, module.get_buffer(own)) for name, module, own in tables_of(model)]
    if empty := [spec.name for spec in specs if not spec.xxh3]:
        raise TypeError(f"expected a model whose tables are computed, got {empty} on the meta device")
    return tuple(specs)


def table_differences(
    published: Sequence[TableSpec] | None, model: nn.Module, made: Mapping[tuple[nn.Module, str], Tensor | None]
) -> list[str]:
    """What to say of each table of `model` that is missing, extra or other than the published one.

    Args:
        published: none where nobody knows them: nothing is compared then.
        model: whoever samples with it.
        made: by module and name there, what tables of the meta device will be; none where that is not known, which is
            said elsewhere.
    """
    if published is None:
        return []
    tables = [(name, made.get((module, own), module.get_buffer(own))) for name, module, own in tables_of(model)]
    untold = {name for name, table in tables if table is None}
    expected = {name: _spec_of(name, table) for name, table in tables if table is not None}
    return list(_lines(expected, {spec.name: spec for spec in published if spec.name not in untold}))


def _lines(expected: Mapping[str, TableSpec], found: Mapping[str, TableSpec]) -> Iterable[str]:
    for name in dict.fromkeys([*expected, *found]):
        wanted, had = expected.get(name), found.get(name)
        if wanted != had:
            numbers = wanted and had and had.xxh3 and wanted[:3] == had[:3]
            why = ": from another configuration or dtype, or changed since" if numbers else ""
            yield f"{name}: expected {wanted or 'no such table'}, found {had or 'none'}{why}"


def _spec_of(name: str, table: Tensor) -> TableSpec:
    dtype = str(table.dtype).removeprefix("torch.")
    digest = "" if table.is_meta else xxhash.xxh3_128_hexdigest(bytes_of(table, dtype).data)
    return TableSpec(name, dtype, tuple(table.shape), digest)
