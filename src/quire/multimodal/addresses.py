"""Which addresses of the network a server may be sent to by a client.

A client who names a URL has the server connect for it. An address that only the server can reach (its own machine, its
network, the metadata service of its cloud) is not a client's to name. Knows addresses; opens no connection.
"""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_HOST_SERVICES = frozenset({ipaddress.IPv4Address("168.63.129.16")})
"""Public by their number, and yet answered by the host of a virtual machine: Azure's."""


def is_public(text: str) -> bool:
    """Whether an address, as a resolver gives it, is one of the public internet. IPv4 addresses within IPv6 ones count, too."""
    try:
        address: Address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return "%" not in text and all(map(_is_public, _meanings(address)))


def _meanings(address: Address) -> list[Address]:
    """The address, and the IPv4 addresses to which a gateway may send what goes to it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    inner: list[Address | None] = [address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _NAT64) or int(address) < 1 << 32:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *(each for each in inner if each is not None)]


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and any(address in network for network in _NAT64):
        return True  # judged by what is inside
    is_site = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not address.is_multicast and not is_site and address not in _HOST_SERVICES
