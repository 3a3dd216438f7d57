"""Which HTTP proxy leads to a server, if any.

The owner of a machine names one with `--proxy`. Otherwise the variables `HTTPS_PROXY` and
`NO_PROXY` decide, as curl and Python's requests read them. gRPC has rules of its own for these
variables, which differ (any end of a name counts as a domain, and `no_proxy` also exempts servers
from a proxy that a program gives it), so it is told not to read them.

>>> road = road_to("fleet.example.org:9400", environment={"HTTPS_PROXY": "http://me:pw@proxy:3128"})
>>> str(road)
'through the proxy http://proxy:3128 (HTTPS_PROXY)'
>>> str(road_to("127.0.0.1:9400", environment={"HTTPS_PROXY": "http://proxy:3128"}))
'directly (HTTPS_PROXY is not for this machine itself)'
"""

from __future__ import annotations

import base64
import dataclasses
import ipaddress
import os
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from isthmus.errors import UserError
from isthmus.identity import tls
from isthmus.identity.balancers import Balancer, host_and_port, is_behind_balancer
from isthmus.system.private_files import check_private

DIRECTLY = "none"
"""The value of `--proxy` for no proxy, whatever the variables say."""

_LONGEST_LOGIN = 4096
"""Characters that are read of a file with a user name and a password."""
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_A_PLACE = re.compile(r"[^:]*(?::[0-9]*(?:/.*)?)?|[0-9A-Fa-f:.\[\]]*")
_GIVEN_NOW = "--proxy"
_GIVEN_THEN = "--proxy when it joined"


class RoadBlocked(UserError):
    """A road on which no server is reached; the message is a whole sentence."""

    def __init__(self, found: str, remedy: str = "") -> None:
        """`found` says what is in the way, `remedy` what to do about it."""
        super().__init__(f"{found}; {remedy}" if remedy else found)
        self.found = found
        self.remedy = remedy


class LoginRefused(RoadBlocked):
    """A road on which a proxy does not accept the user name and the password that it was given."""


class OtherFleet(RoadBlocked):
    """A road at whose end is a server of another authority than the expected one."""


@dataclasses.dataclass(frozen=True)
class ProxyChoice:
    """What the owner of a machine has said about proxies; empty if the variables decide."""

    url: str = ""
    """`http://HOST:PORT`, or `none` to connect directly."""
    login: str = ""
    """Path of a file with `USER:PASSWORD`."""
    source: str = _GIVEN_NOW
    """Where the choice is from, for messages."""
    balancer_ca: str = ""
    """Path of a file with the authorities of a balancer that ends TLS; empty for this machine's."""

    @classmethod
    def given(
        cls, url: str | None, login: Path | None, balancer_ca: Path | None = None
    ) -> ProxyChoice:
        """The choice of the options `--proxy`, `--proxy-login` and `--balancer-ca`.

        Raises:
            UserError: the option is there and empty, as with a shell's variable that is not set.
        """
        if url is not None and not url.strip():
            raise UserError(f"--proxy is empty: give http://HOST:PORT, or {DIRECTLY}")
        return cls(
            url or "",
            "" if login is None else str(login.resolve()),
            balancer_ca="" if balancer_ca is None else str(balancer_ca.resolve()),
        )

    @classmethod
    def remembered(cls, saved: Mapping[str, str]) -> ProxyChoice:
        """The choice that was made when this machine joined.

        Raises:
            KeyError: something is missing in what was saved.
        """
        # Only there since servers may be behind balancers.
        ca = str(saved.get("balancer_ca", ""))
        return cls(str(saved["url"]), str(saved["login"]), _GIVEN_THEN, ca)

    def saved(self) -> dict[str, str]:
        """What `remembered` reads."""
        ca = {"balancer_ca": self.balancer_ca} if self.balancer_ca else {}
        return {"url": self.url, "login": self.login, **ca}

    def over(self, remembered: ProxyChoice) -> ProxyChoice:
        """A copy of the choice, with what it leaves open as it was when the machine joined.

        A login is never used for another proxy than the one that it was given with.
        """
        ca = self.balancer_ca or remembered.balancer_ca
        if self.url:
            return dataclasses.replace(self, balancer_ca=ca)
        login = self.login or remembered.login
        return dataclasses.replace(remembered, login=login, balancer_ca=ca)

    def words(self) -> list[str]:
        """The options of a command that say this."""
        options = (
            ("--proxy", self.url),
            ("--proxy-login", self.login),
            ("--balancer-ca", self.balancer_ca),
        )
        return [word for option, value in options if value for word in (option, value)]

    def __bool__(self) -> bool:
        return bool(self.url or self.login or self.balancer_ca)


@dataclasses.dataclass(frozen=True)
class Proxy:
    """An HTTP proxy that tunnels connections (CONNECT)."""

    host: str
    """A name or an address; an IPv6 address in brackets."""
    port: int
    login_file: Path | None = None
    in_url: str = dataclasses.field(default="", repr=False)
    """User name and password of the variable's URL, which no message has."""

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def has_login(self) -> bool:
        """Whether a user name and a password were given."""
        return self.login_file is not None or bool(self.in_url)

    def authorization(self) -> str:
        """The value of the header `Proxy-Authorization`; empty without a login.

        The file is read each time, so that a password can be changed while a device runs.

        Raises:
            RoadBlocked: the file with the login cannot be used.
        """
        login = self.in_url if self.login_file is None else _read_login(self.login_file)
        return f"Basic {base64.b64encode(login.encode()).decode()}" if login else ""


@dataclasses.dataclass(frozen=True)
class Road:
    """How connections from this machine get to an address: directly, or through a proxy."""

    address: str
    """host:port of the server, `unix:PATH`, or `wss://HOST/PATH` of the balancer before it."""
    proxy: Proxy | None = None
    reason: str = ""
    """Why it is this road; empty if neither an option nor a variable is about it."""
    by_variable: bool = False
    """Whether the proxy is that of a variable."""
    balancer: Balancer | None = None
    """The balancer before the server that ends TLS; None if nothing does."""

    def __str__(self) -> str:
        way = "directly" if self.proxy is None else f"through the proxy {self.proxy}"
        if self.reason:
            way += f" ({self.reason})"
        return way if self.balancer is None else f"{way}, in a WebSocket through {self.balancer}"

    @property
    def announcement(self) -> str:
        """A sentence for the beginning of a log; empty if there is nothing to say."""
        if not self.reason and self.balancer is None:
            return ""
        return f"connections to {self.address} go {self}"

    def check_used(self, choice: ProxyChoice | None) -> None:
        """Refuse a choice of now that this road does not use.

        Raises:
            UserError: it names authorities of a balancer, and there is none.
        """
        if choice is not None and choice.balancer_ca and self.balancer is None:
            raise UserError(
                f"--balancer-ca is for a server behind a balancer, and {self.address} is not the "
                "address of one, which begins with wss://"
            )

    @property
    def is_plain(self) -> bool:
        """Whether nothing of which this machine knows is between it and the server."""
        return self.proxy is None and self.balancer is None

    @property
    def other_way(self) -> str:
        """What else to try where nobody is reached, after a semicolon; empty if all was said."""
        if self.proxy is not None or self.reason or _is_this_machine(self.host):
            return ""
        return "; where only a proxy leads out, give it with --proxy"

    @property
    def unreached(self) -> str:
        """What to do where nothing listens, or nobody answers."""
        return f"check that the server runs, and the firewalls between{self.other_way}"

    @property
    def host(self) -> str:
        """The name or address that the server's certificate is for."""
        return host_and_port(self.address)[0]

    @property
    def port(self) -> int:
        """The port of the server, or of the balancer before it."""
        return host_and_port(self.address)[1]

    @property
    def place(self) -> str:
        """HOST:PORT of the server, or of the balancer before it."""
        return f"{self.host}:{self.port}"

    @property
    def detour(self) -> str:
        """` through the proxy ...` for the end of a message; empty for a direct road."""
        return "" if self.proxy is None else f" {self}"

    @property
    def target(self) -> str:
        """What a gRPC channel has to dial; see `isthmus.identity.approach` for balancers."""
        if self.proxy is None:
            return self.address
        return f"dns:///{self.proxy.host}:{self.proxy.port}"

    def options(self) -> tuple[tuple[str, str], ...]:
        """The options of a gRPC channel to `target`, which leave TLS between here and the server.

        Raises:
            RoadBlocked: the file with the login cannot be used.
        """
        if self.proxy is None:
            return ()
        authorization = self.proxy.authorization()
        login = (("grpc.http_connect_headers", f"Proxy-Authorization:{authorization}"),)
        return (
            ("grpc.http_connect_server", self.place),
            # The certificate has to be for the server's name, and not for that of the proxy.
            ("grpc.default_authority", self.place),
            *(login if authorization else ()),
        )


def road_to(
    address: str,
    choice: ProxyChoice | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Road:
    """The road to an address, by the owner's choice or by the variables.

    Raises:
        UserError: the proxy or the file with its login cannot be used.
    """
    choice = choice or ProxyChoice()
    if tls.is_socket(address):
        return Road(address)
    host, port = host_and_port(address)
    balancer = None
    if is_behind_balancer(address):
        balancer = Balancer.at(address, Path(choice.balancer_ca) if choice.balancer_ca else None)
        balancer.context()  # a file that cannot be used is an error of the command
        address = balancer.url
    road = _first_part(host, port, address, choice, environment)
    return dataclasses.replace(road, balancer=balancer)


def _first_part(
    host: str, port: int, address: str, choice: ProxyChoice, environment: Mapping[str, str]
) -> Road:
    """The road to where a server or the balancer before it listens.

    Raises:
        UserError: the proxy or the file with its login cannot be used.
    """
    if choice.url.lower() == DIRECTLY:
        return Road(address, None, f"{choice.source} {DIRECTLY}")
    url = choice.url
    source = choice.source
    if not url:
        source, url = _variable("https_proxy", environment)
        if not url:
            return Road(address, None, _unused_login(choice))
        if _is_this_machine(host):
            return Road(address, None, f"{source} is not for this machine itself")
        exempting, exempt = _variable("no_proxy", environment)
        if is_exempt(host, port, exempt):
            return Road(address, None, f"{exempting} exempts it from {source}")
    if not address.isascii() or not address.isprintable() or " " in address:
        raise UserError(f"the server's address {address!r} cannot be given to a proxy")
    proxy = _proxy_of(url, source, choice.login)
    proxy.authorization()  # a file that cannot be used is an error of the command
    return Road(address, proxy, source, by_variable=not choice.url)


def is_exempt(host: str, port: int, exempt: str) -> bool:
    """Whether `NO_PROXY` names a host: by its name, a domain, its address or a range of addresses.

    A host that is given by its name is not looked up.

    >>> is_exempt("hub.example.org", 9400, "localhost, .example.org")
    True
    >>> is_exempt("10.1.2.3", 9400, "10.0.0.0/8")
    True
    >>> is_exempt("notexample.org", 9400, "example.org")
    False
    """
    name = host.strip("[]").lower().rstrip(".")
    address = _address(name)
    for entry in re.split(r"[\s,]+", exempt.lower()):
        if entry == "*":
            return True
        only, only_port = _without_port(entry)
        if only_port not in ("", str(port)):
            continue
        if address is not None:
            network = _network(only)
            if network is not None and address in network:
                return True
            continue
        only = only.removeprefix("*").strip(".")
        if only and (name == only or name.endswith(f".{only}")):
            return True
    return False


def _without_port(entry: str) -> tuple[str, str]:
    """A server or range of `NO_PROXY`, and its port; empty for all ports.

    >>> _without_port("10.0.0.0/8:9400"), _without_port("fd00::5"), _without_port("[fd00::5]:9400")
    (('10.0.0.0/8', '9400'), ('fd00::5', ''), ('[fd00::5]', '9400'))
    """
    only, colon, port = entry.rpartition(":")
    # An IPv6 address has colons, too: what follows its bracket or the length of its range is none.
    if colon and (":" not in only or only.endswith("]") or "/" in only):
        return only, port
    return entry, ""


def _unused_login(choice: ProxyChoice) -> str:
    """What to say of a login for which neither an option nor a variable names a proxy.

    Raises:
        UserError: it was given now, so that its owner expects one.
    """
    if not choice.login:
        return ""
    if choice.source == _GIVEN_NOW:
        raise UserError(
            "--proxy-login is given and no proxy: give --proxy http://HOST:PORT, or set HTTPS_PROXY"
        )
    return "no proxy is named for the login that was given when it joined"


def _is_this_machine(host: str) -> bool:
    """Whether a server's name or address is that of loopback, in any spelling."""
    name = host.strip("[]").lower().rstrip(".")
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _variable(name: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """A variable's name and value, as given in small letters or else in capitals."""
    for spelled in (name, name.upper()):
        if spelled in environment:
            return spelled, environment[spelled].strip()
    return name.upper(), ""


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, an IPv4 one within IPv6 as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """An address or range of addresses; None for a name."""
    try:
        return ipaddress.ip_network(re.sub(r"[\[\]]", "", text), strict=False)
    except ValueError:
        return None


def _proxy_of(url: str, source: str, login: str) -> Proxy:
    """Read the URL of a proxy; a scheme is not needed.

    Raises:
        UserError: it is not of that form. No message has what is before its `@`.
    """
    # Not any text before `://`, which may be of a password.
    scheme = "http"
    rest = url
    if match := _SCHEME.match(url):
        scheme = match[1]
        rest = url[match.end() :]
    in_url, _, place = rest.rpartition("@")
    place = place.removesuffix("/")
    if scheme.lower() != "http":
        raise UserError(
            f"{source} names a proxy with {scheme}://, and only http:// is supported: give "
            f"--proxy http://HOST:PORT, or --proxy {DIRECTLY} to connect directly"
        )
    if in_url and source == _GIVEN_NOW:
        raise UserError(
            "--proxy must not have a user name and a password, which others on this machine would "
            "see: write USER:PASSWORD into a file of mode 0600 and give it with --proxy-login"
        )
    host, _, digits = place.rpartition(":")
    is_host = _HOST.fullmatch(host) is not None
    if host.startswith("[") and host.endswith("]"):
        is_host = isinstance(_address(host[1:-1]), ipaddress.IPv6Address)
    is_port = re.fullmatch("[0-9]{1,5}", digits) is not None and 0 < int(digits) <= 65535
    if not is_host or not is_port:
        # What is no place may be a password whose `@` was forgotten.
        typed = place if in_url else url
        shown = f" {typed!r}, which is" if _A_PLACE.fullmatch(place) else ""
        raise UserError(f"{source} is{shown} not of the form http://HOST:PORT")
    if in_url:
        user, _, password = in_url.partition(":")
        in_url = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password)}"
    return Proxy(host, int(digits), Path(login) if login else None, "" if login else in_url)


def _read_login(path: Path) -> str:
    """The user name and the password in a file.

    Raises:
        RoadBlocked: it cannot be read, others can read it, or it is not of that form.
    """
    try:
        check_private(path)
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_LONGEST_LOGIN + 1)
    except UserError as error:
        raise RoadBlocked(f"the proxy's login {error}") from None
    except OSError as error:
        raise RoadBlocked(f"the proxy's login {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RoadBlocked(f"the proxy's login {path} is not UTF-8") from None
    login = text.removesuffix("\n").removesuffix("\r")
    user, separator, _ = login.partition(":")
    if not user or not separator or not login.isprintable() or len(text) > _LONGEST_LOGIN:
        raise RoadBlocked(f"the proxy's login {path} is not one line of the form USER:PASSWORD")
    return login
