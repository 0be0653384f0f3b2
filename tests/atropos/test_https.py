"""Clients and senders over TLS, to gateways that want a token, with a CA of one's own."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from tests.atropos.environment import Config, Environment, scored_group
from tests.atropos.proxies import ONLY_HTTP, Pipeline, Proxy, proxied, running
from tests.atropos.test_client import client

from penstock.errors import InvalidConfig
from penstock.stages.integrations.atropos import (
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
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signs itself, and its key, in one file."""
    folder = tmp_path_factory.mktemp("ca")
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=penstock-test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "keyUsage=digitalSignature,keyCertSign"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.pem")]
    subprocess.run(["openssl", *options.split(), *names, *files], check=True, capture_output=True)  # noqa: S607
    return folder / "ca.pem"


@pytest.fixture
def tls(ca: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(ca, ca.with_name("key.pem"))
    return context


@asynccontextmanager
async def behind_tls(tls: ssl.SSLContext) -> AsyncGenerator[tuple[Pipeline, Proxy]]:
    """A gateway that wants a token, reached over https."""
    async with running(token=TOKEN, shm_bytes=ONLY_HTTP) as (pipeline, url), proxied(url, tls=tls) as proxy:
        yield pipeline, proxy


def posts(proxy: Proxy) -> list[str]:
    return [line.split()[1] for line in proxy.requests if line.startswith("POST")]


async def test_groups_are_submitted_over_https_with_a_token(tls: ssl.SSLContext, ca: Path) -> None:
    async with behind_tls(tls) as (pipeline, proxy):
        await submit(proxy.url, scored_group(0, tokens=3000), token=TOKEN, ca=str(ca))
        await submit(proxy.url, scored_group(1), token=TOKEN, ca=str(ca))
        await pipeline.has_trained(2)
        pipeline.check(2)

    assert posts(proxy) == ["/scored_data"]  # the other one went through shared memory


async def test_the_token_may_come_from_the_variable(
    tls: ssl.SSLContext, ca: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    async with behind_tls(tls) as (pipeline, proxy):
        await submit(proxy.url, scored_group(0, tokens=3000), ca=str(ca))
        await pipeline.has_trained(1)
        pipeline.check(1)


async def test_without_the_token_a_submission_is_refused(tls: ssl.SSLContext, ca: Path) -> None:
    async with behind_tls(tls) as (_, proxy):
        with pytest.raises(AtroposAPIError, match="401") as told:
            await submit(proxy.url, scored_group(0, tokens=3000), ca=str(ca))

    assert told.value.situation == "rejected"


async def test_a_certificate_of_an_unknown_ca_is_not_trusted_and_not_tried_again(tls: ssl.SSLContext) -> None:
    async with behind_tls(tls) as (_, proxy):
        with pytest.raises(AtroposAPIError, match=r"\(1\) is the server's certificate signed by a CA") as told:
            await submit(proxy.url, scored_group(0), token=TOKEN)

    assert told.value.situation == "certificate"
    assert "attempt" not in str(told.value)
    assert proxy.requests == []


async def test_a_server_that_speaks_no_tls_is_told_as_such(ca: Path) -> None:
    async with running() as (_, url):
        with pytest.raises(AtroposAPIError) as told:
            await submit(url.replace("http://", "https://"), scored_group(0), ca=str(ca))

    assert told.value.situation == "certificate"


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_a_ca_that_cannot_be_read_is_told_with_its_path(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)

    with pytest.raises(InvalidConfig, match=f"ca: expected a file with certificates in PEM, got {path}"):
        async with submitting("https://127.0.0.1:1", ca=str(path)):
            pass


async def test_an_environment_of_atropos_falls_back_to_https_with_a_token(tls: ssl.SSLContext, ca: Path) -> None:
    async with behind_tls(tls) as (pipeline, proxy):
        env = Environment(Config(rollout_server_url=proxy.url), env_id=None)
        ShmTransport.attach(env, token=TOKEN, ca=str(ca))
        await env._send_scored_data_to_api(scored_group(0, tokens=3000))
        await pipeline.has_trained(1)
        pipeline.check(1)

    assert posts(proxy) == ["/scored_data"]


async def test_a_client_trains_over_https_with_a_token(tls: ssl.SSLContext, ca: Path) -> None:
    sink = AtroposTrainers(server=ServerConfig(port=0, token=TOKEN))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drive_sink, sink, [group()])
        async with proxied(await sink.listening.url(), tls=tls) as proxy:
            (one,) = await drive_source(client(proxy.url, num_steps=1, token=TOKEN, ca=str(ca)))
        tasks.cancel_scope.cancel()

    assert len(one) == 2
