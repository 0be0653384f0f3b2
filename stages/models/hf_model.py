"""HFModel: a causal model of transformers as a `CausalModel`, from a folder as transformers saves it.

Rows without a cache are packed, those with one are padded on the left. For the kernel `sdpa` `hf_attention` hides keys;
for others transformers finds the sequences of a row by positions that begin anew, and makes the mask. A model with
layers that keep a state has one sequence in a row, with padding on the right alone. The names of the tensors are
transformers' own, so other programs load checkpoints and published weights. Downloads no file.

Axes: B rows, T tokens of this call, V vocabulary, D width of the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any, Self

import anyio.to_thread
import msgspec
import torch
from torch import Tensor, nn

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import InvalidConfig, PenstockError
from ..._pipeline.util.checkpoint import WEIGHTS
from ..._pipeline.util.user_code import raised_text
from ..._pipeline.weights.engine_sync import readable
from ..contracts.attention import Attention
from ..contracts.autocast import autocast_on
from ..contracts.causal_model import CausalModel, Read
from ..contracts.engine_publisher import PublishedWeights
from ..losses.products import dtype_of_inputs, linear
from ..losses.tiles import Finish
from ..tokenizers.end_tokens import CONFIG, GENERATION, generation_ends
from ..tokenizers.json_object import json_object
from . import hf_attention, hf_packing
from . import lora as adapters_of
from .adapter_config import lora_of
from .hf_buffers import compute_buffers
from .hf_cache import HFCache, blocks_with_states, cache_of, lent_states
from .hf_routing import HFRouters
from .lora_config import LoRA
from .model_files import ADAPTER_CONFIG, check_configurations, check_model_files
from .model_identity import model_identity
from .positions import table_positions, trained_positions
from .tied_embedding import add_to_gradient_of_head
from .torch_sharding import device_of
from .torch_weights_file import stored_weights
from .transformers_import import import_transformers, quiet_transformers

log = get_logger("penstock.models")

ADAPTERS = "adapter_model.safetensors"
"""The file of adapters, as peft names it."""


CHECKED_KERNELS = ("eager", "sdpa")
"""Kernels of the attention that are tried on packed sequences as soon as a model is loaded: others are compiled first,
or need a device that the model may get later."""


class HFModel(nn.Module):
    """A `CausalModel` of any causal model of transformers.

    `from_pretrained` reads its weights; `empty` leaves them to a publisher. Needs the extra `train`.
    """

    def __init__(self, module: Any, folder: Path, lora: LoRA | None = None) -> None:
        """Wrap `module`, a causal model of transformers, made of `folder`; insert adapters into it."""
        super().__init__()
        self.folder = folder
        """The folder with its configuration, and perhaps its tokenizer."""
        self.lora = lora
        """Its adapters, if it has any."""
        self.max_positions: int | None = table_positions(module)
        """Number of positions in its table; None if it computes them."""
        self.trained_positions: int | None = trained_positions(module.config)
        """Number of positions that it was made for; None if its configuration lacks it."""
        self.module = module
        """The model itself, of transformers."""
        self._config = json_object(folder / CONFIG)
        self.end_ids: frozenset[int] = generation_ends(folder)
        """The tokens that end its completions, as for transformers' `generate`."""
        self.packs: bool = hf_packing.packs(module)
        """True if a row may have several sequences: no layer keeps a state of the tokens before."""
        self._has_keys = hf_packing.has_keys(module)
        """False if its layers keep states alone, which have no padding to hide."""
        self._one_row = self.packs and module.config._attn_implementation.startswith("flash")  # noqa: SLF001 (there is no public name)
        """True if several rows are passed as one, as its kernel for packed sequences needs them."""
        self._masked_here = hf_attention.replaces(module) and hf_attention.install(module)
        """True if its layers make their masks of `sight`, instead of transformers."""
        self._cache_name = (
            "cache_params" if "cache_params" in signature(module.forward).parameters else "past_key_values"
        )
        """Name of the argument for the cache."""
        self._blocks_with_states = blocks_with_states(module)
        """Layers whose states are lent to them for each call."""
        self._window = hf_attention.window_of(module)
        """Keys that a token of a layer with a sliding window sees, if there are such layers."""
        if lora is not None:
            adapters_of.insert(module, lora)
        _compute_head_in_own_dtype(module.get_output_embeddings())
        add_to_gradient_of_head(module.get_input_embeddings(), module.get_output_embeddings())
        self._finish = _finish_of(module)
        """Function of the products of the head."""
        self._passes_hidden = _is_head_of(module, self._finish)
        """True if logits are this function of the product of hidden states and the weights of the head."""
        self._routers: HFRouters | None = None
        """The routers of its experts, once they are asked for."""
        self._packs: set[tuple[torch.device, torch.dtype]] = set()
        """Devices and dtypes with proof that packed sequences do not see each other."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        attention: str = "sdpa",
        gradient_checkpointing: bool = False,
        device: torch.device | str | None = None,
        lora: LoRA | None = None,
    ) -> Self:
        """Read a model from a folder: of transformers, or a checkpoint of an `HFModel`, adapters included.

        Args:
            folder: a local path.
            dtype: dtype of the parameters; None for float32: small updates are not lost in it. Training in bfloat16 is
                `TorchTrainer(autocast=torch.bfloat16)`.
            attention: the kernel, by transformers' name: `sdpa`, `flash_attention_2`, `flex_attention`, `eager`.
            gradient_checkpointing: compute the activations of a layer again in the backward pass instead of storing
                them: less memory for about a third more computation.
            device: device of the parameters; None for the host.
            lora: adapters that train instead of the parameters.

        Raises:
            CheckpointDamaged: a file of a checkpoint or of an exported model is not as it was written.
            InvalidConfig: the folder has no model or a broken one, this kernel does not compute it, its packed
                sequences influence each other, or adapters name no layer of it.
            MissingExtra: transformers or peft is not installed.
        """
        path, saved = Path(folder).absolute(), None
        check_model_files(path)
        if (path / ADAPTER_CONFIG).is_file():
            saved = path / ADAPTERS
            lora, path = lora_of(path)
            check_model_files(path)
        _check(path, attention)
        with quiet_transformers("HFModel") as transformers, _refusals_of(path):
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            module, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype or torch.float32,
                attn_implementation=_kernel_to_load(transformers, config, attention),
                local_files_only=True,
                output_loading_info=True,
            )
        if missing := sorted(loaded["missing_keys"]):
            raise InvalidConfig(
                f"{path}: expected all weights of a {type(module).__name__}, got none of {', '.join(missing[:5])} "
                f"({len(missing)} are missing), which transformers would draw at random: save the model again"
            )
        hf_packing.check_layers(module, str(path))
        if gradient_checkpointing:
            _checkpoint_activations(module)
        model = cls(module, path, lora)
        if saved is not None:
            model.load_state_dict(dict(stored_weights(saved)))
        model = (model if device is None else model.to(device)).eval()
        if attention in CHECKED_KERNELS:
            with _refusals_of(path):
                model.check_packing()
        return model

    @classmethod
    def empty(cls, folder: str | Path, *, dtype: torch.dtype | None = None, attention: str = "sdpa") -> Self:
        """Make a model without weights, on the meta device, for a sampler that gets weights from a publisher.

        Raises:
            CheckpointDamaged: a configuration of a checkpoint or of an exported model is not as it was written.
            InvalidConfig: the folder has no model or a broken one, or one that this kernel does not compute, or with
                a state that is not known.
            MissingExtra: transformers is not installed.
        """
        path = Path(folder).absolute()
        check_configurations(path)
        _check(path, attention)
        transformers = import_transformers("HFModel")
        with torch.device("meta"), _refusals_of(path):
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            module = transformers.AutoModelForCausalLM.from_config(
                config,
                dtype=dtype or torch.float32,
                attn_implementation=_kernel_to_load(transformers, config, attention),
            )
        hf_packing.check_layers(module, str(path))
        compute_buffers(module)
        return cls(module, path).eval()

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attend: Attention,
        cache: Any = None,
        read: Read | None = None,
    ) -> Any:
        """Return logits [B, T, V] float32; with a cache those of the last token alone, [B, 1, V]. See `CausalModel`."""
        if read is not None and self._passes_hidden:
            row = (1, -1) if self._one_row else tokens.shape
            found = self.module.base_model(
                input_ids=tokens.view(row),
                position_ids=positions.view(row),
                attention_mask=self._mask(attend),
                use_cache=False,
            )
            hidden = found.last_hidden_state.view(*tokens.shape, -1)
            return self.module.get_output_embeddings()(hidden, self._finish, read)
        if cache is not None:
            with lent_states(self._blocks_with_states, cache.states):
                found = self.module(
                    input_ids=tokens,
                    attention_mask=self._mask(attend, cached=True),
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{self._cache_name: cache.states},
                )
            cache.length += tokens.shape[1]
        elif self._one_row:
            found = self.module(input_ids=tokens.view(1, -1), position_ids=positions.view(1, -1), use_cache=False)
        else:
            mask = self._mask(attend)
            found = self.module(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False)
        logits: Tensor = found.logits.float()
        if cache is not None:
            return logits
        logits = logits.view(*tokens.shape, -1)
        return logits if read is None else read(logits, None)

    def _mask(self, attend: Attention, *, cached: bool = False) -> Tensor | None:
        """Return the attention mask for transformers. It finds the sequences of packed rows by itself."""
        if not self._masked_here:
            alone = not self.packs and attend.tokens == attend.sequences.shape[1]  # rows of one length
            return attend.sequences >= 0 if cached and self._has_keys and not alone else None
        if cached and attend.tokens in {1, attend.sequences.shape[1]} and not bool((attend.sequences < 0).any()):
            attend = attend._replace(one_sequence=True)
        return hf_attention.sight(attend, self._compute_dtype(attend.sequences.device), self._window)

    def _compute_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of queries."""
        own: torch.dtype = next(self.module.parameters()).dtype
        return autocast_on(device) or own

    def new_cache(self, batch: int, capacity: int) -> HFCache:  # noqa: ARG002 (it grows as it is filled)
        """Return an empty cache; see `CausalModel`."""
        states = import_transformers("HFModel").DynamicCache(config=self.module.config)
        return cache_of(states, self.module.config)

    def check_packing(self) -> None:
        """Check that packed sequences do not see each other, on this device; see `PackingModel`.

        Raises:
            InvalidConfig: they do.
        """
        device = device_of(next(self.parameters()))
        tried = device, self._compute_dtype(device)
        if tried in self._packs:
            return
        hf_packing.check_layers(self.module, str(self.folder))
        training = self.training
        self.eval()
        try:
            hf_packing.check_calls(self, *tried, str(self.folder))
            if self.samples:
                hf_packing.check_cached(self, *tried, str(self.folder))
        finally:
            self.train(training)
        self._packs.add(tried)

    def routers(self) -> HFRouters:
        """Return the routers of its experts; see `RoutedModel`.

        Raises:
            InvalidConfig: it has none, or some whose choice cannot be given.
        """
        self._routers = self._routers or HFRouters(self.module, str(self.folder))
        return self._routers

    @property
    def samples(self) -> bool:
        """Return whether it has logits that a sampler draws from, with a cache."""
        return True

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that the model reads, the rows of its embedding."""
        return len(self.module.get_input_embeddings().weight)

    # -- tensors, by transformers' names -------------------------------------------------------------------------------

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield this module, and those of transformers by their own names: those of the tensors follow from them."""
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # one for both overloads
        """Return the tensors that train: the model's, or its adapters by the names in peft's files."""
        if self.lora is not None:
            return adapters_of.adapters(self.module)
        tensors: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return tensors

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Load tensors as in `state_dict()`; see `torch.nn.Module.load_state_dict`.

        Raises:
            WeightsMismatch: they are not the tensors of this model's adapters.
        """
        if self.lora is not None:
            return adapters_of.load_adapters(self.module, state_dict)
        return self.module.load_state_dict(state_dict, strict, assign)

    def merged(self) -> dict[str, Tensor]:
        """Return the model's tensors by name, with the adapters added to them if it has any."""
        return adapters_of.merged(self.module) if self.lora is not None else self.state_dict()

    def reference(self) -> CausalModel:
        """Return the model without its adapters, as the reference of a trainer; it takes no memory.

        Raises:
            InvalidConfig: the model has no adapters, so the reference would train with it.
        """
        if self.lora is None:
            raise InvalidConfig(
                "lora: expected a model with adapters, whose parameters stay as they are, got one without: load the "
                "reference with HFModel.from_pretrained(folder)"
            )
        return _Unadapted(self)

    # -- files ---------------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Return the identity of the model in its folder, and that of its adapters; see `model_identity`."""
        lora = None if self.lora is None else msgspec.structs.asdict(self.lora)
        adapters = None if lora is None else {key: lora[key] for key in ("rank", "alpha", "targets")}
        return {"base": model_identity(self.folder), "adapters": adapters}

    def compare(self, checkpoint: Path) -> None:
        """Warn if the adapters in `checkpoint` were trained with another scale: no tensor has it. Blocks."""
        if self.lora is None or not (checkpoint / ADAPTER_CONFIG).is_file():
            return
        trained, _ = lora_of(checkpoint)
        if trained.alpha != self.lora.alpha:
            log.warning("adapter_scale_differs", checkpoint=str(checkpoint), before=trained.alpha, now=self.lora.alpha)

    @property
    def weights_file(self) -> str:
        """Return the name of the file for `state_dict()`."""
        return WEIGHTS if self.lora is None else ADAPTERS

    def write_files(self, folder: Path) -> None:
        """Write the files that transformers, peft and vLLM need beside the weights into `folder`."""
        if self.lora is not None:
            adapters_of.write_config(self.module, self.lora, folder, self.folder)
        else:
            self.write_config(folder)

    def write_config(self, folder: Path) -> None:
        """Write `config.json` and, if there is one, `generation_config.json` into `folder`."""
        key = "torch_dtype" if "torch_dtype" in self._config else "dtype"
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        config = self._config | {key: dtype}  # the file's own layout, which older programs may need
        (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        if (self.folder / GENERATION).is_file():
            shutil.copyfile(self.folder / GENERATION, folder / GENERATION)


class MergedWeights:
    """A publisher of a model with adapters for engines without: publishes the model's tensors, adapters added to them.

    EnginePublisher(MergedWeights(WeightFolder(folder, model.merged()), model), [engine])
    """

    def __init__(self, weights: PublishedWeights, model: HFModel) -> None:
        """Publish by `weights`, made of `model.merged()`."""
        self._weights = weights
        self._model = model

    def __repr__(self) -> str:
        return f"<MergedWeights of {self._weights!r}>"

    @property
    def url(self) -> str:
        """Return the URL for subscribers."""
        return self._weights.url

    @property
    def version(self) -> int:
        """Return the newest version; −1 before the first."""
        return self._weights.version

    async def publish(self, tensors: Mapping[str, Any], version: int) -> None:  # noqa: ARG002 (the adapters, which the model has)
        """Make the merged tensors of the model the newest weights.

        Raises:
            Exception: see the publisher's `publish`.
        """
        await self._weights.publish(await anyio.to_thread.run_sync(self._model.merged), version)

    async def written(self) -> None:
        """Wait until the newest version can be loaded.

        Raises:
            PenstockError: it could not be written.
        """
        await readable(self._weights)


class _Unadapted:
    """A model whose adapters are switched off during a call: a `CausalModel` that shares its memory."""

    def __init__(self, model: HFModel) -> None:
        self._model = model

    def __call__(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attend: Attention,
        cache: Any = None,
        read: Read | None = None,
    ) -> Any:
        """Return logits; see `CausalModel`."""
        adapters_of.switch(self._model.module, on=False)
        try:
            return self._model.forward(tokens, positions=positions, attend=attend, cache=cache, read=read)
        finally:
            adapters_of.switch(self._model.module, on=True)

    @property
    def packs(self) -> bool:
        """Return whether a row may have several sequences."""
        return self._model.packs

    def new_cache(self, batch: int, capacity: int) -> HFCache:
        """Return an empty cache; see `CausalModel`."""
        return self._model.new_cache(batch, capacity)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002, ARG002 (torch's own signature)
        """Leave the mode to the model."""
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the model, adapters included."""
        return self._model.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return no tensors: it never changes."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept no tensors: it never changes.

        Raises:
            ValueError: there are some.
        """
        if state_dict:
            raise ValueError(f"expected no tensors for a model that never changes, got {sorted(state_dict)}")


def _compute_head_in_own_dtype(head: nn.Module) -> None:
    """Have `head` return logits in the dtype of its weights, also under autocast, or pass itself to a function.

    In bfloat16 its logits have three significant digits, and every ratio of probabilities is wrong by percents. Its
    inputs may be bfloat16 where a device sums them in float32; see `dtype_of_inputs`.
    """
    head.forward = MethodType(_head, head)


def _head(head: Any, hidden: Tensor, finish: Finish | None = None, read: Read | None = None) -> Any:
    if read is not None:  # inside a call of the head, which gathers its weights if they are sharded
        return read(hidden, head.weight, head.bias, finish)
    dtype = dtype_of_inputs(head.weight, autocast_on(hidden.device))
    with torch.autocast(hidden.device.type, enabled=False):
        if type(head) is nn.Linear:
            return linear(hidden.to(dtype), head.weight, head.bias)
        return type(head).forward(head, hidden.to(head.weight.dtype))


def _finish_of(module: Any) -> Finish | None:
    """Return the function from products of the head to logits of `module`, by the names of transformers."""
    config = module.config.get_text_config()
    bound = getattr(config, "final_logit_softcapping", None)
    factor = getattr(module, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    if bound is not None:
        return partial(_softcapped, bound=bound)
    if divisor is not None:
        return partial(_divided, divisor=divisor)
    return None if factor is None else partial(torch.mul, other=factor)


def _softcapped(products: Tensor, bound: float) -> Tensor:
    return torch.tanh(products / bound) * bound


def _divided(products: Tensor, divisor: float) -> Tensor:
    return products / divisor


def _is_head_of(module: Any, finish: Finish | None) -> bool:
    """Return whether `module` makes its logits by a linear head of its base model's hidden states, and `finish`.

    Calls `module` with both replaced, so that anything else that it does shows in the result.
    """
    base, head = module.base_model, module.get_output_embeddings()
    if base is module or type(head) is not nn.Linear:
        return False
    hidden, seen = torch.linspace(-1, 1, head.in_features)[None, None], list[Tensor]()
    products = torch.linspace(-100, 100, head.out_features)[None, None]

    def multiplied(states: Tensor) -> Tensor:
        seen.append(states)
        return products

    with _replaced(base, lambda **_: _Hidden(hidden)), _replaced(head, multiplied):
        zero = torch.zeros(1, 1, dtype=torch.int64)
        try:
            logits = module(input_ids=zero, position_ids=zero, use_cache=False).logits
        except (AttributeError, KeyError, RuntimeError, TypeError):  # it expects more of its base model
            return False
    if len(seen) != 1 or seen[0].is_meta:  # it calls another module than its base model, which may have no weights
        return False
    expected = products if finish is None else finish(products)
    return torch.equal(seen[0], hidden) and torch.equal(logits, expected)


class _Hidden(dict[str, Any]):
    """The output of a base model: hidden states alone."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__("last_hidden_state" if key == 0 else key)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Call `forward` in place of that of `module` within the body."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _check(folder: Path, attention: str) -> None:
    if not (folder / CONFIG).is_file():
        raise InvalidConfig(
            f"{folder}: expected a model as transformers' save_pretrained(folder) writes it, got no {CONFIG}: give the "
            f"path of a folder (no model is downloaded)"
        )
    if attention == "sdpa" and json_object(folder / CONFIG).get("attn_logit_softcapping") is not None:
        raise InvalidConfig(
            f'{folder}: expected a model that attention="sdpa" computes, got one that bounds its attention scores '
            f'(attn_logit_softcapping): give attention="eager", or "flex_attention"'
        )


@contextmanager
def _refusals_of(folder: Path) -> Iterator[None]:
    """Report exceptions of transformers and safetensors in the body as a mistake in `folder`, or in the arguments."""
    try:
        yield
    except (PenstockError, OSError, MemoryError):
        raise
    except Exception as error:  # a configuration reaches the code of any model
        said = " ".join(raised_text(error).split())
        raise InvalidConfig(f"{folder}: expected a model that transformers can make here, got: {said}") from error


def _kernel_to_load(transformers: Any, config: Any, attention: str) -> str:
    """Return the kernel to load a model of `config` with; see `hf_attention.kernel_to_load`."""
    classes = transformers.AutoModelForCausalLM._model_mapping  # noqa: SLF001 (there is no public name)
    return hf_attention.kernel_to_load(classes[type(config)], attention) if type(config) in classes else attention


def _checkpoint_activations(module: Any) -> None:
    if hasattr(module, "activation_checkpointing_enable"):  # its name in transformers 5 and later
        module.activation_checkpointing_enable({"use_reentrant": False})
    else:
        module.gradient_checkpointing_enable({"use_reentrant": False})
