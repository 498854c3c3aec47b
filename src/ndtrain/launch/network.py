"""Which network interface leads to the other ranks; gloo guesses it by the host's name."""

import fcntl
import socket
import struct

from ndtrain.errors import MeshError

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def loopback_interface() -> str | None:
    """The interface for ranks of one machine, None when it has another name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def interface_towards(host: str) -> str | None:
    """The interface over which packets to `host` leave, None when its address is IPv6 only.

    Raises:
        MeshError: the host has no address, or no route leads there.
    """
    own = _own_address(host)
    for _, name in socket.if_nameindex():
        if _address_of(name) == own:
            return name
    return None


def _own_address(host: str) -> str:
    """This machine's address on the route to `host`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MeshError(
            f"There is no way to '{host}': {error.strerror or error}.",
            where="--rdzv-endpoint",
            hint="Give a name or an address of node 0 that this machine can reach.",
        ) from error


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            # An interface without an address.
            return None
    return socket.inet_ntoa(answer[20:24])
