"""API keys, and the options of a server."""

import json

import pytest

import jattn
from jattn.serve import ServerOptions
from tests.serve.running import answered, connection, post, serving, until_closed

GOOD = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
KEY = "schlüssel-ß"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("", 401),
        (f"Authorization: {KEY}\r\n", 401),
        (f"Authorization: Basic {KEY}\r\n", 401),
        (f"Authorization: Bearer\t{KEY}\r\n", 401),
        ("Authorization: Bearer\r\n", 401),
        ("Authorization: Bearer wrong\r\n", 401),
        (f"Authorization: Bearer {KEY}x\r\n", 401),
        (f"Authorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}\r\n", 401),
        (f"X-Api-Key: {KEY}\r\n", 401),
        (f"Authorization: Bearer {KEY}\r\n", 200),
        (f"AUTHORIZATION: bearer {KEY}\r\n", 200),
        (f"authorization: BEARER   {KEY}  \r\n", 200),
    ],
)
def test_a_key_comes_once_with_its_scheme_in_any_case_and_any_script(keyed, headers, status):
    with connection(keyed, post("/v1/completions", GOOD, headers + "Connection: close\r\n")) as peer:
        head, _, body = until_closed(peer).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status)
    if status == 401:
        assert json.loads(body)["error"]["code"] == "invalid_api_key" and b"www-authenticate: Bearer" in head


def test_a_key_may_come_in_latin_1(keyed):
    raw = post("/v1/completions", GOOD, f"Authorization: Bearer {KEY}\r\nConnection: close\r\n")
    raw = raw.replace(KEY.encode("utf-8"), KEY.encode("latin-1"))
    with connection(keyed, raw) as peer:
        assert until_closed(peer).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/nowhere", "/hea%09lth", "/health%3Fx", "/health/", "/version/", "/versions"])
def test_a_path_that_does_not_exist_needs_the_key_too(keyed, path):
    for host in ("x", "x/health?"):
        with connection(keyed, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()) as peer:
            assert until_closed(peer).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("headers", ["", "Authorization: Bearer wrong\r\n", f"Authorization: Bearer {KEY}\r\n"])
def test_the_version_needs_no_key(keyed, headers):
    for method, status in (("GET", 200), ("POST", 405)):
        head = f"{method} /version HTTP/1.1\r\nHost: x\r\n{headers}\r\n"
        with connection(keyed, head.encode()) as peer:
            found, said = answered(peer)
        assert found == status and (said == {"version": jattn.__version__}) == (status == 200)


@pytest.fixture(scope="module")
def keyed():
    with serving(api_key=KEY) as (_, _, url):
        yield url


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(max_queue=0, max_connections=1.5), "max_queue=0.*max_connections=1.5"),
        (dict(header_timeout=0), "header_timeout=0"),
        (dict(grace=-1), "grace=-1"),
        (dict(body_timeout=float("inf")), "body_timeout=inf"),
        (dict(write_timeout=float("nan")), "write_timeout=nan"),
        (dict(model_name=""), "model_name=''"),
        (dict(model_name="\ud800"), "model_name="),
        (dict(api_key="secret\n"), "api_key must be"),
        (dict(api_key=""), "api_key must be"),
        (dict(api_key=12345, model_name=7), "model_name=7 must be.*api_key must be text"),  # as YAML reads digits
    ],
)
def test_options_that_mean_nothing_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ServerOptions(**options)
