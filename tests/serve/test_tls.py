"""TLS of the server: certificates, client certificates, abandoned handshakes, unusable files."""

import json
import shutil
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.certificates import Certificate, make_certificate
from support.server import byte_checkpoint, serve_in_thread

from cutaway.errors import InputError
from cutaway.serve.limits import Limits
from cutaway.serve.openai.api_server import build_openai_app
from cutaway.serve.server import bind_socket
from cutaway.serve.tls import TLSFiles

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@contextmanager
def running_server(context: ssl.SSLContext, limits: Limits | None = None) -> Iterator[str]:
    app, _ = build_openai_app(byte_checkpoint("tiny-llama"), "tiny", limits=limits, max_num_seqs=2)
    with serve_in_thread(app, bind_socket("127.0.0.1", 0), limits, ssl_context=context) as url:
        yield url.replace("http:", "https:")


def get(url: str, context: ssl.SSLContext) -> int:
    with urllib.request.urlopen(f"{url}/health", context=context, timeout=120) as response:
        return response.status


def test_completions_over_tls(certificate: Certificate) -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 8, "stream": True}).encode()
    with running_server(TLSFiles(certificate.certfile, certificate.keyfile).build_context()) as url:
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, context=certificate.client_context(), timeout=120) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            get(url, ssl.create_default_context())
        old = certificate.client_context()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(urllib.error.URLError):
            get(url, old)


def test_client_certificates(certificate: Certificate, tmp_path: Path) -> None:
    client, stranger = make_certificate(tmp_path, "client"), make_certificate(tmp_path, "stranger")
    with running_server(TLSFiles(certificate.certfile, certificate.keyfile, client.certfile).build_context()) as url:
        context = certificate.client_context()
        for other in (None, stranger):
            if other is not None:
                context.load_cert_chain(other.certfile, other.keyfile)
            with pytest.raises((urllib.error.URLError, OSError)):
                get(url, context)
        context.load_cert_chain(client.certfile, client.keyfile)
        assert get(url, context) == 200


def test_abandoned_handshakes_are_closed(certificate: Certificate) -> None:
    context = TLSFiles(certificate.certfile, certificate.keyfile).build_context()
    with running_server(context, Limits(header_timeout=0.3)) as url:
        port = urlsplit(url).port
        with socket.create_connection(("127.0.0.1", port or 0), timeout=120) as idle:
            assert idle.recv(1) == b""
        assert get(url, certificate.client_context()) == 200


def test_certificate_is_replaced_while_running(certificate: Certificate, tmp_path: Path) -> None:
    files = TLSFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    for source, target in ((certificate.certfile, files.certfile), (certificate.keyfile, files.keyfile)):
        shutil.copy(source, target or "")
    context, renewed = files.build_context(), make_certificate(tmp_path, "renewed")
    with running_server(context) as url:
        assert get(url, certificate.client_context()) == 200
        shutil.copy(renewed.certfile, files.certfile)
        shutil.copy(renewed.keyfile, tmp_path / "key.pem")
        files.load_certificate(context)
        assert get(url, renewed.client_context()) == 200


def test_unusable_files_are_refused_in_one_sentence(certificate: Certificate, tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "other")
    encrypted, garbage = tmp_path / "encrypted.pem", tmp_path / "garbage.pem"
    garbage.write_bytes(b"-----BEGIN CERTIFICATE-----\n\xff\n")
    command = ["openssl", "pkey", "-in", certificate.keyfile, "-aes256", "-passout", "pass:secret", "-out", encrypted]
    subprocess.run(command, check=True, capture_output=True)
    cases = {
        "does not exist": TLSFiles(tmp_path / "missing.pem"),
        "is not the key of the certificate": TLSFiles(certificate.certfile, other.keyfile),
        "is encrypted": TLSFiles(certificate.certfile, encrypted),
        "are not a certificate and its private key": TLSFiles(garbage, certificate.keyfile),
        "has no certificates": TLSFiles(certificate.certfile, certificate.keyfile, garbage),
        "cannot be read": TLSFiles(tmp_path),
    }
    cases["are not a certificate and its private key in PEM"] = TLSFiles(certificate.certfile)  # without its key
    for message, files in cases.items():
        with pytest.raises(InputError) as error:
            files.build_context()
        assert message in str(error.value)
        assert "\n" not in str(error.value)
