"""The logits of an HFModel are those of transformers, for packed, padded and cached rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cells import cells
from tests.models_hf.packed import logits_of_transformers, packed_rows
from torch import Tensor

from penstock import Worker
from penstock.errors import InvalidConfig
from penstock.models import HFModel
from penstock.policies import SamplingParams
from penstock.torch import Attention, TorchPolicy, positions_of

transformers = pytest.importorskip("transformers")

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma 3"]

ModelFolder = Callable[[str], Path]

SEQUENCES = [torch.arange(n) * 7 % 300 + n for n in (9, 6, 3)]
"""Longer than the windows of 4 tokens."""


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_each_packed_sequence_has_the_logits_of_transformers(family: str, model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder(family))
    first, second, third = SEQUENCES
    tokens, positions, attend = packed_rows([first], [second, third[:2]])

    logits = model(tokens, positions=positions, attend=attend)

    assert logits.dtype == torch.float32
    for found, sequence in ((logits[0], first), (logits[1], second), (logits[1, 6:], third[:2])):
        expected = logits_of_transformers(model_folder(family), sequence)
        torch.testing.assert_close(found[: len(sequence)], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_left_padded_rows_with_a_cache_have_the_logits_of_transformers(family: str, model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder(family))
    first, second, _ = SEQUENCES
    prompts, rest = [first[:5], second[:2]], [first[5:], second[2:]]
    real = torch.tensor([[True] * 5, [False] * 3 + [True] * 2])
    tokens = torch.stack([prompts[0], torch.cat([torch.zeros(3, dtype=torch.int64), prompts[1]])])
    cache = model.new_cache(2, 9)

    found = [model(tokens, positions=positions_of(real), attend=Attention.causal(real), cache=cache)]
    cache.keep(torch.tensor([1, 0]))
    for step in range(4):
        real = torch.nn.functional.pad(real, (0, 1), value=True)
        chosen = torch.tensor([[rest[1][step]], [rest[0][step]]])
        positions = torch.tensor([[2 + step], [5 + step]])
        found.append(model(chosen, positions=positions, attend=Attention.causal(real[[1, 0]], 1), cache=cache))

    assert cache.length == 9
    for row, (sequence, begin) in enumerate([(first, 5), (second, 2)]):
        expected = logits_of_transformers(model_folder(family), sequence)[begin - 1 : begin + 4]
        each = [found[0][row], *(logits[1 - row] for logits in found[1:])]
        torch.testing.assert_close(torch.cat(each), expected, atol=2e-6, rtol=0)


class Rows:
    """Rows of a cache, each of which reads its sequence token by token."""

    def __init__(self, model: HFModel, sequence: Tensor, begin: int) -> None:
        """Read the first `begin` tokens of a sequence."""
        self.model = model
        self.sequences, self.read = [sequence], [begin]
        self.cache: Any = model.new_cache(1, len(sequence))
        attend = Attention.causal(torch.ones(1, begin, dtype=torch.bool))
        logits = model(sequence[None, :begin], positions=torch.arange(begin)[None], attend=attend, cache=self.cache)
        self.found = [[logits[0]]]

    def join(self, other: Rows) -> None:
        self.cache.join(other.cache)
        self.sequences, self.read = self.sequences + other.sequences, self.read + other.read
        self.found += other.found

    def keep(self, row: int) -> list[Tensor]:
        """Keep one row, cut its padding, and return the logits of the row that leaves."""
        gone = self.found[1 - row]
        self.cache.keep(torch.tensor([row]))
        self.sequences, self.read, self.found = [self.sequences[row]], [self.read[row]], [self.found[row]]
        self.cache.cut(self.cache.length - self.read[0])
        return gone

    def step(self) -> None:
        tokens = torch.stack([sequence[at] for sequence, at in zip(self.sequences, self.read, strict=True)])[:, None]
        read = torch.tensor(self.read)[:, None]
        seen = torch.arange(self.cache.length + 1) >= self.cache.length - read
        logits = self.model(tokens, positions=read, attend=Attention.causal(seen, 1), cache=self.cache)
        for row, found in enumerate(self.found):
            found.append(logits[row])
        self.read = [at + 1 for at in self.read]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("begin", "joins"), cells([(5, 2), (1, 6), (7, 6)], run=[(7, 6)]), ids=["shorter", "longer", "beyond the window"]
)
@torch.inference_mode()
def test_rows_that_join_and_leave_a_cache_have_the_logits_of_transformers(
    family: str, begin: int, joins: int, model_folder: ModelFolder
) -> None:
    model = HFModel.from_pretrained(model_folder(family))
    first, second = torch.arange(11) * 7 % 300 + 9, torch.arange(12) * 5 % 300 + 4

    rows = Rows(model, first, begin)
    rows.step()
    rows.join(Rows(model, second, joins))
    for _ in range(2):
        rows.step()
    gone = rows.keep(1)
    rows.step()
    rows.join(Rows(model, first, 2))
    for _ in range(2):
        rows.step()

    assert rows.cache.length == max(rows.read)
    for found, sequence, start in ((gone, first, begin), (rows.found[0], second, joins), (rows.found[1], first, 2)):
        logits = torch.cat(found)
        expected = logits_of_transformers(model_folder(family), sequence)[start - 1 :][: len(logits)]
        torch.testing.assert_close(logits, expected, atol=2e-6, rtol=0)


@torch.inference_mode()
def test_a_cache_is_copied_once_for_many_tokens(model_folder: ModelFolder) -> None:
    rows = Rows(HFModel.from_pretrained(model_folder("llama")), torch.arange(60) * 7 % 300, 5)
    memory = {rows.cache.states.layers[0].keys.data_ptr()}

    for _ in range(54):
        rows.step()
        memory.add(rows.cache.states.layers[0].keys.data_ptr())

    assert len(memory) == 1
    expected = logits_of_transformers(model_folder("llama"), rows.sequences[0])[4:-1]
    torch.testing.assert_close(torch.cat(rows.found[0]), expected, atol=2e-6, rtol=0)


def test_logits_with_a_cache_can_be_differentiated(model_folder: ModelFolder) -> None:
    rows = Rows(HFModel.from_pretrained(model_folder("llama")), torch.arange(8) * 7, 5)

    for _ in range(2):
        rows.step()

    torch.autograd.backward(torch.cat(rows.found[0]).logsumexp(-1).sum())
    assert all(parameter.grad is not None for parameter in rows.model.parameters())


@pytest.mark.long  # compiling the kernel takes 20 s
@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.inference_mode()
def test_a_kernel_with_block_masks_computes_the_same_for_packed_rows(family: str, model_folder: ModelFolder) -> None:
    tokens, positions, attend = packed_rows(SEQUENCES[:1], SEQUENCES[1:])

    dense, blocks = (
        HFModel.from_pretrained(model_folder(family), attention=attention)(tokens, positions=positions, attend=attend)
        for attention in ("sdpa", "flex_attention")
    )

    torch.testing.assert_close(blocks[attend.sequences >= 0], dense[attend.sequences >= 0], atol=5e-6, rtol=0)


@torch.inference_mode()
def test_rows_that_are_passed_as_one_have_the_same_logits(model_folder: ModelFolder) -> None:
    """Kernels for packed sequences take one row; a mask of transformers hides the same from it."""
    model = HFModel.from_pretrained(model_folder("mistral"), attention="eager")
    tokens, positions, attend = packed_rows(SEQUENCES[:1], SEQUENCES[1:])
    separate = model(tokens, positions=positions, attend=attend)

    model._one_row = True
    together = model(tokens, positions=positions, attend=attend)

    torch.testing.assert_close(together[attend.sequences >= 0], separate[attend.sequences >= 0], atol=2e-6, rtol=0)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no config.json: give the path of a folder \(no model is downloaded\)"):
        HFModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", lambda content: content[:-1000], "Error while deserializing header"),
        ("config.json", lambda content: content[:-10], "expected a JSON object, got"),
        ("config.json", lambda content: content.replace(b'"qwen2"', b'"none"'), "model type `none`"),
        ("config.json", lambda content: content.replace(b": 320", b": 319"), "got: "),
    ],
    ids=["torn weights", "torn configuration", "an unknown type", "another vocabulary"],
)
def test_a_broken_folder_is_refused_by_its_path(
    file: str, content: Callable[[bytes], bytes], message: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    for path in model_folder("qwen2").iterdir():
        (tmp_path / path.name).write_bytes(content(path.read_bytes()) if path.name == file else path.read_bytes())

    with pytest.raises(InvalidConfig) as refused:
        HFModel.from_pretrained(tmp_path)

    assert str(tmp_path) in str(refused.value)
    assert message in str(refused.value)


def test_a_folder_without_some_weights_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    for path in model_folder("qwen2").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(InvalidConfig, match=r"got none of model.layers.1.mlp.up_proj.weight \(1 are missing\)"):
        HFModel.from_pretrained(tmp_path)


async def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(model_folder: ModelFolder) -> None:
    make_model = partial(HFModel.from_pretrained, model_folder("qwen2"))

    async with TorchPolicy(make_model, eos_id=0).open(Worker()) as engine:
        with pytest.raises(InvalidConfig, match=r"tokens below 320, the rows of the model's embedding, got token 320"):
            await engine.generate([np.array([5], np.int32), np.array([7, 320], np.int32)], SamplingParams())


def test_a_model_that_bounds_its_attention_scores_is_refused_by_sdpa(model_folder: ModelFolder) -> None:
    for make in (HFModel.from_pretrained, HFModel.empty):
        with pytest.raises(InvalidConfig, match=r'bounds its attention scores .*: give attention="eager"'):
            make(model_folder("gemma 2"))


@torch.inference_mode()
def test_a_model_without_sdpa_is_packed_by_eager_attention(model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder("gemma 2"), attention="eager")
    tokens, positions, attend = packed_rows(SEQUENCES[1:])

    logits = model(tokens, positions=positions, attend=attend)

    expected = logits_of_transformers(model_folder("gemma 2"), SEQUENCES[2])
    torch.testing.assert_close(logits[0, 6:], expected, atol=2e-6, rtol=0)


def test_under_autocast_the_head_computes_in_float32(model_folder: ModelFolder) -> None:
    model = HFModel.from_pretrained(model_folder("qwen2"))
    tokens, positions, attend = packed_rows(SEQUENCES[:1])
    seen: list[Tensor] = []
    head: Any = model.module.get_output_embeddings()
    head.register_forward_hook(lambda _, given, logits: seen.extend([*given, logits]))

    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, positions=positions, attend=attend)

    hidden, logits = seen
    torch.testing.assert_close(logits, hidden.float() @ head.weight.T, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_gradients_are_the_same_with_checkpointed_activations(family: str, model_folder: ModelFolder) -> None:
    tokens, positions, attend = packed_rows(SEQUENCES[:1], SEQUENCES[1:])
    gradients = []
    for checkpointing in (False, True):
        model = HFModel.from_pretrained(model_folder(family), gradient_checkpointing=checkpointing).train()
        torch.autograd.backward(model(tokens, positions=positions, attend=attend).logsumexp(-1).sum())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})

    torch.testing.assert_close(gradients[0], gradients[1])
