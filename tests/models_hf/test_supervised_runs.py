"""A run with the loss sft imitates the turns of the assistant in conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from tests.letter_model import write_letter_model
from tests.models_hf.chat_families import FAMILIES, write_tokenizer
from tests.models_hf.chat_templates import CHATML, LLAMA, MISTRAL, QWEN, THINKING_AHEAD, tokenizer_folder

from penstock import Batcher, Pipeline, SinkTrainer, TrainBatch, source
from penstock.chat import ChatFormat
from penstock.data import Demonstrations, PromptDataset
from penstock.errors import InvalidConfig, InvalidData, NothingTrained, PenstockError, UnstableTemplate
from penstock.losses import AdvantageWeighted
from penstock.models import HFModel
from penstock.policies import PretrainedTokenizer
from penstock.runs import Summary, load_run_config, train
from penstock.torch import TorchTrainer


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED, AGAIN = said("user", "an answer?"), said("user", "sure?")
YES, NO = said("assistant", "yes"), said("assistant", "\nno")
THOUGHT = said("assistant", "<think>a</think>yes")
UNTRAINED = YES | {"weight": 0}
CALL, RESULT = said("assistant", ""), said("tool", "b", tool_call_id="a")


def demonstrations(folder: Path, rows: Sequence[Any], **options: Any) -> Demonstrations:
    rows = [{"messages": row} for row in rows]
    chat = ChatFormat(PretrainedTokenizer(folder))
    return Demonstrations(PromptDataset(rows, prompt="messages", shuffle=False, chat=chat), **options)


def spoken(demonstrated: Demonstrations) -> tuple[list[str], str]:
    """Return the stretches of the first conversation that train, and the whole, as text."""
    group, decode = demonstrated.check(), demonstrated.data.tokenizer.decode
    stretches = groupby(range(len(group.tokens)), lambda place: bool(group.loss_mask[place]))
    return [decode(group.tokens[list(places)].tolist()) for trains, places in stretches if trains], decode(
        group.tokens.tolist()
    )


# -- the tokens that train ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "trained"),
    [
        (CHATML, [ASKED, YES], ["yes<|im_end|>"]),
        (CHATML, [ASKED, YES, AGAIN, NO], ["yes<|im_end|>", "\nno<|im_end|>"]),
        (CHATML, [said("system", "short"), ASKED, UNTRAINED, AGAIN, NO], ["\nno<|im_end|>"]),
        (CHATML, [ASKED, YES, AGAIN], ["yes<|im_end|>"]),
        (CHATML, [YES, ASKED, NO], ["yes<|im_end|>", "\nno<|im_end|>"]),
        (LLAMA, [ASKED, YES, AGAIN, YES], ["yes<|eot_id|>", "yes<|eot_id|>"]),
        (MISTRAL, [ASKED, YES, AGAIN, YES], [" yes</s>", " yes</s>"]),
        (QWEN, [ASKED, THOUGHT], ["<think>a</think>yes<|im_end|>"]),
        (QWEN, [ASKED, UNTRAINED, AGAIN, THOUGHT], ["<think>a</think>yes<|im_end|>"]),
        (THINKING_AHEAD, [ASKED, said("assistant", "<think>\nyes")], ["yes<|im_end|>"]),
    ],
)
def test_the_content_of_each_turn_and_its_end_train(
    template: str, messages: Any, trained: list[str], tmp_path: Path
) -> None:
    demonstrated = demonstrations(tokenizer_folder(tmp_path / "tokenizer", template), [messages])

    found, whole = spoken(demonstrated)

    assert found == trained
    rendered: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer").apply_chat_template(
        [{key: value for key, value in message.items() if key != "weight"} for message in messages], tokenize=False
    )
    assert rendered.startswith(whole)


@pytest.mark.parametrize(
    ("family", "trained"),
    [
        ("gemma 3", ["yes<end_of_turn>", "yes<end_of_turn>"]),
        ("phi 3", ["yes<|end|>", "yes<|end|>"]),
        ("glm 4", ["yes<|user|>", "yes<|endoftext|>"]),
    ],
)
def test_a_turn_ends_with_the_token_after_it_and_one_that_has_none_with_the_end_of_a_text(
    family: str, trained: list[str], tmp_path: Path
) -> None:
    chosen, folder = FAMILIES[family], tmp_path / "tokenizer"
    letters = [*"abcdefghijklmnopqrstuvwxyz \n?"]
    write_tokenizer(chosen, {token: number for number, token in enumerate([*letters, *chosen.special])}, folder)
    if chosen.generation is not None:
        ids = PretrainedTokenizer(folder).get_vocab()
        ends = [chosen.generation] if isinstance(chosen.generation, str) else chosen.generation
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[end] for end in ends]}))

    found, _ = spoken(demonstrations(folder, [[ASKED, YES, AGAIN, YES]]))

    assert found == trained


@pytest.mark.parametrize(
    ("template", "messages", "error", "message"),
    [
        (QWEN, [ASKED, THOUGHT, AGAIN, YES], UnstableTemplate, 'give the earlier turns of the assistant "weight": 0'),
        (THINKING_AHEAD, [ASKED, YES], UnstableTemplate, "begin the content with what is missing"),
        (CHATML, [ASKED], InvalidData, "expected a turn of the assistant that trains, got the roles user"),
        (CHATML, [ASKED, UNTRAINED], InvalidData, "expected a turn of the assistant that trains"),
        (CHATML, [ASKED, YES | {"weight": 0.5}], InvalidData, "messages[1].weight: expected 0 or 1, got 0.5"),
        (CHATML, [ASKED | {"role": None}, YES], InvalidData, "messages[0].role: expected text, got None"),
        (CHATML, [ASKED | {"role": ["user"]}, YES], InvalidData, "messages[0].role: expected text, got ['user']"),
        (CHATML, [CALL | {"tool_calls": 5}, RESULT, YES], InvalidData, "messages[0].tool_calls: expected a list of"),
        (
            CHATML,
            [CALL | {"tool_calls": ["f"]}, RESULT, YES],
            InvalidData,
            "messages[0].tool_calls: expected a list of",
        ),
        (CHATML, "text", InvalidData, "rows: row 0, column 'messages': expected a list of messages with role"),
        (CHATML, [ASKED, said("assistant", "y" * 60)], InvalidData, "conversation longer than 60 tokens"),
        (CHATML, [ASKED, YES] * 250, InvalidData, "conversation longer than 60 tokens"),
    ],
)
def test_a_conversation_that_cannot_be_trained_is_refused_with_the_reason(
    template: str, messages: Any, error: type[PenstockError], message: str, tmp_path: Path
) -> None:
    demonstrated = demonstrations(tokenizer_folder(tmp_path / "tokenizer", template), [messages], max_length=60)

    with pytest.raises(error) as refused:
        demonstrated.check()

    assert message in str(refused.value)


# -- the loss ----------------------------------------------------------------------------------------------------------


class Recorded:
    """A trainer that keeps its batch."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer = trainer
        self.batches: list[TrainBatch] = []
        self.metrics: Mapping[str, float] = {}

    def step(self, batch: TrainBatch) -> Mapping[str, float]:
        self.batches.append(batch)
        self.metrics = self._trainer.step(batch)
        return self.metrics


def descending(model: HFModel) -> Recorded:
    """Return a trainer whose step subtracts the gradient."""
    descend = partial(torch.optim.SGD, lr=1.0)
    return Recorded(TorchTrainer(model, optimizer=descend, loss=AdvantageWeighted(), max_grad_norm=None))


def trained_by(trainer: Recorded, demonstrated: Demonstrations) -> Pipeline:
    """Return the pipeline of one step of two conversations."""
    return source(demonstrated).then(Batcher(max_tokens=64, sequences=2)).sink(SinkTrainer(trainer, max_steps=1))


def test_loss_and_gradients_are_those_of_transformers_cross_entropy(letters: Path) -> None:
    rows = [[said("user", "ab"), said("assistant", "ba")], [said("user", "c"), said("assistant", "cdef")]]
    trainer = descending(model := HFModel.from_pretrained(letters))

    anyio.run(trained_by(trainer, demonstrations(letters, rows)).run)

    load: Any = transformers.AutoModelForCausalLM
    reference = load.from_pretrained(letters)
    (batch,) = trainer.batches
    bounds = batch.cu_seqlens.tolist()
    total = torch.zeros(())
    for begin, end in pairwise(bounds):
        ids, trains = torch.tensor(batch.tokens[begin:end]).long(), torch.tensor(batch.loss_mask[begin:end])
        labels = torch.where(trains, ids, -100)
        total = total + reference(ids[None], labels=labels[None]).loss * trains.sum()
    loss = total / int(batch.loss_mask.sum())
    torch.autograd.backward(loss)
    assert int(batch.loss_mask.sum()) == 3 + 5
    assert trainer.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    before = load.from_pretrained(letters)
    for now, then, wanted in zip(model.parameters(), before.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(then - now, wanted.grad, rtol=1e-4, atol=1e-5)


# -- configured runs ---------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '>' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}#{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that has learned nothing yet."""
    return write_letter_model(tmp_path_factory.mktemp("letters") / "model", "#abcdefgh<>?", template=TEMPLATE)


@pytest.fixture
def values(letters: Path, tmp_path: Path) -> dict[str, Any]:
    rows = [[said("user", a + b), said("assistant", b + a)] for a in "abcd" for b in "abcd"]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return {
        "model": {"path": str(letters)},
        "data": {"path": str(tmp_path / "chats.jsonl"), "prompt": "messages", "max_prompt_tokens": 16},
        "algorithm": {"loss": "sft", "prompts": 8, "steps": 40, "optimizer": {"lr": 1e-2}},
        "folder": str(tmp_path / "run"),
    }


def ran(values: dict[str, Any], *overrides: str) -> Summary:
    return anyio.run(partial(train, load_run_config(values, overrides), view=None))


def steps_of(folder: Path) -> Iterator[dict[str, float]]:
    yield from map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())


def test_a_run_learns_a_small_data_set_and_its_checkpoint_is_reinforced(values: dict[str, Any], tmp_path: Path) -> None:
    summary = ran(values)

    losses = [line["loss"] for line in steps_of(tmp_path / "run")]
    assert (summary.steps, summary.nothing_learned, len(losses)) == (40, "", 40)
    assert summary.ledger["ended"]["trained"] == 40 * 8
    assert losses[0] > 2
    assert losses[-1] < 0.2

    rewards = {"functions": [{"function": "tests.configured_run:letters_e"}]}
    reinforced = {
        "model": {"path": summary.checkpoint},
        "algorithm": {"prompts": 2, "group_size": 2, "steps": 1},
        "sampling": {"max_completion_tokens": 4},
        "folder": str(tmp_path / "reinforced"),
    }
    assert ran({**values, **reinforced, "reward": rewards}).stop_reason
    (line,) = steps_of(tmp_path / "reinforced")
    assert line["response_length/mean"] == pytest.approx(3, abs=0.5)  # it has learned to stop


def test_a_run_that_is_continued_has_the_weights_of_one_that_was_not(values: dict[str, Any], tmp_path: Path) -> None:
    ran(values, "algorithm.steps=2")
    continued = ran(values, "algorithm.steps=5")
    whole = ran(values, "algorithm.steps=5", f"folder={tmp_path / 'whole'}")

    one, other = (load_file(Path(summary.checkpoint) / "model.safetensors") for summary in (continued, whole))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_long_conversations_are_rejected_and_a_run_without_others_ends_by_name(
    values: dict[str, Any], tmp_path: Path
) -> None:
    long = {"messages": [said("user", "a"), said("assistant", "b" * 40)]}
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")

    assert ran(values, "algorithm.steps=4").ledger["ended"]["rejected"] >= 1

    (tmp_path / "chats.jsonl").write_text(json.dumps(long) + "\n")
    with pytest.raises(InvalidData, match="conversation longer than 16 tokens"):
        ran(values, f"folder={tmp_path / 'other'}")


def test_a_source_without_a_conversation_that_fits_ends_after_an_epoch(letters: Path) -> None:
    rows = [[said("user", "a"), said("assistant", "b" * length)] for length in range(20, 30)]
    trainer = descending(HFModel.from_pretrained(letters))

    with pytest.raises(NothingTrained, match="conversation longer than 8 tokens"):
        anyio.run(trained_by(trainer, demonstrations(letters, rows, max_length=8)).run)


@pytest.mark.parametrize(
    "override",
    [
        "data.evaluation=4",
        "reward.functions=[{function: 'm:f'}]",
        "environment={make: m:e}",
        "algorithm.advantages=rloo",
        "algorithm.preset=trl",
        "algorithm.kl=0.1",
        "algorithm.group_size=4",
        "algorithm.max_lag=0",
        "algorithm.drop_zero_variance=true",
        "algorithm.mask_truncated=true",
        "sampling.temperature=0.7",
        "placement.samplers=2",
        "placement.servers={vllm: 1}",
        "placement.ray={}",
        "evaluation={sets: [{path: a.jsonl}]}",
        "samples.count=3",
    ],
)
def test_a_key_without_meaning_is_refused_by_name(override: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load_run_config(values, [override])

    key = override.partition("=")[0]
    assert f"{key}: expected none beside algorithm.loss sft" in str(refused.value)


def test_the_configuration_in_the_docs_is_one() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "training.md").read_text()
    block = page.partition("```yaml\n# sft.yaml")[2].partition("```")[0].partition("\n")[2]

    config = load_run_config(yaml.safe_load(block))

    assert (config.algorithm.loss, config.folder) == ("sft", "sft")


def test_text_that_is_no_chat_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"data\.chat: expected true with algorithm\.loss sft"):
        load_run_config(values, ["data.chat=false"])
