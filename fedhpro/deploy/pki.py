"""Keys and certificates of one federation: its own CA, the server, the operator, the signer of apps, the nodes.

Everything comes from `cryptography`, which flwr brings along. Private keys are written with mode 0600 from their first
byte on. Certificates are short-lived and renewed; node keys are bare keys, which Flower wants, and are revoked.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS, CERTIFICATE_DAYS = 3650, 365
SIGNER = "fpk_operator"  # the name under which the nodes know the operator's signing key


def write_secret(path: Path, content: bytes) -> None:
    """A file that nobody else can read, not even for a moment."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    os.replace(temporary, path)


# Certificates


def create_authority(key_file: Path, certificate_file: Path, name: str) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _builder(subject, subject, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_secret(key_file, _pem(key))
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def issue(
    authority_key: Path, authority: Path, key_file: Path, certificate_file: Path, name: str, hosts: Sequence[str] = ()
) -> None:
    """A key and its certificate: of a server where hosts are given, else of a client."""
    signing_key = serialization.load_pem_private_key(authority_key.read_bytes(), password=None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
    issuer = read_certificate(authority)
    key = ec.generate_private_key(ec.SECP384R1())
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, issuer.subject, key.public_key(), CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    write_secret(key_file, _pem(key))
    certificate_file.write_bytes(builder.sign(signing_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def read_certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def days_left(path: Path) -> float:
    left = read_certificate(path).not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return left.total_seconds() / 86400


def fingerprint(path: Path) -> str:
    """sha256 of the certificate as it travels in a handshake."""
    return read_certificate(path).fingerprint(hashes.SHA256()).hex()


# Nodes


def create_node_key(private: Path, public: Path, name: str) -> None:
    """ECDSA P-384 in OpenSSH's format: what `flower-supernode --auth-supernode-private-key` reads."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(private, _openssh(key))
    public.write_text(f"{_openssh_public(key.public_key())} {name}\n")


def node_public_key(public: Path) -> bytes:
    """A node's public key as it travels: PEM."""
    key = serialization.load_ssh_public_key(public.read_bytes())
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


# Signed apps. The format is the one that `flower-supernode --trusted-entities` checks.


def create_signer(private: Path, public: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    write_secret(private, _openssh(key))
    public.write_text(f"{_openssh_public(key.public_key())} {SIGNER}\n")


def sign_app(bundle: bytes, private: Path) -> dict[str, str]:
    key = serialization.load_ssh_private_key(private.read_bytes(), password=None)
    assert isinstance(key, ed25519.Ed25519PrivateKey)
    signed_at = int(time.time())
    signature = base64.urlsafe_b64encode(key.sign(_signed_text(bundle, signed_at))).rstrip(b"=").decode()
    return {"valid_license": "Valid", SIGNER: json.dumps({"signed_at": signed_at, "signature": signature})}


def is_signed(bundle: bytes, verifications: dict[str, str], public: Path) -> bool:
    key = serialization.load_ssh_public_key(public.read_bytes())
    assert isinstance(key, ed25519.Ed25519PublicKey)
    try:
        claim = json.loads(verifications[SIGNER])
        signature = base64.urlsafe_b64decode(claim["signature"] + "==")
        key.verify(signature, _signed_text(bundle, claim["signed_at"]))
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, InvalidSignature):
        return False
    return True


def trusted_entities(public: Path) -> str:
    """The file that tells a node whose apps it may run."""
    return f'{SIGNER}: "{public.read_text().strip()}"\n'


def _signed_text(bundle: bytes, signed_at: int) -> bytes:
    return signed_at.to_bytes(8, "big") + hashlib.sha256(bundle).digest()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=10))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _openssh(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def _openssh_public(key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
