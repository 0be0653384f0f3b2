"""The tensors that leave a trainer: the weights of its model, and the moments of its optimizer.

Those of a model that ranks share have an address, so that the leader can have each gathered when it is read; the others
are themselves. Knows no ranks and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ..._pipeline.weights.weight_specs import LazyTensors, memory_of, specs_of
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
    judges: bool = False
    """True for a tensor of the critic."""


Gather: TypeAlias = Callable[[Address], Tensor]
"""Has all ranks gather a tensor, and returns the whole of it."""


class SavedTensors:
    """The tensors of a model and its optimizer, by name."""

    def __init__(self, model: CausalModel, optimizer: GivenOptimizer, *, judges: bool) -> None:
        """Number the tensors of `model`, a critic or not, which stay the same objects while it trains."""
        self._judges = judges
        self._model = model
        self._optimizer = optimizer
        self._numbered = [*model.parameters()]
        self._numbers = {memory_of(tensor): number for number, tensor in enumerate(self._numbered)}

    def gather(self, address: Address) -> Tensor:
        """Return the whole tensor on rank 0, and one on the meta device on the others; all ranks call this."""
        tensor = self._numbered[address.number]
        return gathered_to_leader(self._optimizer.moment(tensor, address.moment) if address.moment else tensor)

    def weights(self, gather: Gather) -> Mapping[str, Tensor]:
        """Return the model's tensors by name: not copies, but for shards, which are gathered when they are read."""
        tensors: dict[str, Tensor] = self._model.state_dict()
        return _read_by(gather, tensors, lambda name: self._address(tensors[name]))

    def moments(self, gather: Gather) -> Mapping[str, Tensor]:
        """Return the optimizer's moments by name, as `weights` does."""
        moments, parameters = self._optimizer.moments(), self._optimizer.parameters
        places = {moment_name(*place): place for place in moments}
        named = {name: moments[place] for name, place in places.items()}

        def address(name: str) -> Address:
            index, key = places[name]
            return self._address(parameters[index], key)

        return _read_by(gather, named, address)

    def _address(self, parameter: Tensor, moment: str = "") -> Address:
        """Return the address of a parameter, given as itself or as in a `state_dict`, or of a moment of it."""
        return Address(self._numbers[memory_of(parameter)], moment, self._judges)


def _read_by(gather: Gather, tensors: Mapping[str, Tensor], address: Callable[[str], Address]) -> Mapping[str, Tensor]:
    """Return `tensors`, each sharded one gathered by its address whenever it is read."""
    shared = {name: address(name) for name, tensor in tensors.items() if is_sharded(tensor)}
    if not shared:
        return tensors
    return LazyTensors(specs_of(tensors), lambda name: gather(shared[name]) if name in shared else tensors[name])
