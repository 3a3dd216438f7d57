"""The distribution's nginx, with the configurations of `deploy/nginx`."""

import asyncio
import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.free_ports import free_ports
from tests.server.waiting import wait_until

CONFIGURATIONS = Path(__file__).parents[2] / "deploy" / "nginx"

AROUND = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/log;
events {{}}
"""
IN_HTTP = """
http {{
    access_log {folder}/access;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {text}
}}
"""


def program():
    """nginx itself; the test is skipped without it."""
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip("there is no nginx; install nginx-light")
    return found


def replaced(text, changes):
    """A configuration with other addresses and files, each of which has to be in it."""
    for there, here in changes.items():
        assert there in text
        text = text.replace(there, here)
    return text


def arguments(text, folder, user=""):
    """Write a configuration, and return the arguments with which nginx reads it."""
    file = folder / "nginx.conf"
    as_user = f"user {user};\n" if user else ""
    file.write_text(text + as_user + AROUND.format(folder=folder))
    return ["-e", str(folder / "log"), "-c", str(file)]


@contextlib.asynccontextmanager
async def nginx(text, folder, port):
    """Run nginx with a configuration, by which it listens at the port, during the block."""
    found = program()
    process = await asyncio.create_subprocess_exec(
        found, *arguments(text, folder), stderr=asyncio.subprocess.PIPE
    )
    try:
        await wait_until(lambda: process.returncode is not None or _listens(port))
        assert process.returncode is None, await process.stderr.read()
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.asynccontextmanager
async def ending_tls(forwards_to, folder, names=("localhost",), changes=None):
    """The nginx of `deploy` that ends TLS; returns its address, and its authority's file.

    `changes` are further ones to its configuration.
    """
    authority, pair = certified(folder, names)
    port = free_ports(1)
    text = ending_configuration(folder, pair, f"127.0.0.1:{port}", forwards_to, changes)
    async with nginx(text, folder, port):
        yield f"wss://{names[0]}:{port}/isthmus", authority


def ending_configuration(folder, pair, address, forwards_to, changes=None):
    """The configuration of `deploy` that ends TLS, with other addresses and files."""
    text = replaced(
        (CONFIGURATIONS / "ends-tls.conf").read_text(),
        {
            "listen 443 ssl;": f"listen {address} ssl;",
            "listen [::]:443 ssl;": "",
            "/etc/ssl/fleet.example.org.pem": str(pair),
            "/etc/ssl/private/fleet.example.org.key": str(pair),
            "127.0.0.1:9480": f"127.0.0.1:{forwards_to}",
            **(changes or {}),
        },
    )
    return IN_HTTP.format(folder=folder, text=text)


MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")


def stream_module():
    """nginx's module for streams; the test is skipped without it."""
    if not MODULE.exists():
        pytest.skip("nginx has no streams here; install libnginx-mod-stream")
    return MODULE


def passing_configuration(address, forwards_to):
    """The configuration of `deploy` that passes TLS on, with other addresses."""
    changes = {
        "listen 443;": f"listen {address};",
        "listen [::]:443;": "",
        "127.0.0.1:9402": f"127.0.0.1:{forwards_to}",
    }
    text = replaced((CONFIGURATIONS / "pass-through.conf").read_text(), changes)
    return f"load_module {stream_module()};\n{text}"


def standby_configuration(address, first, second):
    """The configuration of `deploy` for a server and its standby, with other addresses."""
    changes = {
        "listen 443;": f"listen {address};",
        "listen [::]:443;": "",
        "127.0.0.1:9402": f"127.0.0.1:{first}",
        "127.0.0.1:9403": f"127.0.0.1:{second}",
    }
    text = replaced((CONFIGURATIONS / "standby.conf").read_text(), changes)
    return f"load_module {stream_module()};\n{text}"


def certified(folder, names, authority_name="Example Web CA", days=0):
    """Files with an authority of the web, and with a certificate of it and its key.

    They are valid for two days, in the middle of which it is now or that many `days` later.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, authority_name)])
    authority = _certificate(issuer, issuer, key.public_key(), key, ca=True, days=days)
    own = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    leaf = _certificate(subject, issuer, own.public_key(), key, names=names, days=days)
    (folder / "web-ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    private = own.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "web.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM) + private)
    return folder / "web-ca.pem", folder / "web.pem"


def _certificate(subject, issuer, public, key, ca=False, names=(), days=0):
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        # From 3.13 on Python asks for these three, as RFC 5280 does.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
        .add_extension(_usage(ca), critical=True)
    )
    if names:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_name(name) for name in names]), critical=False
        )
    return builder.sign(key, hashes.SHA256())


def _usage(ca):
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _name(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
