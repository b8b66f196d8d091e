"""Which interface leads to the meeting place, before anything starts. The rest runs on two hosts in
tests/modes."""

from __future__ import annotations

import socket

import pytest

from launch.base.errors import ConfigError, NetworkError
from launch.plan import planner
from launch.probe import network
from tests.builders import recipe_of


def located(ip: str, machine_rank: int = 0, **launch: object):
    recipe = recipe_of(
        launch={"nodes": 2, "main_process_ip": ip, "machine_rank": machine_rank, **launch}
    )
    return network.located(planner.rendezvous(recipe.launch))


def test_a_single_machine_is_left_alone():
    assert network.located(planner.rendezvous(recipe_of().launch)) is None


@pytest.mark.parametrize("machine_rank", [0, 1])
@pytest.mark.parametrize("ip", ["127.0.0.1", "::1", "[::1]"])
def test_the_interface_is_the_one_that_leads_there(machine_rank, ip):
    with socket.socket() as free:  # the usual port may be in use on this machine
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = located(ip, machine_rank, main_process_port=port)
    assert (meeting.network_interface, meeting.main_process_ip) == ("lo", ip)


def test_an_address_of_one_cable_is_refused():
    with pytest.raises(ConfigError, match=r"fe80::1.* is valid on one cable only"):
        located("fe80::1")


def test_a_port_behind_the_address_is_named():
    for address in ("10.0.0.1:29500", "[::1]:29500"):
        with pytest.raises(NetworkError, match=r"without a port \(launch.main_process_port\)"):
            located(address)


def test_a_name_that_means_this_machine_everywhere_is_refused():
    with pytest.raises(ConfigError, match=r"localhost is 127\.0\.0\.1 here"):
        located("localhost")


@pytest.mark.shows("F31", "a host name that does not resolve", code=11)
def test_a_name_that_nobody_knows_is_a_network_error():
    with pytest.raises(NetworkError, match=r"no such name: .*give the address as a number"):
        located("no such name")


@pytest.mark.shows("F26", "a socket that holds the port", code=11)
def test_a_busy_port_is_a_network_error():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(NetworkError, match="main_process_port"):
            located("127.0.0.1", main_process_port=port)
