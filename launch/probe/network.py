"""Checks of the network before several machines meet: the address of the meeting place, and the
interface that leads to it."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address

import psutil

from launch.base.errors import ConfigError, NetworkError
from launch.schema.plan import Rendezvous

FAMILIES = (socket.AF_INET, socket.AF_INET6)


def addresses() -> dict[str, list[str]]:
    """This machine's interfaces and their addresses."""
    return {
        name: [entry.address for entry in entries if entry.family in FAMILIES]
        for name, entries in psutil.net_if_addrs().items()
    }


def located(meeting: Rendezvous | None) -> Rendezvous | None:
    """The meeting place with the interface that leads to it, unless the recipe names one.

    Raises ConfigError for an interface or address that is wrong on this machine, and NetworkError
    if there is no route.
    """
    if meeting is None:
        return None
    interfaces = addresses()
    right = _interface(meeting, interfaces)
    named = meeting.network_interface
    if named is not None and named not in interfaces:
        raise ConfigError(
            f"launch.network_interface {named}: this machine has {', '.join(sorted(interfaces))}"
        )
    if named is not None and right not in (None, named):
        raise ConfigError(
            f"launch.network_interface {named} ({', '.join(interfaces[named]) or 'no address'}):"
            f" {meeting.main_process_ip} is reached over {right}; use that, or leave the key out"
        )
    return replace(meeting, network_interface=named or right)


def _address(name: str) -> tuple[socket.AddressFamily, str]:
    """The family and the address of a name or number, of several an IPv4 one. Raises NetworkError,
    and ConfigError for what is valid on this machine, or on one cable, only."""
    plain = name.removeprefix("[").removesuffix("]")
    try:
        family, _, _, _, place = min(socket.getaddrinfo(plain, None, type=socket.SOCK_STREAM))
    except OSError as error:
        raise NetworkError(
            f"launch.main_process_ip {name}: {error.strerror}; give the address as a number,"
            " without a port (launch.main_process_port)"
        ) from error
    address = str(place[0])
    if address != plain and ip_address(address).is_loopback:
        raise ConfigError(
            f"launch.main_process_ip {name} is {address} here, which other machines take for"
            " themselves; give the address as a number"
        )
    if family == socket.AF_INET6 and ip_address(address).is_link_local:
        raise ConfigError(
            f"launch.main_process_ip {name}: {address} is valid on one cable only, which torch"
            " cannot be told; give another address (`ip -br addr` lists them)"
        )
    return family, address


def _interface(meeting: Rendezvous, interfaces: Mapping[str, list[str]]) -> str | None:
    """The interface that has the meeting place's address (machine 0), or the interface by which
    packets to it leave."""
    (family, ip), port = _address(meeting.main_process_ip), meeting.main_process_port
    if meeting.machine_rank == 0:
        holders = [name for name, ips in interfaces.items() if ip in ips]
        if not holders:
            shown = ", ".join(
                f"{name} {' '.join(ips)}" for name, ips in sorted(interfaces.items()) if ips
            )
            raise ConfigError(
                f"launch.main_process_ip {ip} is no address of this machine, number 0, which has"
                f" {shown}"
            )
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ip, port))
            except OSError as error:
                raise NetworkError(
                    f"{ip}:{port}: {error.strerror}; choose another launch.main_process_port"
                ) from error
        return holders[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, port))  # UDP: nothing is sent, the kernel only chooses the route
        except OSError as error:
            raise NetworkError(f"launch.main_process_ip {ip}: {error.strerror}") from error
        source = probe.getsockname()[0]
    return next((name for name, ips in interfaces.items() if source in ips), None)
