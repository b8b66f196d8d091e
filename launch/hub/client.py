"""Requests to a hub: the files of a repository, and their bytes. The token goes to the hub's own
host alone, over https or on this machine."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from launch.base.errors import ConfigError, LaunchError, NetworkError, ResourceError
from launch.hub.names import HubName

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_HUGGING_FACE = "https://huggingface.co"
ANSWER_S = 10.0  # for a connection, and for the beginning of an answer
_CHUNK_BYTES = 1 << 18  # that a cut may cost; with the library's 10 MiB a bad line never ends
MOST_BYTES = 50 * 10**9  # of a file; larger ones come over Xet alone, which is not used
COMMIT = re.compile(r"[0-9a-f]{40}")
_PORTS = {"https": 443, "http": 80}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its size, and the hash by which its content is checked."""

    path: str
    num_bytes: int
    digest: str  # sha256 of a large file, git's id of another

    def is_in(self, path: Path) -> bool:
        """True if a file here has this content."""
        if not path.is_file() or path.stat().st_size != self.num_bytes:
            return False
        git_id = partial(hashlib.sha1, b"blob %d\0" % path.stat().st_size)
        with path.open("rb") as file:
            kind = hashlib.sha256 if len(self.digest) == 64 else git_id
            return hashlib.file_digest(file, kind).hexdigest() == self.digest


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit, and its card."""

    commit: str
    card: Mapping[str, Any]
    files: Mapping[str, RemoteFile]

    @property
    def licence(self) -> str:
        """The licence as the card names it; "" without one."""
        values = filter(None, map(self.card.get, ("license", "license_name", "license_link")))
        return ", ".join(
            str(text) for each in values for text in (each if isinstance(each, list) else [each])
        )


def endpoint() -> str:
    """The address of the hub: HF_ENDPOINT, or huggingface.co. Raises ConfigError."""
    address = os.environ.get("HF_ENDPOINT") or _HUGGING_FACE
    if not _origin(address)[1]:
        raise ConfigError(
            f"HF_ENDPOINT={address}: expected the address of a hub, such as {_HUGGING_FACE}; unset"
            " it, or mend it"
        )
    return address.rstrip("/")


def page(name: HubName) -> str:
    """The page of a repository, for people."""
    return f"{endpoint()}/{'datasets/' if name.is_data else ''}{name.repo}"


def listing(name: HubName) -> Listing:
    """The files of a repository. Raises ConfigError, ResourceError and NetworkError."""
    api = api_of_hub()
    ask = api.dataset_info if name.is_data else api.model_info
    try:
        with _refusals(name):
            info = ask(name.repo, revision=name.revision, files_metadata=True, timeout=ANSWER_S)
        card = info.card_data.to_dict() if info.card_data else {}
        files = [
            RemoteFile(
                file.rfilename,
                file.size or 0,
                (file.lfs.sha256 if file.lfs else file.blob_id) or "",
            )
            for file in info.siblings or ()
        ]
        if not COMMIT.fullmatch(info.sha or "") or not all(file.digest for file in files):
            raise ValueError("no commit, or files without hashes")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NetworkError(
            f"{name}: {endpoint()} does not answer as a hub does ({type(error).__name__}:"
            f" {error}); is HF_ENDPOINT right, or does a login page of the network answer?"
        ) from error
    return Listing(str(info.sha), card, {file.path: file for file in files})


def fetch(name: HubName, commit: str, file: RemoteFile, target: Path) -> None:
    """Append the bytes of a file that `target` lacks. Raises NetworkError and ResourceError."""
    headers, kind = _connected(), "dataset" if name.is_data else "model"
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get

    url = hf_hub_url(name.repo, file.path, repo_type=kind, revision=commit, endpoint=endpoint())
    with target.open("ab") as stream, _refusals(name, file.path):
        http_get(
            url,
            stream,
            resume_size=stream.tell(),
            headers=headers,
            expected_size=file.num_bytes,
            displayed_filename=file.path,
        )


def may_get_token(url: str) -> bool:
    """True for an address that may get the user's token."""
    scheme, host, _ = hub = _origin(endpoint())
    return _origin(url) == hub and (scheme == "https" or host in LOOPBACK)


def _origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of an address; ("", "", 0) of another text."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        return "", "", 0


def api_of_hub(answer_s: float = ANSWER_S) -> HfApi:
    """The library's client, which waits so long for an answer. Raises NetworkError."""
    _check_network()
    headers = _connected(answer_s)
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint(), token=False, headers=headers)


@cache
def _connected(answer_s: float = ANSWER_S) -> dict[str, str]:
    """The headers of our requests; the library's connections take the token out of those to
    another host."""
    # its telemetry asks the hub for a list of agents with each request
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import httpx2
    from huggingface_hub import constants, get_token, set_client_factory
    from huggingface_hub.utils import build_hf_headers

    def guard(request: httpx2.Request) -> None:
        if not may_get_token(str(request.url)):
            request.headers.pop("Authorization", None)

    def client() -> httpx2.Client:
        return httpx2.Client(
            event_hooks={"request": [guard]},
            follow_redirects=True,
            timeout=httpx2.Timeout(answer_s, connect=ANSWER_S),
        )

    set_client_factory(client)
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    token = get_token() if may_get_token(endpoint()) else None
    # a range of compressed bytes would be no range of the file's
    return build_hf_headers(token=token or False, library_name="lowmem") | {
        "Accept-Encoding": "identity"
    }


def _check_network() -> None:
    """Raise NetworkError where the hub cannot be reached, within ANSWER_S: looking up a name and
    trying each of its addresses may take minutes."""
    from multiprocessing import TimeoutError as PoolTimeout
    from multiprocessing.pool import ThreadPool
    from urllib.request import getproxies

    scheme, *address = _origin(endpoint())
    if getproxies().get(scheme):
        return
    try:
        with ThreadPool(1) as pool:
            pool.apply_async(socket.create_connection, (address, ANSWER_S)).get(ANSWER_S).close()
    except (OSError, PoolTimeout) as error:
        raise _unreachable(error) from error


def _unreachable(error: BaseException) -> NetworkError:
    reason = " ".join(str(error).split()) or f"no answer in {ANSWER_S:.0f} s"
    return NetworkError(
        f"{endpoint()} cannot be reached ({reason}); connect this machine, name a mirror with"
        " HF_ENDPOINT, or copy the folder here and name its path"
    )


@contextmanager
def _refusals(name: HubName, file: str = "") -> Iterator[None]:
    """Turn the errors of a request into the user's: one line."""
    import httpx2
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    if is_offline_mode():
        raise ConfigError(f"{name}: HF_HUB_OFFLINE is set, which forbids downloads; unset it")
    try:
        yield
    except HfHubHTTPError as error:
        raise _refusal(name, file, error.response) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        if not file:
            raise _unreachable(error) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NetworkError(
            f"{name}: {file}: the connection to {endpoint()} broke ({reason}); the same line again"
            " goes on from the bytes that are here"
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise NetworkError(  # the library's check of the size
            f"{name}: {file}: the hub sent another number of bytes than it has announced; the same"
            " line again goes on from what is here"
        ) from error


def _refusal(name: HubName, file: str, response: Any) -> LaunchError:
    """The error for an answer that is no success."""
    status, kind = response.status_code, "data set" if name.is_data else "model"
    code = response.headers.get("X-Error-Code", "")
    place = f"{name}: {file}: " if file else f"{name}: "
    if code == "RevisionNotFound":
        return ConfigError(f"{place}{page(name)} has no revision {name.revision}")
    if status == 404 or code == "RepoNotFound":
        return ConfigError(
            f"{place}there is no such {kind}, or it is private: {page(name)}; mend the name, or log"
            " in with `hf auth login`"
        )
    if status in (401, 403):
        return ResourceError(
            f"{place}the hub refuses it ({status}): accept the conditions at {page(name)}, and log"
            " in as the same user with `hf auth login`, or set HF_TOKEN; 401 is also its answer to"
            " a name that does not exist"
        )
    wait = response.headers.get("Retry-After", "")
    later = f"in {wait} s" if wait.isdecimal() else "later"
    return NetworkError(f"{place}the hub answers {status} at {page(name)}; try again {later}")
