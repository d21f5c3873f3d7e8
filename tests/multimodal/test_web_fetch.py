"""Files that clients name by URL: which hosts are asked, what is refused, what bounds a fetch. The hosts are on this machine."""

import re
import socket
import ssl
import subprocess
import threading

import pytest
from tests.oracles.media_server import MediaServer, answer, redirect

from quire.multimodal.web_fetch import MediaError, WebFetcher

BODY = bytes(range(256)) * 300


@pytest.fixture
def server():
    with MediaServer({"/file": answer(BODY)}) as server:
        yield server


def make_fetcher(domains=("files.test",), seconds=20.0, **options):
    """A fetcher for which every host is this machine."""
    return WebFetcher(domains, seconds, resolve=options.pop("resolve", lambda host, port: ["127.0.0.1"]), **options)


def test_a_file_comes_as_it_is_whatever_its_body_looks_like(server):
    def in_pieces(peer):
        peer.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(BODY), 7000):
            piece = BODY[start : start + 7000]
            peer.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        peer.sendall(b"0\r\n\r\n")

    server.files |= {
        "/pieces": in_pieces,
        "/end": lambda peer: peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + BODY),
        "/more": answer(BODY + b"more than declared", Content_Length=str(len(BODY))),
        "/a%20%C3%A4?b=%C3%A4": answer(BODY),
    }
    fetcher = make_fetcher()
    for path in ("/file", "/pieces", "/end", "/more", "/a%20ä?b=ä"):
        assert fetcher.fetch(f"http://files.test:{server.port}{path}") == BODY
    assert set(server.hosts) == {f"files.test:{server.port}"}


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/file",
        "http://localhost:{port}/file",
        "http://2130706433:{port}/file",
        "http://0x7f.1:{port}/file",
        "http://[::1]:{port}/file",
        "http://[::ffff:127.0.0.1]:{port}/file",
        "http://0:{port}/file",
    ],
)
def test_a_host_that_only_the_server_can_reach_is_not_asked(server, url):
    with pytest.raises(MediaError, match=r"is not one of the public internet|is not known"):
        WebFetcher(None, 20.0).fetch(url.format(port=server.port))
    assert server.asked == []


def test_one_private_address_among_public_ones_is_enough_to_refuse(server):
    fetcher = make_fetcher(None, resolve=lambda host, port: ["8.8.8.8", "127.0.0.1"])
    with pytest.raises(MediaError, match="not one of the public internet"):
        fetcher.fetch(f"http://files.test:{server.port}/file")
    assert server.asked == []


def test_only_hosts_that_are_named_are_asked_where_any_are(server):
    fetcher = make_fetcher(("Files.Test.", "127.0.0.1"))
    for host in ("files.test", "FILES.test", "files.test.", "127.0.0.1"):
        assert fetcher.fetch(f"http://{host}:{server.port}/file") == BODY
    for host in ("other.test", "sub.files.test", "files.test.other.test", "localhost"):
        with pytest.raises(MediaError, match="--allowed-media-domains"):
            fetcher.fetch(f"http://{host}:{server.port}/file")
    assert len(server.asked) == 4


def test_each_target_of_redirects_is_checked_as_the_first_host_was(server):
    targets = {
        "/private": ("http://10.0.0.1/file", "allowed-media-domains"),
        "/other": (f"http://other.test:{server.port}/file", "allowed-media-domains"),
        "/file-scheme": ("file:///etc/passwd", "is not a URL of the form"),
        "/user": (f"http://files.test@other.test:{server.port}/file", "is not a URL of the form"),
    }
    server.files |= {path: redirect(url) for path, (url, _) in targets.items()}
    server.files |= {
        "/relative": redirect("/file"),
        "/again": redirect(f"http://files.test:{server.port}/relative", "308 R"),
    }
    fetcher = make_fetcher()
    assert fetcher.fetch(f"http://files.test:{server.port}/again") == BODY
    for path, (_, why) in targets.items():
        with pytest.raises(MediaError, match=why):
            fetcher.fetch(f"http://files.test:{server.port}{path}")
    assert server.asked.count("/file") == 1


def test_a_redirect_from_the_public_internet_to_this_machine_is_refused(server, monkeypatch):
    monkeypatch.setattr(
        "quire.multimodal.web_fetch.is_public", lambda address: address == "127.0.0.1"
    )  # the first host's
    addresses = {"public.test": ["127.0.0.1"], "private.test": ["127.0.0.2"]}
    server.files["/go"] = redirect(f"http://private.test:{server.port}/file")
    fetcher = make_fetcher(None, resolve=lambda host, port: addresses[host])
    assert fetcher.fetch(f"http://public.test:{server.port}/file") == BODY
    with pytest.raises(MediaError, match=r"'private\.test' is not one of the public internet"):
        fetcher.fetch(f"http://public.test:{server.port}/go")
    assert server.asked == ["/file", "/go"]


def test_redirects_without_end_and_redirects_that_are_not_allowed_end(server):
    server.files["/round"] = redirect("/round")
    with pytest.raises(MediaError, match="more than 5 redirects"):
        make_fetcher().fetch(f"http://files.test:{server.port}/round")
    assert len(server.asked) == 6
    with pytest.raises(MediaError, match="more than 0 redirects"):
        make_fetcher(max_redirects=0).fetch(f"http://files.test:{server.port}/round")


def test_a_host_is_looked_up_once_and_the_connection_goes_to_the_address_that_was_checked(server, monkeypatch):
    asked, connected = [], []

    def lookup(host, port):
        asked.append(host)
        return ["8.8.8.8"] if len(asked) == 1 else ["127.0.0.1"]  # public when it is checked, this machine afterwards

    def connect(address, timeout):
        connected.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(MediaError, match="it cannot be fetched from"):
        make_fetcher(None, resolve=lookup).fetch(f"http://files.test:{server.port}/file")
    assert asked == ["files.test"] and connected == ["8.8.8.8"] and server.asked == []


def test_the_next_address_is_tried_where_one_does_not_answer(server, monkeypatch):
    connect, tried = socket.create_connection, []

    def refuse_first(address, timeout):
        tried.append(address[0])
        if len(tried) == 1:
            raise ConnectionRefusedError
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", refuse_first)
    fetcher = make_fetcher(resolve=lambda host, port: ["127.0.0.3", "127.0.0.1"])
    assert fetcher.fetch(f"http://files.test:{server.port}/file") == BODY
    assert tried == ["127.0.0.3", "127.0.0.1"]


def test_a_file_with_too_many_bytes_is_refused_before_they_are_read(server):
    sent = threading.Event()

    def endless(peer):
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                peer.sendall(bytes(10_000))
        except OSError:
            sent.set()

    server.files |= {
        "/declared": answer(b"", Content_Length="1000000000"),
        "/endless": endless,
        "/bomb": answer(BODY, Content_Encoding="gzip"),
    }
    fetcher = make_fetcher(max_bytes=100_000)
    for path, why in {
        "/declared": "more than 100000",
        "/endless": "more than 100000",
        "/bomb": "compresses it",
    }.items():
        with pytest.raises(MediaError, match=why):
            fetcher.fetch(f"http://files.test:{server.port}{path}")
    assert sent.wait(60)  # the sender has been hung up on


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc"])
def test_a_host_that_drips_ends_with_the_time_of_the_whole_fetch(server, begin):
    def drip(peer):
        peer.sendall(begin)
        peer.settimeout(0.05)
        while True:  # each byte comes long before a timeout of one read
            try:
                if peer.recv(1) == b"":
                    break
            except TimeoutError:
                pass
            except OSError:
                break
            try:
                peer.sendall(b"X")
            except OSError:
                break

    server.files["/slow"] = drip
    with pytest.raises(MediaError, match=r"takes longer than 0\.4 s"):
        make_fetcher(seconds=0.4).fetch(f"http://files.test:{server.port}/slow")


def test_a_host_that_is_looked_up_for_too_long_is_given_up() -> None:
    found = threading.Event()

    def lookup(host: str, port: int) -> list[str]:
        found.wait()
        return ["127.0.0.1"]

    with pytest.raises(MediaError, match=r"takes longer than 0\.1 s"):
        make_fetcher(seconds=0.1, resolve=lookup).fetch("http://files.test/file")
    found.set()


def test_what_is_no_answer_is_told_without_what_the_host_says(server):
    server.files |= {
        "/missing": answer(b"secret", "404 Not Found"),
        "/nonsense": lambda peer: peer.sendall(b"secret\r\n\r\n"),
        "/short": answer(BODY, Content_Length=str(len(BODY) + 1)),
        "/silent": lambda peer: None,
    }
    fetcher = make_fetcher()
    for path, why in {
        "/missing": "answers with status 404",
        "/nonsense": "cannot be fetched",
        "/short": f"ends after {len(BODY)} of {len(BODY) + 1} bytes",
        "/silent": "cannot be fetched",
    }.items():
        with pytest.raises(MediaError, match=why) as caught:
            fetcher.fetch(f"http://files.test:{server.port}{path}")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///file", "http://a b/", "http://files.test\\@other/", "http://files.test:99999/", "http://u:p@files.test/",
     "http://files.test/\r\nHost: other", "http://[::1/", "http://" + "a" * 70 + "ä.test/", "https:files.test"],
)  # fmt: skip
def test_what_is_no_url_is_refused(url):
    with pytest.raises(MediaError, match=re.escape("is not a URL of the form https://HOST/PATH")):
        make_fetcher().fetch(url)


def test_a_url_that_is_too_long_is_refused():
    with pytest.raises(MediaError, match="more than 8192 characters"):
        make_fetcher().fetch("http://files.test/" + "a" * 9000)


def test_a_host_is_read_over_tls_only_with_a_certificate_of_its_name(tmp_path, monkeypatch):
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=files.test"]
    names = ["-addext", "subjectAltName=DNS:files.test"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with MediaServer({"/file": answer(BODY)}, tls) as server:
        url = f"https://files.test:{server.port}/file"
        with pytest.raises(MediaError, match=r"cannot be fetched from 'files\.test': SSLCertVerificationError"):
            make_fetcher().fetch(url)
        trusting = ssl.create_default_context(cafile=cert)
        monkeypatch.setattr("quire.multimodal.web_fetch.ssl.create_default_context", lambda: trusting)
        assert make_fetcher().fetch(url) == BODY
        with pytest.raises(MediaError, match=r"cannot be fetched from 'other\.test': SSLCertVerificationError"):
            make_fetcher(("other.test",)).fetch(url.replace("files", "other"))
        server.files["/down"] = redirect(url.replace("https", "http"))
        with pytest.raises(MediaError, match=r"redirects from https to http"):
            make_fetcher().fetch(f"https://files.test:{server.port}/down")
    assert server.asked == ["/file", "/down"]
