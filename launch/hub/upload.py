"""Uploads of a model's folder to a repository of the user's on a hub. Paths of this machine stay
here, and all files appear in one commit, or none does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launch.base import files
from launch.base.errors import ConfigError, NetworkError, ResourceError
from launch.base.text import shown
from launch.base.workspace import CODE, Workspace
from launch.hub.client import api_of_hub, endpoint, may_get_token, page
from launch.hub.names import HubName
from launch.schema.result import DOWNLOADED, Downloaded

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

WEIGHTS = re.compile(r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors|.+\.gguf")
TEXTS = re.compile(
    r"README\.md|(model\.safetensors\.index|lowmem|(generation_|adapter_|tokenizer_)?config)\.json"
)
_BESIDE = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|vocab)\.json|chat_template\.jinja|Modelfile"
    r"|(tokenizer|spiece|sentencepiece\.bpe)\.model|(merges|vocab)\.txt"
)
# a path in our own texts; no address, and no "and/or"
_ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:[^\s/\"'`,;]+/)+([^\s/\"'`,;]+)")
OURS = ("README.md", "lowmem.json")
# keys in which a library may write the folder that a model came from
_CAME_FROM = re.compile(r'(name_or_path": ")/[^"]*?([^"/]+)/?"')
ANSWER_S = 60.0  # for the answer to the bytes of a file, and to a commit
_LOGIN = (
    "make a token that may write at {}/settings/tokens, and type `hf auth login`, or set HF_TOKEN"
)
ANOTHER = "give a token that may write there, or the name of a repository of your own"
REFUSALS = {  # status of an answer -> error, and what to do
    400: (ConfigError, "mend what it names"),
    401: (ResourceError, f"the token is not known there: {_LOGIN}"),
    402: (ResourceError, "the account takes no more: make room in it"),
    403: (ResourceError, f"the token may not write there, or the account is full: {ANOTHER}"),
    404: (ConfigError, f"there is no such repository for this token: {ANOTHER}"),
    409: (ConfigError, f"it exists and is not yours, or changes at this moment: {ANOTHER}"),
    413: (ResourceError, "it takes no file of this size: push a smaller type"),
    507: (ResourceError, "it has no room left: make room in the account"),
}


def leaving(folder: Path, base: str, other_names: Mapping[str, str]) -> dict[str, Path | bytes]:
    """The files of a model's folder by name, as they leave this machine: texts have the name of the
    base, `other_names` and the last parts of further paths in the place of paths. Raises
    ResourceError for a folder without weights."""
    record = files.read_or_none(Path(base) / DOWNLOADED, Downloaded)
    names = {**other_names, base: record.name if record else Path(base).name}
    contents: dict[str, Path | bytes] = {}
    for path in sorted(folder.iterdir()):
        if TEXTS.fullmatch(path.name):
            text = _without_paths(path.read_text(encoding="utf-8"), names)
            text = _ABSOLUTE.sub(r"\1", text) if path.name in OURS else text
            contents[path.name] = text.encode()
        elif WEIGHTS.fullmatch(path.name) or _BESIDE.fullmatch(path.name):
            contents[path.name] = path
    if not any(map(WEIGHTS.fullmatch, contents)):
        raise ResourceError(f"{folder}: holds no weights, expected a finished export")
    return contents


def _without_paths(text: str, names: Mapping[str, str]) -> str:
    """The text with a name in the place of each path of this machine."""
    for path in sorted(filter(None, names), key=len, reverse=True):
        for written in (path, json.dumps(path)[1:-1]):
            text = text.replace(written, names[path])
    roots = {Workspace.here().root, CODE, Path.cwd(), Path.home()} - {Path("/")}
    inside = "|".join(re.escape(str(root)) for root in sorted(roots, reverse=True))
    text = re.sub(rf"(?:{inside})(?![\w-])[^\s\"'`,;)]*", lambda path: Path(path[0]).name, text)
    return _CAME_FROM.sub(r'\1\2"', text)


def check(name: HubName, is_public: bool) -> tuple[HfApi, ModelInfo | None]:
    """The hub and what it has of the repository; None: it is made by push(). Raises errors for a
    missing token, and for a repository that is public where a private one is meant, or the other
    way round."""
    api = api_of_hub(ANSWER_S)
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import RepositoryNotFoundError

    if is_offline_mode():
        raise ConfigError(f"{name}: HF_HUB_OFFLINE is set, which forbids uploads; unset it")
    if "authorization" not in map(str.lower, api.headers or {}):
        is_sent = may_get_token(endpoint())
        fix = _LOGIN.format(endpoint()) if is_sent else "set HF_ENDPOINT to an https address"
        raise ResourceError(f"{name}: found no token for {endpoint()}: {fix}")
    with _refusals(name):
        try:
            there = api.model_info(name.repo, timeout=ANSWER_S)
        except RepositoryNotFoundError:
            return api, None
    if bool(there.private) == is_public:
        wrong = "private; leave --public out" if is_public else "public; add --public"
        raise ConfigError(f"{name}: {page(name)} is {wrong}, or give another name")
    return api, there


def push(name: HubName, is_public: bool, contents: Mapping[str, Path | bytes]) -> str:
    """Upload files, by their names there, in one commit; its address. Raises errors as check()
    does, and for weights of another model there, which a loader might take."""
    api, there = check(name, is_public)
    from huggingface_hub import CommitOperationAdd, constants
    from huggingface_hub.utils import disable_progress_bars

    constants.HF_HUB_DISABLE_XET = True
    if not sys.stderr.isatty():
        disable_progress_bars()
    older = {
        file.rfilename
        for file in (there.siblings if there else None) or ()
        if file.rfilename.endswith(".safetensors") and file.rfilename not in contents
    }
    if older and any(file.endswith(".safetensors") for file in contents):
        raise ConfigError(
            f"{name}: {page(name)} holds {min(older)}, which would stand beside these weights;"
            " remove it there, or give another name"
        )
    additions = [CommitOperationAdd(file, content) for file, content in contents.items()]
    with _refusals(name):
        if there is None:
            api.create_repo(name.repo, private=not is_public)
        done = api.create_commit(name.repo, additions, commit_message="Upload an export of lowmem")
    return shown(done.commit_url)


@contextmanager
def _refusals(name: HubName) -> Iterator[None]:
    """Turn the errors of an upload into the user's: one line."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of a file here
            raise
        cause = error.__cause__ or error  # RuntimeError: of the library's threads
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        kind, fix = REFUSALS.get(status, (NetworkError, "the same line again goes on"))
        message = getattr(cause, "server_message", None) or str(cause) or type(cause).__name__
        reason = f"{status or 'no answer'}: {shown(message.strip().splitlines()[0])}"
        raise kind(
            f"{name}: nothing was published at {page(name)} ({reason}); {fix.format(endpoint())}"
        ) from error
