"""A gateway process over HTTP: every endpoint of the contract, and the answers to requests that are refused."""

from __future__ import annotations

import base64
import gzip
import json
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.atropos.gateways import TRAINER, Client, client, environment, process, scored
from tests.failsafe import FAILSAFE_S

TOKEN = "a token of this test"  # noqa: S105 (no secret)
REQUEST_BYTES = 20_000
INFLATED_BYTES = 50_000
CAPACITY = 4


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with process() as (_, url):
        yield url


@pytest.fixture
def gateway(url: str) -> Iterator[Client]:
    """Yield a client of the module's gateway, which is reset."""
    with client(url) as talking:
        talking.ask("GET", "/reset_data")
        yield talking


@pytest.fixture(scope="module")
def guarded_url() -> Iterator[str]:
    """Start a gateway with a token and small limits."""
    limits = ["--request-bytes", str(REQUEST_BYTES), "--inflated-bytes", str(INFLATED_BYTES)]
    with process("--capacity", str(CAPACITY), *limits, PENSTOCK_TOKEN=TOKEN) as (_, url):
        yield url


@pytest.fixture
def guarded(guarded_url: str) -> Iterator[Client]:
    """Yield a client of the gateway with a token, which is reset."""
    with client(guarded_url, authorization=f"Bearer {TOKEN}") as talking:
        talking.ask("GET", "/reset_data")
        yield talking


# -- without a trainer -------------------------------------------------------------------------------------------------


def test_root_answers_as_the_original_does(gateway: Client) -> None:
    assert gateway.get("/") == {"message": "AtroposLib API"}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/info", {"batch_size": -1, "max_token_len": -1}),
        ("/wandb_info", {"group": None, "project": None}),
        (
            "/batch",
            {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []},
        ),
        (
            "/latest_example",
            {
                name: []
                for name in (
                    "tokens",
                    "masks",
                    "scores",
                    "advantages",
                    "ref_logprobs",
                    "generation_params",
                    "inference_logprobs",
                    "messages",
                    "images",
                )
            },
        ),
    ],
)
def test_before_a_trainer_registers_there_is_nothing(gateway: Client, path: str, answer: Any) -> None:
    assert gateway.get(path) == answer


def test_before_a_trainer_registers_the_status_is_that_of_an_empty_queue(gateway: Client) -> None:
    status = gateway.get("/status")

    del status["refused"]  # counted since the gateway began: other tests had requests refused
    assert status == {"current_step": 0, "queue_size": 0, "environments": [], "stalls": []}


def test_an_environment_waits_for_the_trainer_to_ask_for_its_first_batch(gateway: Client) -> None:
    before = gateway.post("/register-env", environment())
    gateway.post("/register", TRAINER)
    registered = gateway.post("/register-env", environment())
    gateway.get("/batch")
    started = gateway.post("/register-env", environment())

    assert before == registered == {"status": "wait for trainer to start"}
    assert started == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "sums_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 100,
    }


def test_data_sent_before_a_trainer_registers_is_kept(gateway: Client) -> None:
    assert gateway.post("/scored_data", scored(8)) == {"status": "received"}

    gateway.post("/register", TRAINER)

    assert gateway.get("/info") == {"batch_size": 8, "max_token_len": 2048}
    assert len(gateway.get("/batch")["batch"]) == 1


# -- a trainer and environments ----------------------------------------------------------------------------------------


def test_a_trainer_is_given_a_number_of_128_bits(gateway: Client) -> None:
    uuid = gateway.post("/register", TRAINER)["uuid"]

    assert type(uuid) is int
    assert uuid.bit_length() <= 128
    assert gateway.get("/wandb_info") == {"group": "group", "project": "project"}
    assert gateway.progress() == (3, 0)


def test_what_environments_send_is_what_the_trainer_gets_with_null_for_what_they_did_not(gateway: Client) -> None:
    gateway.started()
    first = gateway.post("/register-env", environment())["env_id"]
    group = scored(
        4, first, overrides=[{"temperature": 0.7}] * 4, messages=[[{"role": "user", "content": "2 + 2"}]] * 4
    )

    for mark in (0.0, 10.0):
        assert gateway.post("/scored_data", group | {"scores": [mark, 1, 2, 3]}) == {"status": "received"}
    status = gateway.get("/status-env", {"env_id": first})
    batch = gateway.get("/batch")["batch"]

    assert status["queue_size"] == status["self_queue_size"] == 2
    absent = ["advantages", "ref_logprobs", "inference_logprobs", "generation_params", "group_overrides", "images"]
    absent += ["distill_token_ids", "distill_logprobs"]
    assert batch == [group | {"scores": [mark, 1, 2, 3]} | dict.fromkeys(absent) for mark in (0.0, 10.0)]
    assert gateway.progress() == (4, 0)
    assert gateway.get("/batch") == {"batch": None}
    assert gateway.get("/latest_example") == batch[1]


def test_groups_of_another_size_are_buffered_until_they_make_up_whole_ones(gateway: Client) -> None:
    gateway.started()
    env_id = gateway.post("/register-env", environment())["env_id"]

    assert gateway.post("/scored_data", scored(3, env_id)) == {"status": "buffered", "buffer_size": 3}
    assert gateway.get("/status")["queue_size"] == 0
    assert gateway.post("/scored_data", scored(1, env_id)) == {"status": "buffered", "buffer_size": 0}
    assert gateway.get("/status")["queue_size"] == 2


def test_a_list_is_accepted_as_a_whole_or_not_at_all(gateway: Client) -> None:
    gateway.started()
    env_id = gateway.post("/register-env", environment())["env_id"]

    accepted = gateway.post("/scored_data_list", [scored(4, env_id), scored(2, env_id)])
    refused = gateway.ask("POST", "/scored_data_list", [scored(4, env_id), scored(4, env_id) | {"scores": "all"}])

    assert accepted == {"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 2}
    assert refused.status == 422
    assert gateway.get("/status")["queue_size"] == 1
    assert gateway.post("/scored_data_list", []) == {"status": "received", "groups_processed": 0}


def test_numbers_may_come_in_other_forms_where_nothing_is_lost(gateway: Client) -> None:
    gateway.post("/register", TRAINER | {"batch_size": "2", "max_token_len": 10.0, "starting_step": True})
    lax = scored(2) | {"tokens": [["5", 6.0], [True, 2]], "masks": [["-100", 6], [-100, 2]], "scores": ["1", 2]}

    gateway.post("/scored_data", lax)

    assert gateway.get("/info") == {"batch_size": 2, "max_token_len": 10}
    assert gateway.progress() == (1, 1)
    taken = gateway.get("/batch")["batch"][0]
    assert [taken["tokens"], taken["masks"], taken["scores"]] == [[[5, 6], [1, 2]], [[-100, 6], [-100, 2]], [1.0, 2.0]]


def test_status_takes_its_id_from_a_body_or_from_the_query(gateway: Client) -> None:
    gateway.started()
    gateway.post("/register-env", environment())

    assert gateway.get("/status-env", {"env_id": 0}) == gateway.get("/status-env?env_id=0")


def test_only_a_registered_environment_can_disconnect(gateway: Client) -> None:
    gateway.started()
    gateway.post("/register-env", environment())

    assert gateway.post("/disconnect-env", {"env_id": 0}) == {"status": "success"}
    refused = gateway.post("/disconnect-env", {"env_id": 7})
    assert refused["status"] == "failure"
    assert "got 7" in refused["error"]


def test_reset_forgets_everything(gateway: Client) -> None:
    gateway.started()
    gateway.post("/scored_data", scored(8))

    answer = gateway.ask("GET", "/reset_data")

    assert (answer.status, answer.body) == (200, b"Reset successful")
    assert gateway.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert gateway.get("/latest_example")["tokens"] == []


def test_status_lists_every_environment(gateway: Client) -> None:
    gateway.started()
    env_id = gateway.post("/register-env", environment('sums "of" two'))["env_id"]
    gateway.post("/scored_data", scored(4, env_id))

    (counters,) = gateway.get("/status")["environments"]

    assert (counters["name"], counters["env_id"], counters["active"]) == ('sums "of" two_0', env_id, True)
    assert (counters["submitted"], counters["queued"], counters["taken"]) == (4, 4, 0)


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_batch_that_is_not_acknowledged_is_leased_again(gateway: Client) -> None:
    gateway.started()
    gateway.post("/scored_data", scored(8, mark=1.0))

    lost = gateway.get("/batch?lease_s=0.000001")
    again = gateway.get("/batch?lease_s=60")

    assert lost["batch"] == again["batch"]
    assert lost["lease"] != again["lease"]
    assert lost["batch_id"] == again["batch_id"]
    assert gateway.ask("POST", "/acknowledge", {"lease": lost["lease"]}).status == 404
    assert gateway.post("/acknowledge", {"lease": again["lease"]}) == {"status": "success"}
    assert gateway.ask("POST", "/acknowledge", {"lease": again["lease"]}).status == 404
    assert gateway.progress() == (4, 0)


def test_a_late_acknowledgement_counts_until_the_batch_went_out_again(gateway: Client) -> None:
    gateway.started()
    gateway.post("/scored_data", scored(8))

    late = gateway.get("/batch?lease_s=0.000001")
    assert gateway.ask("GET", "/status").status == 200  # which looks what came back

    assert gateway.post("/acknowledge", {"lease": late["lease"]}) == {"status": "success"}
    assert gateway.get("/batch") == {"batch": None}


def test_no_two_batches_have_one_id_not_even_after_a_reset(gateway: Client) -> None:
    ids = set[str]()
    for _ in range(2):
        gateway.started(batch_size=4)
        gateway.post("/scored_data_list", [scored(), scored()])
        ids |= {gateway.get("/batch?lease_s=60")["batch_id"] for _ in range(2)}
        gateway.ask("GET", "/reset_data")

    assert len(ids) == 4


def test_a_request_without_a_lease_gets_none(gateway: Client) -> None:
    gateway.started()
    gateway.post("/scored_data", scored(8))

    assert list(gateway.get("/batch")) == ["batch"]


@pytest.mark.parametrize("lease_s", ["0", "-1", "nan", "inf", "86400.1", "soon"])
def test_a_lease_is_a_time_of_a_day_at_most(gateway: Client, lease_s: str) -> None:
    assert gateway.ask("GET", f"/batch?lease_s={lease_s}").status == 422


def test_a_batch_that_was_cut_off_is_in_the_next_answer(gateway: Client) -> None:
    gateway.started()
    gateway.post("/scored_data", scored(8, images="x" * 12_000_000, mark=1.0))

    with socket.socket() as dying:
        dying.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        dying.connect(address(gateway.url))
        dying.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert dying.recv(100).startswith(b"HTTP/1.1 200")
        dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing is a reset
    until = time.monotonic() + FAILSAFE_S
    while (batch := gateway.get("/batch")["batch"]) is None:
        assert time.monotonic() < until

    assert batch[0]["scores"][0] == 1.0


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("POST", "/", {}, 405),
        ("GET", "/scored_data", None, 405),
        ("POST", "/register", TRAINER | {"batch_size": 1.5}, 422),
        ("POST", "/register", {"batch_size": 8}, 422),
        ("POST", "/register", b"{nonsense", 422),
        ("POST", "/register-env", environment() | {"desired_name": None}, 422),
        ("POST", "/scored_data", [scored()], 422),
        ("POST", "/scored_data_list", scored(), 422),
        ("POST", "/scored_data", scored() | {"scores": [float("nan"), 1, 2, 3]}, 422),
        ("GET", "/status-env", None, 422),
        ("GET", "/status-env?env_id=first", None, 422),
        ("GET", "/status-env?env_id=0", None, 409),
        ("POST", "/acknowledge", {}, 422),
    ],
)
def test_an_invalid_request_is_answered_with_the_reason_and_changes_nothing(
    gateway: Client, method: str, path: str, body: Any, status: int
) -> None:
    answer = gateway.ask(method, path, body)

    assert answer.status == status
    detail = answer.json["detail"]
    assert detail[0]["msg"] if status == 422 else detail
    assert gateway.progress() == (0, 0)


@pytest.mark.parametrize("env_id", [1, -1, 2**40])
def test_an_id_out_of_range_is_unknown(gateway: Client, env_id: int) -> None:
    gateway.started()
    gateway.post("/register-env", environment())

    assert gateway.ask("GET", "/status-env", {"env_id": env_id}).status == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://elsewhere"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
    ids=str,
)
def test_a_web_page_can_neither_change_nor_read_anything(gateway: Client, headers: dict[str, str]) -> None:
    gateway.started()
    gateway.post("/scored_data", scored(8))

    answers = [
        gateway.ask("GET", "/batch", **headers),
        gateway.ask("GET", "/reset_data", **headers),
        gateway.ask("POST", "/scored_data", scored(8), **headers),
        gateway.ask("GET", "/latest_example", **headers),
    ]

    assert [answer.status for answer in answers] == [403] * 4
    assert "web page" in answers[0].json["detail"]
    assert "access-control-allow-origin" not in answers[0].headers
    assert gateway.progress() == (3, 1)


@pytest.mark.parametrize("host", ["elsewhere.example:8000", "", "10.0.0.1.example"])
def test_a_name_that_a_web_page_may_have_is_not_answered(gateway: Client, host: str) -> None:
    assert gateway.ask("GET", "/status", host=host).status == 400


@pytest.mark.parametrize("host", ["localhost:8000", "localhost.", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_addresses_and_localhost_are_accepted_as_host(gateway: Client, host: str) -> None:
    assert gateway.ask("GET", "/status", host=host, sec_fetch_site="none").status == 200


def test_a_body_must_be_declared_as_json(gateway: Client) -> None:
    answer = gateway.ask("POST", "/scored_data", scored(), content_type="text/plain")

    assert answer.status == 422
    assert "application/json" in answer.json["detail"][0]["msg"]


@pytest.mark.parametrize("path", ["/", "/batch", "/reset_data"])
def test_a_head_request_changes_nothing(gateway: Client, path: str) -> None:
    gateway.post("/register", TRAINER)

    assert gateway.ask("HEAD", path).status == 405
    assert gateway.post("/register-env", environment()) == {"status": "wait for trainer to start"}
    assert gateway.get("/info")["batch_size"] == 8


def test_a_group_that_no_batch_can_hold_is_refused(gateway: Client) -> None:
    gateway.started()

    assert gateway.ask("POST", "/register-env", environment(group_size=9)).status == 422
    assert "groups of 1 to 8" in gateway.post("/scored_data", scored(9))["rejected"][0]
    assert gateway.progress() == (3, 0)


# -- what the original takes -------------------------------------------------------------------------------------------

CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [[CALL, {"role": "tool", "content": "4"}]] * 4},
        {"messages": [[{"role": "user", "content": {"text": "2 + 2"}}, {"role": 3, "content": ["a", "list"]}]] * 4},
        {"advantages": [[0.5] * 4] * 4},
        {"ref_logprobs": [[-0.5]] * 4},
        {"masks": [[1, 1, 1]] * 4},
        {"overrides": [{"set_advantage_to_zero": True}]},
        {"unknown": "field"},
    ],
    ids=str,
)
def test_what_the_original_takes_comes_to_the_trainer_as_it_was_sent(gateway: Client, other: dict[str, Any]) -> None:
    gateway.started(batch_size=4)

    assert gateway.post("/scored_data", scored(4) | other) == {"status": "received"}

    (taken,) = gateway.get("/batch")["batch"]
    assert {name: taken[name] for name in other if name != "unknown"} == {
        name: value for name, value in other.items() if name != "unknown"
    }


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ({"scores": [1, 2, 3]}, "lengths"),
        ({"masks": [[-100, 6]] * 4}, "lengths"),
        ({"tokens": [], "masks": [], "scores": []}, "UnpackableGroupSize"),
    ],
    ids=str,
)
def test_groups_that_cannot_be_trained_on_are_reported_and_counted(
    gateway: Client, other: dict[str, Any], kind: str
) -> None:
    gateway.started()
    env_id = gateway.post("/register-env", environment(f"env {kind}"))["env_id"]
    name = gateway.get("/status")["environments"][0]["name"]

    answer = gateway.post("/scored_data_list", [scored(4, env_id) | other, scored(4, env_id)])

    assert (answer["status"], answer["groups_processed"]) == ("received", 2)
    assert len(answer["rejected"]) == 1
    status = gateway.get("/status")
    assert status["queue_size"] == 1
    assert status["refused"][name][kind] >= 1


def test_what_is_refused_is_counted_by_environment_and_kind(gateway: Client) -> None:
    gateway.started()
    env_id = gateway.post("/register-env", environment("counted"))["env_id"]

    for _ in range(3):
        assert gateway.ask("POST", "/scored_data", scored(4, env_id) | {"scores": "all"}).status == 422

    assert gateway.get("/status")["refused"]["counted_0"] == {"invalid": 3}


# -- gzip --------------------------------------------------------------------------------------------------------------


def test_what_is_sent_compressed_is_inflated(gateway: Client) -> None:
    gateway.started()

    gateway.post("/scored_data", gzip.compress(json.dumps(scored(8, mark=5.0)).encode(), 9), content_encoding="gzip")

    assert gateway.get("/batch")["batch"][0]["scores"][0] == 5.0


def test_answers_from_a_thousand_bytes_on_are_compressed_if_accepted(gateway: Client) -> None:
    gateway.post("/scored_data", scored(8))
    small = gateway.ask("GET", "/latest_example", accept_encoding="gzip")
    gateway.post("/scored_data", scored(8) | {"tokens": [[5] * 60] * 8, "masks": [[-100] * 60] * 8})
    large = gateway.ask("GET", "/latest_example", accept_encoding="gzip, deflate")
    plain = gateway.ask("GET", "/latest_example")

    assert [answer.headers.get("content-encoding") for answer in (small, large, plain)] == [None, "gzip", None]
    assert len(small.body) < 1000 < len(plain.body)
    assert large.json == plain.json


WHOLE = gzip.compress(json.dumps(scored()).encode(), 9)


@pytest.mark.parametrize(
    "body",
    [b"no gzip", WHOLE[:-1], WHOLE[:20], WHOLE[:30] + b"\xff" + WHOLE[31:], WHOLE[:-8] + bytes(8), WHOLE + WHOLE, b""],
    ids=["none", "without its end", "half", "altered", "checksum", "twice", "empty"],
)
def test_invalid_gzip_is_refused(gateway: Client, body: bytes) -> None:
    answer = gateway.ask("POST", "/scored_data", body, content_encoding="gzip")

    assert (answer.status, answer.body) == (400, b"Invalid gzip payload")
    assert gateway.get("/status")["queue_size"] == 0


def test_a_request_is_not_read_beyond_its_limit(guarded: Client) -> None:
    assert guarded.ask("POST", "/scored_data", b"{" + b" " * REQUEST_BYTES).status == 413
    assert guarded.get("/status")["refused"]["unregistered"]["http_413"] >= 1

    with client(guarded.url, authorization=f"Bearer {TOKEN}") as unannounced:
        unannounced._connection.putrequest("POST", "/scored_data")
        for name, value in (("authorization", f"Bearer {TOKEN}"), ("transfer-encoding", "chunked")):
            unannounced._connection.putheader(name, value)
        unannounced._connection.endheaders()
        unannounced._connection.send(b"%x\r\n" % (REQUEST_BYTES + 1) + b" " * (REQUEST_BYTES + 1))

        assert unannounced._connection.getresponse().status == 413


def test_what_is_in_a_gzip_is_not_inflated_beyond_its_limit(guarded: Client) -> None:
    bomb = gzip.compress(b" " * (INFLATED_BYTES + 1))
    full = gzip.compress(json.dumps(scored()).encode().ljust(INFLATED_BYTES))

    assert len(bomb) < REQUEST_BYTES
    assert guarded.ask("POST", "/scored_data", bomb, content_encoding="gzip").status == 413
    assert guarded.ask("POST", "/scored_data", full, content_encoding="gzip").status == 200


# -- access ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    ["", f"Bearer {TOKEN}x", "Bearer", f"Token {TOKEN}", "Basic ====", "Basic YW55b25lOndyb25n", "Bearer \xe9"],
)
def test_requests_without_the_token_are_refused(guarded_url: str, authorization: str) -> None:
    with client(guarded_url, **({"authorization": authorization} if authorization else {})) as stranger:
        assert stranger.ask("GET", "/").status == 200
        answer = stranger.ask("POST", "/scored_data", scored())

    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("host", ["x/#", "x/?", "127.0.0.1/", "x:/", ""])
def test_no_host_header_makes_up_for_the_token(guarded_url: str, host: str) -> None:
    with client(guarded_url, host=host) as stranger:
        assert stranger.ask("GET", "/status").status in (400, 401)


def test_with_the_token_the_gateway_may_have_any_name(guarded: Client) -> None:
    assert guarded.ask("GET", "/status", host="gateway.example:8000").status == 200


def test_the_token_may_be_the_password_of_the_url(guarded_url: str) -> None:
    credentials = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    with client(guarded_url, authorization=f"Basic {credentials}") as known:
        assert known.ask("GET", "/status").status == 200


# -- when there is too much --------------------------------------------------------------------------------------------


def test_a_full_queue_asks_to_come_again_and_has_accepted_nothing(guarded: Client) -> None:
    guarded.started(batch_size=4)
    guarded.post("/scored_data_list", [scored(), scored(), scored()])

    refused = guarded.ask("POST", "/scored_data_list", [scored(), scored()])
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert guarded.get("/status")["queue_size"] == 3
    assert guarded.ask("POST", "/scored_data_list", [scored()] * (CAPACITY + 1)).status == 413

    assert len(guarded.get("/batch")["batch"]) == 1
    guarded.post("/scored_data_list", [scored(), scored()])
    assert guarded.get("/status")["queue_size"] == 4


def test_many_environments_at_once_lose_nothing(gateway: Client) -> None:
    gateway.started(batch_size=4)

    def send(number: int) -> None:
        for count in range(10):
            with client(gateway.url) as environment_:
                environment_.post("/scored_data", scored(mark=1000.0 * number + 4 * count))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    marks = [gateway.get("/batch")["batch"][0]["scores"][0] for _ in range(80)]

    assert sorted(marks) == sorted(1000.0 * number + 4 * count for number in range(8) for count in range(10))
    assert gateway.get("/batch") == {"batch": None}


def address(url: str) -> tuple[str, int]:
    host = urlsplit(url)
    return str(host.hostname), host.port or 0


@contextmanager
def half_of_a_body(url: str) -> Iterator[socket.socket]:
    """Send a part of a group, and no more."""
    with socket.create_connection(address(url), timeout=FAILSAFE_S) as sender:
        sender.sendall(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        sender.sendall(b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
        assert b"100 Continue" in sender.recv(1000)  # it reads the body
        sender.sendall(b'{"tokens": [[1')
        yield sender


def test_an_incomplete_body_is_not_accepted(gateway: Client) -> None:
    with half_of_a_body(gateway.url):
        pass

    assert gateway.get("/status")["queue_size"] == 0


def test_status_is_answered_while_a_large_body_is_read(gateway: Client) -> None:
    gateway.started()
    large = scored(8) | {"tokens": [[5] * 40_000] * 8, "masks": [[-100] * 40_000] * 8}
    body = gzip.compress(json.dumps(large).encode(), 1)

    sending = threading.Thread(target=lambda: _post(gateway.url, body))
    sending.start()
    while sending.is_alive():
        assert gateway.ask("GET", "/status").status == 200
    sending.join()

    assert len(gateway.get("/batch")["batch"]) == 1


def test_a_gateway_that_was_killed_comes_back_at_the_same_place_and_knows_nothing() -> None:
    with process() as (killed, url), client(url) as before:
        before.started()
        killed.kill()
        killed.wait()
    with process("--port", str(urlsplit(url).port)) as (running, again), client(url) as after:
        assert again == url
        assert after.get("/info")["batch_size"] == -1
        assert after.post("/register-env", environment()) == {"status": "wait for trainer to start"}

        with half_of_a_body(again) as waited_for:
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=FAILSAFE_S) == 0
            assert b"503" in waited_for.recv(1000).splitlines()[0]


def _post(url: str, body: bytes) -> None:
    with client(url) as environment_:
        environment_.post("/scored_data", body, content_encoding="gzip")
