import io
import json
from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import StopReason
from penstock._stages.http import completion_stream
from penstock._stages.http.completion_stream import Events, StreamedCompletion
from penstock._stages.http.routing_record import RoutingRecord
from penstock.errors import ProtocolMismatch
from penstock.policies import RoutedExperts

STREAM = b": ping\n\ndata: one\r\n\r\nevent: x\ndata:two\ndata: lines\nid: 3\n\ndata: [DONE]\n\ndata: begun"


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 100])
def test_events_are_whole_wherever_their_bytes_were_cut(at_once: int) -> None:
    events = Events()

    found = [data for i in range(0, len(STREAM), at_once) for data in events.feed(STREAM[i : i + at_once])]

    assert found == [b"one", b"two\nlines", b"[DONE]"]


def test_an_event_without_end_is_not_collected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_stream, "LONGEST_EVENT", 10)

    with pytest.raises(ProtocolMismatch, match="expected events of at most 10 bytes, got 11 and more"):
        list(Events().feed(b"data: 12345"))


def test_a_long_event_in_small_pieces_is_read_once() -> None:
    events, value = Events(), b"x" * 300_000

    found = [data for i in range(0, len(value), 3) for data in events.feed(value[i : i + 3] if i else b"data:")]

    assert not found
    assert len(next(events.feed(b"\n\n"))) == len(value) - 3


@pytest.mark.parametrize("logprob", ["0.5", "-1e39", "1e400", "NaN"])
def test_an_invalid_log_probability_is_refused(logprob: str) -> None:
    body = b'{"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [%b]}}]}' % logprob.encode()

    with pytest.raises(ProtocolMismatch, match="expected a part of a completion as JSON"):
        StreamedCompletion(max_completion_tokens=8).take(body)


def test_tokens_beyond_the_allowance_or_after_the_end_are_refused_as_they_come() -> None:
    with pytest.raises(ProtocolMismatch, match="expected at most 8 tokens, got 9"):
        taken({"token_ids": [1] * 9})
    with pytest.raises(ProtocolMismatch, match="expected no token after the finish_reason, got 1"):
        taken({"token_ids": [1], "finish_reason": "stop"}, {"token_ids": [1]})


def taken(*choices: dict[str, Any], stop_ids: tuple[int, ...] = (), support: int = 0) -> StreamedCompletion:
    body = StreamedCompletion(8, stop_ids, support)
    for choice in choices:
        body.take(json.dumps({"id": "x", "choices": [{"index": 0, "text": "?"} | choice]}).encode())
    body.take(b"[DONE]")
    return body


def test_pieces_add_up_and_a_last_one_may_only_say_why_it_stopped() -> None:
    body = taken(
        {"token_ids": [5, 6], "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1, -2.5]}},
        {"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}},
        {"text": "", "token_ids": [], "finish_reason": "length"},
    )

    completion = body.completion(3)

    assert body.done
    assert completion.tokens.tolist() == [5, 6, 7]
    assert completion.logprobs is not None
    assert completion.logprobs.tolist() == [-1, -2.5, -0.5]
    assert completion.policy_versions.tolist() == [3] * 3
    assert completion.stop_reason == StopReason.LENGTH


@pytest.mark.parametrize("missing", [None, {"token_logprobs": [None]}, {"tokens": ["a"]}])
def test_a_log_probability_that_is_missing_leaves_none_of_them(missing: object) -> None:
    known = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}

    assert taken(known, {"token_ids": [6], "logprobs": missing}, known).completion(0).logprobs is None


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [-1]},
        {"token_ids": [2**31]},
        {"token_ids": ["5"]},
        {"logprobs": {"tokens": ["token_id:-1"]}},
        {"logprobs": {"tokens": ["token_id:4294967296"]}},
        {"logprobs": {"tokens": ["token_id:5", "six"]}},
        {"logprobs": {"tokens": ["token_id:"]}},
    ],
)
def test_an_invalid_token_id_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(ProtocolMismatch, match=r"expected (a part of a completion|the ids of sampled tokens)"):
        taken(choice)


def test_ids_in_the_place_of_tokens_are_read_as_such() -> None:
    assert taken({"logprobs": {"tokens": ["token_id:5", "token_id:0"]}}).completion(0).tokens.tolist() == [5, 0]


@pytest.mark.parametrize(
    "choices",
    [
        [{"token_ids": [5, 7]}, {"token_ids": [6]}],
        [{"token_ids": [5, 7, 6, 7]}],
        [{"token_ids": [5]}, {"token_ids": [7, 8, 6]}],
    ],
)
def test_a_completion_is_cut_after_its_stop_token_where_the_server_goes_on(choices: list[dict[str, Any]]) -> None:
    logprobs = [{"logprobs": {"token_logprobs": [-1.0] * len(choice["token_ids"])}} for choice in choices]

    body = taken(*(choice | known for choice, known in zip(choices, logprobs, strict=True)), stop_ids=(7, 8))

    completion = body.completion(0)
    assert (body.done, body.cut, completion.stop_reason) == (True, True, StopReason.STOP)
    assert completion.tokens.tolist() == [5, 7]
    assert completion.logprobs is not None
    assert completion.logprobs.tolist() == [-1, -1]


def test_a_completion_that_the_server_ends_at_its_stop_token_is_read_to_its_end() -> None:
    body = taken({"token_ids": [5, 7]}, {"token_ids": [], "finish_reason": "stop"}, stop_ids=(7,))

    assert (body.done, body.cut) == (True, False)


def test_a_stream_without_a_stop_reason_is_not_done() -> None:
    assert not taken({"token_ids": [5]}).done


# -- experts of a mixture ----------------------------------------------------------------------------------------------

SHAPE = RoutedExperts(layers=2, chosen=3, experts=300)

EXPERTS = np.arange(24).reshape(4, 2, 3)


def npy(array: Any, **options: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, **options)
    return b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4"])
def test_the_experts_of_vllm_are_an_npy_file(dtype: str) -> None:
    found = RoutingRecord(npy(EXPERTS.astype(dtype)), has_header=True).decode(SHAPE, 5)

    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, EXPERTS)


def test_the_experts_of_sglang_are_bytes_of_int32() -> None:
    record = RoutingRecord(b64encode(EXPERTS.astype("<i4").tobytes()).decode(), has_header=False)
    few = RoutedExperts(layers=2, chosen=3, experts=24)

    np.testing.assert_array_equal(record.decode(SHAPE, 5), EXPERTS)
    assert record.decode(few, 5).dtype == np.uint8


REFUSED: list[tuple[str, bool, str]] = [
    (npy(EXPERTS.astype("f4")), True, "expected an .npy file of u1, u2 or i4 with three axes"),
    (npy(EXPERTS.astype(">i4")), True, "expected an .npy file of u1, u2 or i4 with three axes"),
    (npy(np.asfortranarray(EXPERTS.astype("u1"))), True, "expected an .npy file of u1, u2 or i4 with three axes"),
    (npy(EXPERTS.astype("u1").ravel()), True, "expected an .npy file of u1, u2 or i4 with three axes"),
    (npy(np.array([{}], object), allow_pickle=True), True, "expected an .npy file of u1, u2 or i4 with three axes"),
    (npy(EXPERTS[:3].astype("u1")), True, r"expected shape \[4, 2, 3\] .* got \[3, 2, 3\]"),
    (npy(EXPERTS.astype("u1"))[:-8], True, r"expected 24 bytes of \|u1"),
    (npy(EXPERTS.astype("u1")) + "AAAA", True, "expected base64"),
    (npy(EXPERTS.astype("<u2") + 290), True, "expected experts from 0 to 299, got 290 to 313"),
    (b64encode((EXPERTS - 1).astype("<i4").tobytes()).decode(), False, "expected experts from 0 to 299, got -1 to 22"),
    (b64encode(b"1234567").decode(), False, r"expected 96 bytes of <i4, for shape \[4, 2, 3\], got 7"),
    ("*" * 12, True, "expected base64"),
    ("é", True, "expected base64"),
    ("A" * 10**6, True, "expected at most 1525 characters, got 1000000"),
    ("", True, "expected an .npy file"),
]


@pytest.mark.parametrize(("encoded", "has_header", "reason"), REFUSED)
def test_another_record_of_experts_is_refused_by_name(encoded: str, *, has_header: bool, reason: str) -> None:
    with pytest.raises(ProtocolMismatch, match=f"routed_experts: {reason}"):
        RoutingRecord(encoded, has_header=has_header).decode(SHAPE, 5)


@given(st.text(max_size=80) | st.binary(max_size=400).map(lambda data: b64encode(data).decode()), st.booleans())
def test_no_bytes_are_more_than_a_refused_record(encoded: str, has_header: bool) -> None:  # noqa: FBT001
    try:
        found = RoutingRecord(encoded, has_header=has_header).decode(SHAPE, 5)
    except ProtocolMismatch:
        return
    assert found.shape == EXPERTS.shape


def drawn(**logprobs: Any) -> dict[str, Any]:
    return {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0], **logprobs}}


def test_a_support_has_the_sampled_token_and_the_most_probable_others() -> None:
    whole = {"token_id:7": -0.5, "token_id:5": -1.0, "token_id:2": -9999.0}
    tie = {"token_id:7": -0.5, "token_id:8": -1.0, "token_id:9": -1.0, "token_id:5": -1.0}

    body = taken(drawn(top_logprobs=[whole]), drawn(top_logprobs=[tie]), support=3)

    support = body.completion(0).support_ids
    assert support is not None
    assert support.tolist() == [[5, 7, -1], [5, 7, 8]]


def test_a_completion_of_no_tokens_has_an_empty_support() -> None:
    support = taken({"text": "", "token_ids": [], "finish_reason": "stop"}, support=3).completion(0).support_ids

    assert support is not None
    assert support.shape == (0, 3)


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        (None, r"expected the 3 most probable of each of 1 tokens \(`top_logprobs`\), got none: start vLLM with"),
        ([], r"expected the 3 most probable of each of 1 tokens \(`top_logprobs`\), got 0"),
        ([{"five": -1.0}], r"expected tokens written as `token_id:…` in top_logprobs, got 'five'"),
        ([{"token_id:-5": -1.0}], r"expected tokens written as `token_id:…` in top_logprobs, got 'token_id:-5'"),
        ([{"token_id:5": 3.0}], r"expected a part of a completion as JSON"),
        ([None], r"expected the most probable tokens beside 5 \(`top_logprobs`\), got None"),
        ([{}], r"expected the most probable tokens beside 5 \(`top_logprobs`\), got \{\}"),
        ([{"token_id:5": -0.1}] * 2, r"expected the 3 most probable of each of 1 tokens \(`top_logprobs`\), got 2"),
        ([{"token_id:5.0": -0.1}], r"expected tokens written as `token_id:…` in top_logprobs, got 'token_id:5.0'"),
        ([{"token_id:2147483648": -0.1}], r"expected tokens written as `token_id:…` in top_logprobs"),
    ],
)
def test_a_support_that_is_absent_or_invalid_is_refused(listed: object, problem: str) -> None:
    with pytest.raises(ProtocolMismatch, match=problem):
        taken(drawn(top_logprobs=listed), support=3)
