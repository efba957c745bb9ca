"""HTTPS with a certificate and its key: who trusts it may ask, bad files are one sentence, renewed ones are taken."""

from __future__ import annotations

import argparse
import shutil
import ssl
import threading
from pathlib import Path

import aiohttp
import pytest

from console.api.http.errors import CannotListen
from console.api.http.tls import Certificate
from console.api.server import ApiSettings
from console.cli.remote_args import add_key, tls_of
from console.link.remote.http import address_of
from console.link.remote.link import RemoteLink
from console.runtime.loops import LoopThread
from engine.errors import InvalidRequest
from tests.api.harness import serving, until
from tests.api.operators import FolderOperator
from tests.fakes.certificates import Pair, self_signed
from tests.fakes.link import FakeLink


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A certificate for all tests here."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def with_tls(pair: Pair) -> ApiSettings:
    """Settings that serve it."""
    return ApiSettings(port=0, tls_cert=pair.cert, tls_key=pair.key)


async def test_a_server_with_a_certificate_speaks_https_alone_and_says_so(tmp_path: Path, pair: Pair) -> None:
    async with serving(tmp_path, settings=with_tls(pair)) as api:
        assert api.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=pair.cert)
        async with aiohttp.ClientSession() as http:
            body = {"prompt": "x", "max_tokens": 2}
            async with http.post(f"{api.url}/v1/completions", json=body, ssl=trusting) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get(f"{api.url}/health")
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"{api.url.replace('https', 'http')}/health")


async def test_nothing_older_than_tls_1_2_is_spoken(tmp_path: Path, pair: Pair) -> None:
    assert Certificate(pair.cert, pair.key).context.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_a_console_elsewhere_connects_where_it_is_told_whom_to_trust(tmp_path: Path, pair: Pair) -> None:
    parser = argparse.ArgumentParser()
    add_key(parser)
    loop = LoopThread("remote")
    async with serving(tmp_path, settings=with_tls(pair), operator=FolderOperator(tmp_path), link=FakeLink) as api:
        address = address_of(api.url)
        trusting = RemoteLink(address, loop=loop, hz=10, tls=tls_of(parser.parse_args(["--ca", str(pair.cert)])))
        wary = RemoteLink(address, loop=loop, hz=10, tls=tls_of(parser.parse_args([])))
        try:
            await until(lambda: trusting.standing().reach == "live")
            await until(lambda: wary.standing().reach == "lost")
            assert "certificate is not trusted" in wary.standing().reason
            assert "--ca" in wary.standing().reason
        finally:
            for link in (trusting, wary):
                link.close()
            loop.stop()


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_ca_that_is_none_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRequest, match=r"--ca .*ca\.pem cannot be used: "):
        tls_of(argparse.Namespace(ca=str(file)))


def broken(folder: Path, how: str, pair: Pair) -> Pair:
    """A certificate and key that are not right."""
    match how:
        case "missing":
            return Pair(pair.cert, folder / "none.key")
        case "nonsense":
            (folder / "bad.pem").write_text("nonsense")
            return Pair(folder / "bad.pem", pair.key)
        case "strangers":
            return Pair(pair.cert, self_signed(folder, "other").key)
        case "unreachable":
            return Pair(pair.cert, folder / ("n" * 300))
        case "short":
            return self_signed(folder, "short", curve="prime192v1")
        case _:
            return self_signed(folder, "closed", password="secret")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("missing", r"none\.key cannot be read: No such file"),
        ("nonsense", "not a certificate and key in PEM"),
        ("strangers", "certificate and key do not match"),
        ("unreachable", r"n cannot be read: File name too long"),
        ("short", "the key is too short"),
        ("encrypted", r"closed\.key is encrypted"),
    ],
)
async def test_bad_files_are_one_sentence(tmp_path: Path, pair: Pair, how: str, sentence: str) -> None:
    with pytest.raises(CannotListen, match=sentence) as no:
        async with serving(tmp_path, settings=with_tls(broken(tmp_path, how, pair)), load=False):
            pass
    assert "\n" not in no.value.message


@pytest.mark.parametrize(("given", "missing"), [("tls_cert", "--tls-key"), ("tls_key", "--tls-cert")])
async def test_one_file_of_the_two_is_refused(tmp_path: Path, pair: Pair, given: str, missing: str) -> None:
    settings = ApiSettings(port=0, **{given: pair.cert})  # type: ignore[arg-type]
    with pytest.raises(CannotListen, match=f"{missing} is missing"):
        async with serving(tmp_path, settings=settings, load=False):
            pass


async def test_a_renewed_certificate_is_shown_to_who_connects_next(tmp_path: Path, pair: Pair) -> None:
    used = Pair(tmp_path / "used.pem", tmp_path / "used.key")
    for new, old in ((used.cert, pair.cert), (used.key, pair.key)):
        shutil.copyfile(old, new)
    certificate = Certificate(used.cert, used.key)
    assert not certificate.renew()
    renewed = self_signed(tmp_path, "renewed")
    used.cert.write_bytes(renewed.cert.read_bytes())
    with pytest.raises(CannotListen, match="do not match"):  # half of the renewal is there
        certificate.renew()
    assert shown(certificate.context, pair.cert) == "server"
    used.key.write_bytes(renewed.key.read_bytes())
    assert certificate.renew()
    assert shown(certificate.context, renewed.cert) == "renewed"


async def test_a_certificate_is_renewed_between_two_handshakes(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL takes no change of what a handshake in another thread is using."""
    renewing: list[int] = []
    monkeypatch.setattr(Certificate, "renew", lambda _: bool(renewing.append(threading.get_ident())))
    monkeypatch.setattr("console.api.server._SAVE_S", 0.01)
    async with serving(tmp_path, settings=with_tls(pair), load=False):
        await until(lambda: bool(renewing))
    assert set(renewing) == {threading.get_ident()}


def shown(server: ssl.SSLContext, trusted: Path) -> str:
    """Whose certificate a client gets."""
    client = ssl.create_default_context(cafile=trusted)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there, server_hostname="localhost")
    answering = server.wrap_bio(there, back, server_side=True)
    for _ in range(10):
        for side in (asking, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    found = asking.getpeercert()
    assert found is not None
    return str(dict(part[0] for part in found["subject"])["commonName"])  # type: ignore[misc, arg-type]
