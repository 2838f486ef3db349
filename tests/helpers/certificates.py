"""A certificate authority of a test, and a certificate for 127.0.0.1 that it signed: by the command `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

CONFIG = """[req]
prompt = no
distinguished_name = name
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
subjectAltName = IP:127.0.0.1
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM. Who trusts `authority` accepts a server at 127.0.0.1 with `certificate` and `key`."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        directory.mkdir(parents=True)
        made = cls(directory / "authority.pem", directory / "certificate.pem", directory / "key.pem")
        authority_key = directory / "authority_key.pem"
        _sign(directory, "authority", made.authority, authority_key)
        _sign(directory, "server", made.certificate, made.key, "-CA", made.authority, "-CAkey", authority_key)
        return made


def _sign(directory: Path, section: str, certificate: Path, key: Path, *by: str | Path) -> None:
    config = directory / f"{section}.cnf"
    config.write_text(CONFIG.format(name=f"{directory.name} {section}"))
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-config", config, "-extensions", section, "-keyout", key, "-out", certificate, *by]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
