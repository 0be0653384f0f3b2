"""The tensors that leave a trainer: the weights of its model, and the moments of its optimizer.

Those of a model that ranks share have an address, so that the leader can have each gathered when it is read; the others
are themselves. Knows no ranks and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ..._pipeline.weights.weight_specs import LazyTensors, specs_of
from ..contracts.causal_model import CausalModel
from ..models.gathering import gathered_to_leader
from ..models.torch_sharding import is_sharded
from .torch_optimizer import GivenOptimizer, moment_name


class Address(NamedTuple):
    """The place of a tensor that ranks share, the same on each of them."""

    number: int
    """That of the parameter in its model."""
    moment: str = ""
    """The name of a tensor in the optimizer's state of that parameter; empty for the parameter itself."""


Gather: TypeAlias = Callable[[Address], Tensor]
"""Has all ranks gather a tensor, and returns the whole of it."""


class SavedTensors:
    """The tensors of a model and its optimizer, by name."""

    def __init__(self, model: CausalModel, optimizer: GivenOptimizer) -> None:
        """Number the tensors of `model`, which stay the same objects while it trains."""
        self._model = model
        self._optimizer = optimizer
        self._numbered = [*model.parameters()]
        self._numbers = {_memory_of(tensor): number for number, tensor in enumerate(self._numbered)}

    def gather(self, address: Address) -> Tensor:
        """Return the whole tensor on rank 0, and one on the meta device on the others; all ranks call this."""
        tensor = self._numbered[address.number]
        return gathered_to_leader(self._optimizer.moment(tensor, address.moment) if address.moment else tensor)

    def weights(self, gather: Gather) -> Mapping[str, Tensor]:
        """Return the model's tensors by name: not copies, but for shards, which are gathered when they are read."""
        tensors: dict[str, Tensor] = self._model.state_dict()
        return _read_by(gather, tensors, {name: self._address(each) for name, each in tensors.items()})

    def moments(self, gather: Gather) -> Mapping[str, Tensor]:
        """Return the optimizer's moments by name, as `weights` does."""
        moments = self._optimizer.moments()
        named = {moment_name(index, key): each for (index, key), each in moments.items()}
        parameters = self._optimizer.parameters
        addresses = {moment_name(index, key): self._address(parameters[index], key) for index, key in moments}
        return _read_by(gather, named, addresses)

    def _address(self, tensor: Tensor, moment: str = "") -> Address | None:
        number = self._numbers.get(_memory_of(tensor))
        return None if number is None else Address(number, moment)


def _read_by(
    gather: Gather, tensors: Mapping[str, Tensor], addresses: Mapping[str, Address | None]
) -> Mapping[str, Tensor]:
    shared = {name: addresses[name] for name, tensor in tensors.items() if is_sharded(tensor)}
    if not shared:
        return tensors

    def read(name: str) -> Tensor:
        return gather(address) if (address := shared.get(name)) else tensors[name]

    return LazyTensors(specs_of(tensors), read)


def _memory_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, the same for one that is detached; a sharded one has no address."""
    memory: int = tensor.untyped_storage()._cdata  # noqa: SLF001 (torch has no public name for it)
    return memory
