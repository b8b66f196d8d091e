"""Variables of the user's environment that are passed to child processes: those that are needed
there, and no secrets."""

import re
import socket
from collections.abc import Mapping, Sequence

from launch.base.errors import ConfigError, NetworkError
from launch.base.text import SECRET_NAME, SECRET_VALUE
from launch.base.variables import NAMES, OF_LIBRARIES, OF_MPI, PREFIXES, WITHHELD

_CONNECTION_S = 60.0  # limit for a connection on a busy machine
_WITHHELD = frozenset(" ".join(WITHHELD).split())


def passed(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The variables that a child process gets. `more` (launch.pass_env) are further names that the
    user wants to pass.

    Variables of proxies are not among them, because ranks use no network service and a proxy's
    address may contain a password."""
    return {
        name: value
        for name, value in environ.items()
        if name in more or (_is_needed(name) and not SECRET_VALUE.search(value))
    }


def _is_needed(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not SECRET_NAME.search(name))


def asks_for_gloo(environ: Mapping[str, str]) -> bool:
    """True if the guides' own variable asks for Gloo; Accelerate has none."""
    return environ.get("ACCELERATE_USE_GLOO", "").lower() in ("1", "true", "yes")


def check(environ: Mapping[str, str], backend: str | None) -> None:
    """Raise ConfigError for a value that ranks, which talk over `backend`, cannot use here."""
    threads = environ.get("OMP_NUM_THREADS", "1")
    if not re.fullmatch("[1-9][0-9]*", threads):
        raise ConfigError(
            f"OMP_NUM_THREADS={threads}: expected a number of threads, such as 4; unset it, and"
            " each rank has its share of the cores"
        )
    variables = {"gloo": ("GLOO",), "nccl": ("GLOO", "NCCL")}.get(backend or "", ())
    there = [name for _, name in socket.if_nameindex()]
    for variable in (f"{library}_SOCKET_IFNAME" for library in variables):
        # NCCL's names are beginnings, "=name" is a whole one and "^name" leaves one out
        requested = environ.get(variable, "").removeprefix("=")
        wanted = (
            [] if requested.startswith("^") else [name for name in requested.split(",") if name]
        )
        if wanted and not any(name.startswith(tuple(wanted)) for name in there):
            raise ConfigError(
                f"{variable}={requested}: this machine has no such interface, it has"
                f" {', '.join(there)}; unset it, or name one of them"
            )


def check_loopback(num_machines: int = 1) -> None:
    """Raise NetworkError without an address of localhost, which accelerate asks for, or without the
    address at which the ranks of one machine meet."""
    try:
        socket.getaddrinfo("localhost", None)
    except OSError as error:
        raise NetworkError(
            f"localhost has no address ({error.strerror}), and what starts ranks needs it: add the"
            " line `127.0.0.1 localhost` to /etc/hosts, or train on one process without DeepSpeed"
            " (--launch.num_processes=1)"
        ) from error
    if num_machines > 1:
        return
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_CONNECTION_S).close()
    except OSError as error:
        raise NetworkError(
            f"127.0.0.1, at which the ranks of this machine meet, cannot be used ({error});"
            " `ip link set lo up`, or train on one process without DeepSpeed"
            " (--launch.num_processes=1)"
        ) from error


def of_another_launcher(environ: Mapping[str, str]) -> list[str]:
    """Names of variables by which MPI tells its own ranks what they are."""
    return sorted(name for name in environ if name.startswith(OF_MPI))


def of_trackers(
    environ: Mapping[str, str], trackers: Sequence[str], more: Sequence[str] = ()
) -> list[str]:
    """Names of variables of a run's trackers that are not passed: they may be keys."""
    prefixes = tuple(f"{tracker.upper()}_" for tracker in trackers)
    return sorted(name for name in environ if name.startswith(prefixes) and name not in more)


def unknown(environ: Mapping[str, str], more: Sequence[str] = ()) -> list[str]:
    """Names of variables that begin like those of a library of the ranks, but that it is not known
    to read, so that they are not passed."""
    return sorted(
        name
        for name in environ
        if name.startswith(OF_LIBRARIES)
        and not SECRET_NAME.search(name)
        and name not in {*NAMES, *_WITHHELD, *more}
    )
