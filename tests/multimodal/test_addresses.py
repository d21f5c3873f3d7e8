"""Addresses that a client may send the server to."""

import pytest

from quire.multimodal.addresses import is_public

PRIVATE = {
    "this machine": ["127.0.0.1", "127.255.0.3", "::1", "0.0.0.0", "::"],
    "a private network": ["10.0.0.1", "172.16.9.9", "192.168.1.1", "fc00::1", "fd00:ec2::254", "fec0::1"],
    "a link, and metadata of clouds": [
        "169.254.169.254",
        "fe80::1",
        "fe80::1%eth0",
        "100.100.100.200",
        "168.63.129.16",
    ],
    "shared, reserved or documentation": ["100.64.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "2001:db8::1"],
    "many machines": ["224.0.0.1", "ff02::1"],
    "an IPv4 address inside": [
        "::ffff:127.0.0.1",
        "::ffff:a9fe:a9fe",
        "64:ff9b::10.0.0.1",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "::127.0.0.1",
        "2001:0:7f00:1:0:0:f5ff:fffe",
    ],
    "no address": ["", "example.org", "0x7f000001", "127.1"],
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_an_address_that_is_not_public_is_found_in_any_spelling(kind):
    assert [address for address in PRIVATE[kind] if is_public(address)] == []


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_public_addresses_are_public(address):
    assert is_public(address)
