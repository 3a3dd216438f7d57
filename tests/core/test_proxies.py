"""Which proxy leads to a server: options, variables, exemptions, and what is refused."""

import base64

import pytest

from isthmus.errors import UserError
from isthmus.identity.proxies import ProxyChoice, RoadBlocked, is_exempt, road_to

HUB = "hub.example.org:9400"
PROXY = {"HTTPS_PROXY": "http://proxy:3128"}


def road(address=HUB, choice=None, **environment):
    return str(road_to(address, choice, environment))


def authorization(road):
    """What the proxy is sent, decoded."""
    value = road.proxy.authorization()
    return base64.b64decode(value.removeprefix("Basic ")).decode()


def test_without_option_and_variable_a_road_is_direct_and_not_spoken_of():
    found = road_to(HUB, environment={})
    assert (str(found), found.target, found.options()) == ("directly", HUB, ())
    assert found.announcement == ""


def test_a_channel_through_a_proxy_is_for_the_name_of_the_server():
    found = road_to(HUB, environment=PROXY)
    assert found.target == "dns:///proxy:3128"
    assert found.options() == (
        ("grpc.http_connect_server", HUB),
        ("grpc.default_authority", HUB),
    )
    assert found.announcement == (
        f"connections to {HUB} go through the proxy http://proxy:3128 (HTTPS_PROXY)"
    )


def test_small_letters_come_before_capitals_and_an_empty_value_is_none():
    assert road(https_proxy="http://small:1", HTTPS_PROXY="http://large:2").endswith(
        "http://small:1 (https_proxy)"
    )
    assert road(https_proxy="", HTTPS_PROXY="http://large:2") == "directly"
    assert road(http_proxy="http://other:1", ALL_PROXY="http://other:1") == "directly"


@pytest.mark.parametrize(
    "address",
    [
        *("localhost:9400", "LocalHost:9400", "localhost.:9400"),
        *("127.0.0.1:9400", "127.3.2.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"),
    ],
)
def test_variables_are_not_for_loopback_and_the_option_is(address):
    assert road(address, **PROXY) == "directly (HTTPS_PROXY is not for this machine itself)"
    chosen = ProxyChoice(url="http://proxy:3128")
    assert road(address, chosen) == "through the proxy http://proxy:3128 (--proxy)"


def test_a_socket_is_never_reached_through_a_proxy():
    assert road("unix:/run/link", ProxyChoice(url="http://proxy:3128"), **PROXY) == "directly"


def test_the_option_comes_before_all_variables():
    chosen = ProxyChoice(url="http://mine:1")
    assert road(HUB, chosen, NO_PROXY="*", **PROXY).endswith("http://mine:1 (--proxy)")
    assert road(HUB, ProxyChoice(url="None"), **PROXY) == "directly (--proxy none)"


@pytest.mark.parametrize(
    ("host", "exempt", "expected"),
    [
        ("hub.example.org", "hub.example.org", True),
        ("HUB.example.org.", "hub.Example.org", True),
        ("hub.example.org", "example.org", True),
        ("hub.example.org", ".example.org", True),
        ("hub.example.org", "*.example.org", True),
        ("example.org", ".example.org", True),
        ("notexample.org", "example.org", False),
        ("hub.example.org", "other.org, example.org", True),
        ("hub.example.org", "other.org  example.org", True),
        ("hub.example.org", "*", True),
        ("hub.example.org", "", False),
        ("hub.example.org", ",,", False),
        ("hub.example.org", "example.org:9400", True),
        ("hub.example.org", "example.org:443", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.1.2.9/24", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("10.1.2.3", "10.1.2.3:9400", True),
        ("10.1.2.3", "10.0.0.0/8:9400", True),
        ("10.1.2.3", "10.0.0.0/8:443", False),
        ("[::ffff:10.1.2.3]", "10.0.0.0/8", True),
        ("10.1.2.3", "2.3", False),
        ("[2001:db8::5]", "2001:db8::5", True),
        ("[2001:db8::5]", "[2001:db8:0::5]", True),
        ("[2001:db8::5]", "[2001:db8::5]:9400", True),
        ("[2001:db8::5]", "[2001:db8::5]:1", False),
        ("[2001:db8::5]", "2001:db8::/32", True),
        ("[2001:db8::5]", "2001:db8::/32:9400", True),
        ("[2001:db8::5]", "[2001:db8::]/32:9400", True),
        ("[2001:db8::5]", "[2001:db8::/32]:1", False),
        ("[2001:db8::5]", "10.0.0.0/8", False),
        ("hub.example.org", "10.0.0.0/8", False),
    ],
)
def test_no_proxy(host, exempt, expected):
    assert is_exempt(host, 9400, exempt) is expected
    way = "directly (NO_PROXY exempts it from HTTPS_PROXY)"
    assert (road(f"{host}:9400", NO_PROXY=exempt, **PROXY) == way) is expected


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("https://me:secret@proxy:443", "names a proxy with https://, and only http:// is"),
        ("socks5h://me:secret@proxy:1080", "names a proxy with socks5h://, and only http:// is"),
        ("http://me:secret@proxy", "is 'proxy', which is not of the form http://HOST:PORT"),
        ("http://me:secret@proxy:0", "is 'proxy:0', which is not of the form"),
        ("http://me:secret@proxy:99999", "is 'proxy:99999', which is not of the form"),
        ("http://me:secret@pro xy:3128", "is 'pro xy:3128', which is not of the form"),
        ("http://me:secret@proxy\r\n:3128", r"is 'proxy\\r\\n:3128', which is not of the form"),
        ("http://me:secret@proxy:3128/path", "is 'proxy:3128/path', which is not of the form"),
        ("http://me:secret@[::1:3128", r"is '\[::1:3128', which is not of the form"),
        ("http://me:secret@::1:3128", "is '::1:3128', which is not of the form"),
        ("http://me:secret:proxy:3128", "is not of the form http://HOST:PORT$"),
        ("http://me:secret", "is not of the form http://HOST:PORT$"),
        ("http://10.9.1.1", "is 'http://10.9.1.1', which is not of the form http://HOST:PORT$"),
    ],
)
def test_another_value_is_refused_without_its_password(url, sentence):
    with pytest.raises(UserError, match=f"^HTTPS_PROXY {sentence}") as caught:
        road(HTTPS_PROXY=url)
    assert "secret" not in str(caught.value)


def test_a_password_with_slashes_is_no_kind_of_proxy():
    found = road_to(HUB, environment={"HTTPS_PROXY": "me:pa://secret@proxy:3128"})
    assert (str(found.proxy), authorization(found)) == ("http://proxy:3128", "me:pa://secret")


def test_an_option_without_a_proxy_is_refused():
    with pytest.raises(UserError, match=r"^--proxy is empty: give http://HOST:PORT, or none$"):
        ProxyChoice.given("", None)


def test_a_login_without_a_proxy_is_not_ignored_in_silence(tmp_path):
    choice = ProxyChoice.given(None, tmp_path / "login")
    with pytest.raises(UserError, match=r"^--proxy-login is given and no proxy: give --proxy "):
        road(HUB, choice)
    remembered = ProxyChoice().over(ProxyChoice.remembered(choice.saved()))
    assert road(HUB, remembered) == (
        "directly (no proxy is named for the login that was given when it joined)"
    )
    assert road("127.0.0.1:1", choice, **PROXY).startswith("directly")


@pytest.mark.parametrize("url", ["proxy:3128", "http://proxy:3128/", "HTTP://proxy:3128"])
def test_other_spellings_of_the_same_proxy(url):
    assert road(HTTPS_PROXY=url) == "through the proxy http://proxy:3128 (HTTPS_PROXY)"


def test_a_proxy_by_its_address():
    assert road_to(HUB, environment={"https_proxy": "[2001:db8::1]:3128"}).target == (
        "dns:///[2001:db8::1]:3128"
    )


def test_what_cannot_be_in_a_request_is_not_sent_to_a_proxy():
    with pytest.raises(UserError, match="cannot be given to a proxy"):
        road("hub\r\nHost: x:9400", **PROXY)


def test_the_password_of_a_variable_is_used_and_in_no_message():
    found = road_to(HUB, environment={"HTTPS_PROXY": "http://d%C3%A9vice:p%40ss:w@proxy:3128"})
    assert authorization(found) == "dévice:p@ss:w"
    assert "p@ss" not in f"{found!r} {found} {found.announcement} {found.proxy!r}"
    assert "p%40ss" not in f"{found!r} {found} {found.announcement} {found.proxy!r}"


def test_a_password_on_the_command_line_is_refused():
    with pytest.raises(UserError, match=r"^--proxy must not have a user name") as caught:
        road(HUB, ProxyChoice(url="http://me:secret@proxy:3128"))
    assert "secret" not in str(caught.value)


def test_a_login_is_read_anew_for_each_connection(tmp_path):
    file = tmp_path / "login"
    file.write_text("device:first\n")
    file.chmod(0o600)
    found = road_to(HUB, ProxyChoice.given("http://proxy:3128", file), {})
    assert authorization(found) == "device:first"
    file.write_text("device:second with spaces\r\n")
    assert authorization(found) == "device:second with spaces"
    file.unlink()
    with pytest.raises(RoadBlocked, match=r"login .*/login cannot be read: No such file"):
        found.options()


def test_a_login_in_a_file_comes_before_that_of_a_variable(tmp_path):
    file = tmp_path / "login"
    file.write_text("device:file")
    file.chmod(0o600)
    variables = {"HTTPS_PROXY": "http://me:variable@proxy:3128"}
    found = road_to(HUB, ProxyChoice.given(None, file), variables)
    assert (str(found.proxy), authorization(found)) == ("http://proxy:3128", "device:file")


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (b"device:secret\n", 0o640, r"/login can be read by others on this machine; chmod 600 "),
        (b"devicesecret\n", 0o600, "/login is not one line of the form USER:PASSWORD"),
        (b":secret\n", 0o600, "/login is not one line of the form USER:PASSWORD"),
        (b"device:secret\nmore\n", 0o600, "/login is not one line of the form USER:PASSWORD"),
        (b"device:" + b"secret" * 1000, 0o600, "/login is not one line of the form USER:PASSWORD"),
        (b"device:secret\xff\n", 0o600, "/login is not UTF-8"),
    ],
)
def test_a_login_that_cannot_be_used_is_refused_at_once(tmp_path, content, mode, sentence):
    file = tmp_path / "login"
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(UserError, match=rf"^the proxy's login .*{sentence}") as caught:
        road(HUB, ProxyChoice.given("http://proxy:3128", file))
    assert "secret" not in str(caught.value)


def test_what_was_chosen_when_joining_holds_until_something_else_is_said(tmp_path):
    then = ProxyChoice.remembered(ProxyChoice("http://then:1", "/then").saved())
    assert ProxyChoice().over(then) == then
    assert ProxyChoice(url="http://now:2").over(then) == ProxyChoice(url="http://now:2")
    changed = ProxyChoice(login="/now").over(then)
    assert (changed.url, changed.login) == ("http://then:1", "/now")
    with pytest.raises(UserError, match=r"^--proxy when it joined names a proxy with ftp://"):
        road(HUB, ProxyChoice.remembered({"url": "ftp://x:1", "login": ""}))


@pytest.mark.parametrize(
    ("address", "environment", "said"),
    [
        ("hub.example.org:443", {}, False),
        ("hub.example.org:443", {"HTTP_PROXY": "http://proxy:3128"}, False),
        ("hub.example.org:443", {"HTTPS_PROXY": "http://proxy:3128"}, True),
        ("hub.example.org:443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "*"}, True),
        ("localhost:443", {}, True),
    ],
)
def test_where_nobody_is_reached_a_proxy_is_thought_of_if_nothing_was_said(
    address, environment, said
):
    road = road_to(address, None, environment)
    assert road.other_way == (
        "" if said else "; where only a proxy leads out, give it with --proxy"
    )
