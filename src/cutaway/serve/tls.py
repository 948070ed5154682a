"""TLS of the server: certificate, private key, and certificates of clients."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from cutaway.bounded_files import read_file
from cutaway.errors import InputError

MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True)
class TLSFiles:
    """PEM files, named as uvicorn's options."""

    certfile: Path
    """Certificate of the server, followed by the intermediate certificates."""
    keyfile: Path | None = None
    """Private key. Default: it is in `certfile`."""
    ca_certs: Path | None = None
    """Certificates of authorities. If set, clients need a certificate that one of them has signed."""

    def build_context(self) -> ssl.SSLContext:
        """Build the TLS context of a server: TLS 1.2 or 1.3. Raise an error of one sentence if a file is unusable."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load_certificate(context)
        if self.ca_certs is not None:
            read_file(self.ca_certs, InputError, MAX_PEM_BYTES)
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError:
                raise InputError(f"--ssl-ca-certs '{self.ca_certs}' has no certificates in PEM format") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def load_certificate(self, context: ssl.SSLContext) -> None:
        """Load the certificate and the key. New connections of a running server use them."""
        for path in filter(None, (self.certfile, self.keyfile)):
            read_file(path, InputError, MAX_PEM_BYTES)
        keyfile = self.keyfile or self.certfile
        try:
            context.load_cert_chain(self.certfile, keyfile, _reject_encrypted_key)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise InputError(
                    f"the private key in '{keyfile}' is not the key of the certificate in '{self.certfile}'; pass the"
                    " --ssl-keyfile that belongs to --ssl-certfile"
                ) from None
            raise InputError(
                f"'{self.certfile}' and '{keyfile}' are not a certificate and its private key in PEM format; pass"
                " --ssl-certfile and --ssl-keyfile"
            ) from None


def _reject_encrypted_key() -> str:
    """Called for the password of an encrypted key. OpenSSL would ask for it on the terminal."""
    raise InputError(
        "the private key of --ssl-keyfile is encrypted, and the server cannot ask for its password; decrypt it with"
        " `openssl pkey -in KEY -out NEW_KEY`"
    )
