"""Self-signed certificates, made by the command openssl."""

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its private key, as PEM files."""

    certfile: Path
    keyfile: Path

    def client_context(self) -> ssl.SSLContext:
        """TLS context of a client that trusts this certificate."""
        return ssl.create_default_context(cafile=self.certfile)


def make_certificate(directory: Path, name: str = "localhost") -> Certificate:
    """Make a certificate for `name`, localhost and 127.0.0.1."""
    certificate = Certificate(directory / f"{name}.pem", directory / f"{name}-key.pem")
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN={name}"
        " -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    ).split()
    files = ["-keyout", str(certificate.keyfile), "-out", str(certificate.certfile)]
    subprocess.run([*command, *files], check=True, capture_output=True)
    certificate.keyfile.chmod(0o600)
    return certificate
