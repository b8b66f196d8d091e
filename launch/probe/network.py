"""Before several machines meet: whether this one can, over which interface, and where it keeps its
own files."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace

from launch.base.errors import ConfigError, NetworkError
from launch.schema.plan import Plan, Rendezvous


def addresses() -> dict[str, list[str]]:
    """This machine's interfaces and their IPv4 addresses."""
    import psutil  # 20 ms that planning need not pay

    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def located(plan: Plan) -> Plan:
    """The plan with the interface that leads to the meeting place, if the recipe names none.

    Raises ConfigError for an interface or address that cannot be right here, NetworkError when
    there is no way there.
    """
    meeting = plan.rendezvous
    if meeting is None:
        return plan
    here = addresses()
    right = _interface(meeting, here)
    asked = meeting.network_interface
    if asked is not None and asked not in here:
        raise ConfigError(
            f"launch.network_interface {asked}: this machine has {', '.join(sorted(here))}"
        )
    if asked is not None and right is not None and asked != right:
        raise ConfigError(
            f"launch.network_interface {asked} ({', '.join(here[asked]) or 'no address'}):"
            f" {meeting.main_process_ip} is reached over {right}; use that, or leave the key out"
        )
    return replace(plan, rendezvous=replace(meeting, network_interface=asked or right))


def _address(name: str) -> str:
    """The IPv4 address of a name or number. Raises NetworkError, and ConfigError for a name that
    means only here."""
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise NetworkError(
            f"launch.main_process_ip {name}: {error.strerror}; give the address as a number"
        ) from error
    if address != name and address.startswith("127."):
        raise ConfigError(
            f"launch.main_process_ip {name} is {address} here, which other machines take for"
            " themselves; give the address as a number"
        )
    return address


def _interface(meeting: Rendezvous, here: Mapping[str, list[str]]) -> str | None:
    """The interface with the meeting place's address (machine 0), or the one that packets to it
    leave by."""
    ip, port = _address(meeting.main_process_ip), meeting.main_process_port
    if meeting.machine_rank == 0:
        holders = [name for name, held in here.items() if ip in held]
        if not holders:
            shown = ", ".join(
                f"{name} {' '.join(held)}" for name, held in sorted(here.items()) if held
            )
            raise ConfigError(
                f"launch.main_process_ip {ip} is no address of this machine, number 0, which has"
                f" {shown}"
            )
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ip, port))
            except OSError as error:
                raise NetworkError(
                    f"{ip}:{port}: {error.strerror}; choose another launch.main_process_port"
                ) from error
        return holders[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, port))  # UDP: nothing is sent, the kernel only chooses the way
        except OSError as error:
            raise NetworkError(f"launch.main_process_ip {ip}: {error.strerror}") from error
        own = probe.getsockname()[0]
    return next((name for name, held in here.items() if own in held), None)
