"""What `pfl deploy --tls` writes: an authority, certificates, keys of nodes, and services."""

from __future__ import annotations

import datetime
import ipaddress
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from pfl import files
from pfl.errors import ConfigError

YEARS = 2  # that certificates hold
PORT = 8000
PLACE = "/opt/pfl"  # where services expect the environment, the app and the keys
SERVICE = """\
# For systemd: {place} has the environment of pfl (.venv), {app} and {keys}; the user is pfl.
[Unit]
Description={title} of {app}
Wants=network-online.target
After=network-online.target

[Service]
User=pfl
ExecStart={command}
Environment=HOME={place}
Restart={restart}
RestartSec=10
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=full

[Install]
WantedBy=multi-user.target
"""


def keys_folder(app: Path) -> Path:
    """Returns the folder of the keys of an app: beside it, since every party gets the app."""
    return app.parent / f"{app.name}-keys"


def write_keys(app: Path, host: str, parties: int) -> Path:
    """Writes certificates, keys and services for an app, and returns their folder.

    `server` is for the server, and `party-<k>` for party k alone. `ca.key` can make certificates
    and is needed no more.

    Args:
        app: The folder of the app.
        host: The name or the address by which parties reach the server; several with commas.
        parties: How many there are.

    Raises:
        ConfigError: The folder is there, or `cryptography` is not installed.
    """
    app = app.resolve()
    folder = keys_folder(app)
    hosts = [one.strip() for one in host.split(",")]
    if not all(hosts):
        raise ConfigError(f"deploy: --tls: {host!r}; it must be the server's name or address")
    if folder.exists():
        raise ConfigError(
            f"deploy: --tls: {folder} is there; leave --tls out to keep its keys, or move it away"
        )
    try:
        import cryptography  # noqa: F401 - Flower brings it
    except ImportError as error:
        raise ConfigError(
            "deploy: --tls: cryptography is not installed; pip install '.[deploy]'"
        ) from error
    with files.run_folder_errors(folder, "deploy: --tls"):
        folder.mkdir(mode=0o700)
        (folder / "server").mkdir(mode=0o700)
        authority = _Authority(app.name)
        files.create_secret(folder / "ca.key", authority.private_key())
        certificate, key = authority.server(hosts)
        server = folder / "server"
        files.create_secret(server / "server.crt", certificate)
        files.create_secret(server / "server.key", key)
        files.create_secret(server / "run.sh", _script(app))
        files.create_secret(
            server / "pfl-server.service", _service(app, "Server", _server_words(app, PLACE))
        )
        for place in (folder, server):
            files.create_secret(place / "ca.crt", authority.text())
        for party in range(parties):
            own = folder / f"party-{party}"
            own.mkdir(mode=0o700)
            private, public = node_key(f"party-{party}")
            files.create_secret(own / "node.key", private)
            files.create_secret(own / "node.pub", public)
            files.create_secret(own / "ca.crt", authority.text())
            files.create_secret(own / "party.yaml", _party_text(app, party, hosts[0]))
            words = _party_words(app, PLACE, party)
            files.create_secret(
                own / f"pfl-party-{party}.service", _service(app, f"Party {party}", words)
            )
        files.create_secret(folder / "compose.yaml", _compose(app, parties))
    return folder


# ---- certificates and keys ----------------------------------------------------------------------


class _Authority:
    """A private authority, which signs the certificate of the server.

    Args:
        name: The name of the federation.
    """

    def __init__(self, name: str) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.generate_private_key(ec.SECP384R1())
        self._name = _named(f"authority of {name}"[:64])
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = self._begun(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(identifier, critical=False)
        self._certificate = self._signed(builder)

    def _begun(self, name: Any, public_key: Any) -> Any:
        from cryptography import x509

        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name)
        builder = builder.public_key(public_key).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        return builder.not_valid_after(now + datetime.timedelta(days=365 * YEARS))

    def _signed(self, builder: Any) -> Any:
        from cryptography.hazmat.primitives import hashes

        return builder.sign(self._key, hashes.SHA384())

    def private_key(self) -> str:
        """Returns the key of the authority as PEM."""
        return _pem(self._key)

    def text(self) -> str:
        """Returns the certificate of the authority as PEM."""
        return _certificate_text(self._certificate)

    def server(self, hosts: list[str]) -> tuple[str, str]:
        """Returns a certificate for a server of some names and addresses, and its key, as PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        names: list[x509.GeneralName] = []
        for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"]):
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        key = ec.generate_private_key(ec.SECP384R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = self._begun(_named(hosts[0][:64]), key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        builder = builder.add_extension(issuer, critical=False)
        return _certificate_text(self._signed(builder)), _pem(key)


def node_key(name: str) -> tuple[str, str]:
    """Returns a private and a public key of a node, as `ssh-keygen -t ecdsa -b 384` makes them.

    Args:
        name: A word that says whose it is.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private.decode(), f"{public.decode()} {name}\n"


def _named(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(key: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return text.decode()


def _certificate_text(certificate: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM).decode()


# ---- commands -----------------------------------------------------------------------------------


def _server_words(app: Path, place: str) -> list[str]:
    words = [f"{place}/.venv/bin/python", "-m", "pfl.deploy.here", f"{place}/{app.name}"]
    return [*words, "--server", "--keys", f"{place}/{keys_folder(app).name}"]


def _party_words(app: Path, place: str, party: int) -> list[str]:
    file = f"{place}/{keys_folder(app).name}/party-{party}/party.yaml"
    return [f"{place}/.venv/bin/python", "-m", "pfl", "node", "--config", file]


def _script(app: Path) -> str:
    """Returns the script that runs the server; the parties are elsewhere."""
    return f"""\
#!/bin/sh
# The server of the federation: a SuperLink with TLS, which takes the keys of party-*/node.pub only,
# and the run. The same command again continues the run from its last checkpoint.
cd "$(dirname "$0")" || exit 1
exec {shlex.quote(sys.executable)} -m pfl.deploy.here {shlex.quote(f"../../{app.name}")} \\
    --server --keys .. "$@"
"""


def _party_text(app: Path, party: int, host: str) -> str:
    """Returns the file of a party; the example in the app says what else it may have."""
    values = {
        "app": f"../../{app.name}",
        "client": party,
        "folder": "states",
        "superlink": {"address": _address(host), "certificates": "ca.crt", "key": "node.key"},
    }
    comment = f"# Paths begin at this file. {app.name}/party.yaml shows the other keys.\n"
    return comment + yaml.safe_dump(values, sort_keys=False)


def _address(host: str) -> str:
    if ":" in host:  # of IPv6
        return f"[{host}]:{PORT}"
    return f"{host}:{PORT}"


def _service(app: Path, title: str, words: list[str]) -> str:
    """Returns a unit for systemd; a server that has ended well is not started again."""
    restart = "always"
    if title == "Server":
        restart = "on-failure"
    names = {"app": app.name, "keys": keys_folder(app).name, "place": PLACE}
    return SERVICE.format(title=title, command=" ".join(words), restart=restart, **names)


def _compose(app: Path, parties: int) -> str:
    """Returns a file for `docker compose`; each service gets what is its own, and the app."""
    keys = keys_folder(app).name
    image = "${PFL_IMAGE:?the image, with pfl and flwr in /opt/pfl/.venv}"
    shared = f"../{app.name}:{PLACE}/{app.name}"
    services: dict[str, Any] = {
        "server": {
            "image": image,
            "command": _server_words(app, PLACE),
            "ports": [f"{PORT}:{PORT}"],
            "volumes": [shared, f".:{PLACE}/{keys}:ro", "../runs:/runs"],
        }
    }
    for party in range(parties):
        services[f"party-{party}"] = {
            "image": image,
            "command": _party_words(app, PLACE, party),
            "restart": "always",
            "volumes": [
                f"{shared}:ro",
                f"./party-{party}:{PLACE}/{keys}/party-{party}",
            ],
        }
    comment = "# For docker compose: the whole federation, or the service that `up` names.\n"
    return comment + yaml.safe_dump({"services": services}, sort_keys=False)
