"""Checks of the network before several machines meet: the address of the meeting place, and the
interface that leads to it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace

import psutil

from launch.base.errors import ConfigError, NetworkError
from launch.schema.plan import Plan, Rendezvous


def addresses() -> dict[str, list[str]]:
    """This machine's interfaces and their IPv4 addresses."""
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }


def located(plan: Plan) -> Plan:
    """The plan with the interface that leads to the meeting place, unless the recipe names it.

    Raises ConfigError for an interface or address that is wrong on this machine, and NetworkError
    if there is no route.
    """
    meeting = plan.rendezvous
    if meeting is None:
        return plan
    here = addresses()
    right = _interface(meeting, here)
    named = meeting.network_interface
    if named is not None and named not in here:
        raise ConfigError(
            f"launch.network_interface {named}: this machine has {', '.join(sorted(here))}"
        )
    if named is not None and right not in (None, named):
        raise ConfigError(
            f"launch.network_interface {named} ({', '.join(here[named]) or 'no address'}):"
            f" {meeting.main_process_ip} is reached over {right}; use that, or leave the key out"
        )
    return replace(plan, rendezvous=replace(meeting, network_interface=named or right))


def _address(name: str) -> str:
    """The IPv4 address of a name or number. Raises NetworkError, and ConfigError for a name that is
    valid on this machine only."""
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
    """The interface that has the meeting place's address (machine 0), or the interface by which
    packets to it leave."""
    ip, port = _address(meeting.main_process_ip), meeting.main_process_port
    if meeting.machine_rank == 0:
        holders = [name for name, own in here.items() if ip in own]
        if not holders:
            shown = ", ".join(
                f"{name} {' '.join(own)}" for name, own in sorted(here.items()) if own
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
            probe.connect((ip, port))  # UDP: nothing is sent, the kernel only chooses the route
        except OSError as error:
            raise NetworkError(f"launch.main_process_ip {ip}: {error.strerror}") from error
        source = probe.getsockname()[0]
    return next((name for name, own in here.items() if source in own), None)
