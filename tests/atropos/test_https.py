"""Clients and senders over https, to gateways that want a token, with a CA of one's own."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from tests.atropos.environment import Config, Environment, scored_group
from tests.atropos.proxies import ONLY_HTTP, Pipeline, running
from tests.atropos.test_client import client

from penstock.errors import InvalidConfig
from penstock.integrations.atropos import (
    AtroposAPIError,
    AtroposTrainers,
    ServerConfig,
    ShmTransport,
    submit,
    submitting,
)
from penstock.testing import drive_sink, drive_source, group

TOKEN = "s3cret"  # noqa: S105 (of a gateway that lives as long as a test)


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create a self-signed certificate for 127.0.0.1, with its key in the file beside it."""
    folder = tmp_path_factory.mktemp("ca")
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=penstock-test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "keyUsage=digitalSignature,keyCertSign"]
    files = ["-keyout", str(folder / "ca.pem.key"), "-out", str(folder / "ca.pem")]
    subprocess.run(["openssl", *options.split(), *names, *files], check=True, capture_output=True)  # noqa: S607
    return str(folder / "ca.pem")


@asynccontextmanager
async def secured(ca: str) -> AsyncGenerator[tuple[Pipeline, str]]:
    """Start a gateway with https and a token; groups of 3,000 tokens do not fit its shared memory."""
    async with running(token=TOKEN, certfile=ca, keyfile=f"{ca}.key", shm_bytes=ONLY_HTTP) as (pipeline, url):
        assert url.startswith("https://")
        yield pipeline, url


async def test_groups_are_submitted_over_https_with_a_token(ca: str) -> None:
    async with secured(ca) as (pipeline, url):
        await submit(url, scored_group(0, tokens=3000), token=TOKEN, ca=ca)
        await submit(url, scored_group(1), token=TOKEN, ca=ca)
        await pipeline.has_trained(2)
        pipeline.check(2)


async def test_the_token_may_come_from_the_variable(ca: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    async with secured(ca) as (pipeline, url):
        await submit(url, scored_group(0, tokens=3000), ca=ca)
        await pipeline.has_trained(1)
        pipeline.check(1)


async def test_without_the_token_a_submission_is_refused(ca: str, caplog: pytest.LogCaptureFixture) -> None:
    async with secured(ca) as (_, url):
        with pytest.raises(AtroposAPIError, match="401") as raised:
            await submit(url, scored_group(0, tokens=3000), ca=ca)

    assert raised.value.situation == "rejected"
    assert "/shm: expected an answer, got 401" in caplog.text


async def test_a_certificate_of_an_unknown_ca_is_not_trusted_and_not_tried_again(ca: str) -> None:
    async with secured(ca) as (_, url):
        with pytest.raises(AtroposAPIError, match=r"\(1\) is the server's certificate signed by a CA") as raised:
            await submit(url, scored_group(0), token=TOKEN)

    assert raised.value.situation == "certificate"
    assert "attempt" not in str(raised.value)


async def test_a_server_without_tls_is_an_error_of_the_certificate(ca: str) -> None:
    async with running() as (_, url):
        with pytest.raises(AtroposAPIError) as raised:
            await submit(url.replace("http://", "https://"), scored_group(0), ca=ca)

    assert raised.value.situation == "certificate"


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_a_ca_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)

    with pytest.raises(InvalidConfig, match=f"ca: expected a file with certificates in PEM, got {path}"):
        async with submitting("https://127.0.0.1:1", ca=str(path)):
            pass


async def test_an_environment_of_atropos_falls_back_to_https_with_a_token(ca: str) -> None:
    async with secured(ca) as (pipeline, url):
        env = ShmTransport.attach(Environment(Config(rollout_server_url=url), env_id=None), token=TOKEN, ca=ca)
        await env._send_scored_data_to_api(scored_group(0, tokens=3000))
        await pipeline.has_trained(1)
        pipeline.check(1)


async def test_a_client_trains_over_https_with_a_token(ca: str) -> None:
    sink = AtroposTrainers(server=ServerConfig(port=0, token=TOKEN, certfile=ca, keyfile=f"{ca}.key"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drive_sink, sink, [group()])
        (one,) = await drive_source(client(await sink.listening.url(), num_steps=1, token=TOKEN, ca=ca))
        assert len(one) == 2
        tasks.cancel_scope.cancel()
