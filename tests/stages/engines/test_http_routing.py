"""The experts of a mixture in the answers of inference servers, as column `routed_experts`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import pytest
from tests.inference_server import TROUBLE, experts_of
from tests.stages.engines.test_http_policy import assert_logprobs, engine, one, process, prompt, requests_to, weights

from penstock.errors import InvalidConfig, ProtocolMismatch
from penstock.policies import HttpPolicy, RoutedExperts

SHAPE = RoutedExperts(layers=3, chosen=2, experts=8)

Kind = Literal["vllm", "sglang"]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Kind, str]]:
    folder = tmp_path_factory.mktemp("weights")
    weights(folder / "0", 0)
    kinds: tuple[Kind, ...] = ("vllm", "sglang")
    with ExitStack() as stack:
        yield {kind: stack.enter_context(process(kind, folder / "0")) for kind in kinds}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_completion_has_the_experts_of_each_token_that_the_server_read(
    kind: Kind, urls: dict[Kind, str]
) -> None:
    async with engine(urls[kind], kind, routed_experts=SHAPE) as opened:
        completion = await one(opened, prompt(5, 7, 3), longest=6)

    read = np.array([5, 7, 3, *completion.tokens[:-1].tolist()])
    assert completion.routed_experts is not None
    assert completion.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(completion.routed_experts[:-1], experts_of(read))
    assert not completion.routed_experts[-1].any()
    assert_logprobs(completion)


async def test_only_sglang_is_asked_for_them_and_only_if_they_are_wanted(urls: dict[Kind, str]) -> None:
    asked: dict[tuple[Kind, bool], Any] = {}
    for kind, url in urls.items():
        await requests_to(url)
        for wanted in (SHAPE, None):
            async with engine(url, kind, routed_experts=wanted) as opened:
                completion = await one(opened)
                assert (completion.routed_experts is None) == (wanted is None)
            (body,) = (await requests_to(url))["asked"]
            asked[kind, wanted is not None] = (body["stream"], body.get("return_routed_experts"))

    assert asked == {
        ("vllm", True): (False, None),
        ("vllm", False): (True, None),
        ("sglang", True): (False, True),
        ("sglang", False): (True, None),
    }


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("no experts", "expected a completion with the experts of its tokens .* --enable-return-routed-experts"),
        ("experts beyond the model's", r"expected experts from 0 to 7, got \d+ to \d+"),
        ("experts of a longer completion", r"expected shape \[.*, 3, 2\] .*, got \[.*, 3, 2\]"),
        ("experts that are no base64", "expected base64"),
    ],
)
async def test_an_answer_without_these_experts_is_refused_by_name(
    trouble: str, reason: str, urls: dict[Kind, str]
) -> None:
    async with engine(urls["vllm"], routed_experts=SHAPE) as opened:
        with pytest.raises(ProtocolMismatch, match=reason):
            await one(opened, prompt(TROUBLE[trouble], 3))


async def test_a_record_of_another_model_is_refused_by_name(urls: dict[Kind, str]) -> None:
    other = RoutedExperts(layers=4, chosen=2, experts=8)

    for kind, url in urls.items():
        async with engine(url, kind, routed_experts=other) as opened:
            with pytest.raises(ProtocolMismatch, match=r"routed_experts: expected .*4, 2\]"):
                await one(opened)


async def test_a_server_that_returns_no_experts_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="routed_experts: expected none at a server of kind openai"):
        HttpPolicy(url="http://here:1", model="m", server="openai", routed_experts=SHAPE)
    with pytest.raises(InvalidConfig, match="layers: expected a whole number of at least 1, got 0"):
        RoutedExperts(layers=0, chosen=2, experts=8)
