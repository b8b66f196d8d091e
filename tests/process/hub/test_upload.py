"""`python -m launch export --push` with a hub on the loopback: what leaves this machine, what is
refused, and what faults leave there."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.base import files
from launch.predict.models import weight_files
from launch.schema.result import DOWNLOADED, EXPORTED, Downloaded, ExportedFrom
from tests import builders
from tests.process.hub import server
from tests.process.hub.server import COMMIT, Hub, Repository
from tests.process.hub.test_download import TOKEN, is_one_line, launch

pytestmark = pytest.mark.process

WEIGHTS = random.Random(0).randbytes(900_000)
PUSHED = {
    *("README.md", "lowmem.json", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with server.hub() as served:
        yield served


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A trained model of whole weights, with files of the user's beside it."""
    base = tmp_path / "hub" / "Llama"
    folder = tmp_path / "a user" / "model"
    for each in (base, folder):
        each.mkdir(parents=True)
    files.write_json(base / DOWNLOADED, Downloaded("Tiny/Llama", COMMIT, "mit"))
    contents = {
        "README.md": f"---\nlicense: mit\n---\n- model: {base}, 8 parameters\n- a: {folder}/x\n"
        "- b: /mnt/disk/alice/b, https://host/a/b, and/or\n",
        "lowmem.json": json.dumps({"run": "merge of /mnt/alice/its", "base": str(base)}),
        "config.json": '{"_name_or_path": "/home/alice/models/base/"}',
        "generation_config.json": "{}",
        "tokenizer.json": '{"added": "/root/of/a/token"}',
        "tokenizer_config.json": json.dumps({"name_or_path": str(base)}),
        "chat_template.jinja": "{{ messages }}",
        "rows.jsonl": '{"prompt": "a secret row"}',
        "training.log": "a log",
        "notes.json": "{}",
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def push(
    workspace: Path, hub: Hub, source: Path, *flags: str, name: str = "me/it", **extra: str
) -> subprocess.CompletedProcess[str]:
    words = ("export", str(source), "--to", "folder", "--push", name, *flags)
    return launch(workspace, hub, *words, **extra)


def pushed(hub: Hub, name: str = "me/it") -> dict[str, bytes]:
    return hub.repositories[f"models/{name}"].files


# ---- what leaves this machine
# ---------------------------------------------------------------------------


def test_the_files_of_a_model_are_pushed_without_paths_of_this_machine(tmp_path, hub, model):
    done = push(tmp_path, hub, model)
    assert done.returncode == 0, done.stderr
    contents = pushed(hub)
    assert contents.keys() == PUSHED
    assert contents["model.safetensors"] == WEIGHTS
    assert hub.repositories["models/me/it"].is_private
    assert hub.commits == ["me/it"]
    leaked = [name for name, content in contents.items() if str(tmp_path).encode() in content]
    assert leaked == []
    assert (
        b"- model: Tiny/Llama, 8 parameters\n- a: model/x\n- b: b, https://host/a/b, and/or\n"
        in contents["README.md"]
    )
    assert json.loads(contents["lowmem.json"]) == {"run": "merge of its", "base": "Tiny/Llama"}
    assert json.loads(contents["config.json"]) == {"_name_or_path": "base"}
    assert json.loads(contents["tokenizer_config.json"]) == {"name_or_path": "Tiny/Llama"}
    assert contents["tokenizer.json"] == (model / "tokenizer.json").read_bytes()
    assert f"pushed: {hub.address}/me/it/commit/{COMMIT}" in done.stdout


def test_an_adapter_names_its_base_by_its_name_on_the_hub_or_its_folder(tmp_path, hub, model):
    base = tmp_path / "hub" / "Llama"
    (base / "config.json").write_text("{}")
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    named = json.dumps({"base_model_name_or_path": str(base)})
    (model / "adapter_config.json").write_text(named)
    assert push(tmp_path, hub, model).returncode == 0
    contents = pushed(hub)
    named = json.loads(contents["adapter_config.json"])["base_model_name_or_path"]
    assert named == "Tiny/Llama" and "adapter_model.safetensors" in contents
    (base / DOWNLOADED).unlink()
    assert push(tmp_path, hub, model).returncode == 0
    assert json.loads(pushed(hub)["adapter_config.json"])["base_model_name_or_path"] == "Llama"


def test_a_dry_run_shows_the_same_list_without_a_request_or_a_token(tmp_path, hub, model):
    dry = push(tmp_path, hub, model, "--dry-run", HF_TOKEN="", HF_HUB_OFFLINE="1")
    assert (dry.returncode, hub.requests) == (0, []), dry.stderr
    assert dry.stdout.endswith("nothing was sent: --dry-run\n")
    assert "model to me/it (private):\n  README.md  0.1 KiB\n" in dry.stdout
    assert "  model.safetensors  878.9 KiB\n" in dry.stdout
    done = push(tmp_path, hub, model)
    assert done.stdout.splitlines()[:-1] == dry.stdout.splitlines()[:-1]


def test_public_is_what_the_user_says(tmp_path, hub, model):
    assert "model to me/it (public):" in push(tmp_path, hub, model, "--public").stdout
    assert not hub.repositories["models/me/it"].is_private


def test_a_finished_export_of_the_same_weights_is_pushed_and_another_is_refused(
    tmp_path, hub, model
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "it-f16.gguf").write_bytes(b"GGUF" + WEIGHTS)
    (out / "README.md").write_text("# it\n")
    fingerprint = weight_files.weights_fingerprint(model)
    sizes = {"it-f16.gguf": 4 + len(WEIGHTS), "README.md": 5}
    origin = ExportedFrom(str(model), fingerprint, "gguf", "f16", sizes)
    files.write_json(out / EXPORTED, origin)
    words = ("export", str(model), "--to", "gguf", "--out", str(out), "--push", "me/it")
    done = launch(tmp_path, hub, *words)
    assert done.returncode == 0, done.stderr
    assert pushed(hub).keys() == {"README.md", "it-f16.gguf"}
    assert launch(tmp_path, hub, *words[:-2]).stdout == f"written already: {out}\n"
    refused = is_one_line(launch(tmp_path, hub, *words, "--type", "q8_0"), 2)
    assert f"{out}: holds an export of other weights than {model} has now, or of" in refused
    (out / "it-f16.gguf").write_bytes(b"GGUF")
    damaged = is_one_line(launch(tmp_path, hub, *words), 3)
    assert "it-f16.gguf: is not as it was exported: found 4 bytes, expected 900,004" in damaged
    (model / "model.safetensors").write_bytes(WEIGHTS[::-1])
    assert "holds an export of other weights" in is_one_line(launch(tmp_path, hub, *words), 2)


def test_the_token_goes_to_the_hub_alone_and_stands_nowhere(tmp_path, hub, model):
    hub.storage = f"http://localhost:{hub.port}"
    done = push(tmp_path, hub, model)
    assert done.returncode == 0, done.stderr
    elsewhere = [each for each in hub.requests if each.host.startswith("localhost")]
    assert elsewhere and {each.token for each in elsewhere} == {None}
    of_hub = {each.token for each in hub.requests if each not in elsewhere}
    assert of_hub == {f"Bearer {TOKEN}"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in done.stdout + done.stderr
    assert not [name for name, content in pushed(hub).items() if TOKEN.encode() in content]


# ---- refusals
# ---------------------------------------------------------------------------


# One refusal of each request: what the hub has then is the same for all, and the next push goes on.
AGAIN = {("api", 401), ("create", 503), ("preupload", 404), ("validate-yaml", 400)}
AGAIN |= {("batch", 413), ("stored", 507), ("commit", 500)}


@pytest.mark.parametrize(
    ("fault", "status", "exit_code", "said"),
    [
        ("api", 401, 3, r"\(401: .*make a token that may write at http://\S+/sett"),
        ("create", 401, 3, r"\(401: .*type `hf auth login`, or set HF_TOKEN"),
        ("create", 403, 3, r"\(403: .*the token may not write there"),
        ("create", 409, 2, r"\(409: .*it exists and is not yours"),
        ("preupload", 403, 3, r"\(403: .*the name of a repository of your own"),
        ("validate-yaml", 400, 2, r"\(400: .*a reason\); mend what it names"),
        ("preupload", 404, 2, r"\(404: .*there is no such repository for this token"),
        ("create", 503, 11, r"\(503: .*the same line again goes on"),
        ("batch", 413, 3, r"\(413: .*no file of this size"),
        ("stored", 413, 3, r"\(413: .*push a smaller type"),
        ("stored", 507, 3, r"\(507: .*it has no room left"),
        ("stored", 403, 3, r"\(403: "),
        ("commit", 402, 3, r"\(402: .*the account takes no more"),
        ("commit", 409, 2, r"\(409: .*changes at this moment"),
        ("commit", 500, 11, r"\(500: .*the same line again goes on"),
    ],
)
def test_an_answer_that_refuses_is_one_line_and_nothing_is_published(
    tmp_path, hub, model, fault, status, exit_code, said
):
    bad_credentials = {"X-Error-Message": "Invalid credentials in Authorization header"}
    hub.statuses[fault] = [(status, bad_credentials if fault == "api" else {})]
    line = is_one_line(push(tmp_path, hub, model), exit_code)
    assert re.match(rf"error: me/it: nothing was published at http://\S+/me/it {said}", line), line
    assert hub.commits == [] and not hub.repositories.get("models/me/it", Repository({})).files
    if (fault, status) in AGAIN:
        done = push(tmp_path, hub, model)
        assert done.returncode == 0, done.stderr
        assert pushed(hub).keys() == PUSHED


def test_a_repository_of_somebody_else_is_refused(tmp_path, hub, model):
    line = is_one_line(push(tmp_path, hub, model, name="Qwen/it"), 3)
    assert f"Qwen/it: nothing was published at {hub.address}/Qwen/it (403:" in line
    hub.repositories["models/Qwen/it"] = Repository({}, is_private=True)
    assert "(403:" in is_one_line(push(tmp_path, hub, model, name="Qwen/it"), 3)
    hub.repositories["models/Qwen/it"].is_private = False
    line = is_one_line(push(tmp_path, hub, model, "--public", name="Qwen/it"), 3)
    assert "the token may not write there" in line
    assert pushed(hub, "Qwen/it") == {} and hub.commits == []


@pytest.mark.parametrize(
    ("is_private", "flags", "said"),
    [
        (False, (), "is public; add --public, or give another name"),
        (True, ("--public",), "is private; leave --public out"),
    ],
)
def test_the_visibility_of_a_repository_is_never_changed(
    tmp_path, hub, model, is_private, flags, said
):
    hub.repositories["models/me/it"] = Repository({}, is_private=is_private)
    assert said in is_one_line(push(tmp_path, hub, model, *flags), 2)
    assert [request.method for request in hub.requests] == ["GET"]
    assert hub.repositories["models/me/it"].is_private == is_private


def test_weights_of_another_model_beside_the_pushed_ones_are_refused(tmp_path, hub, model):
    older = {"model-00001-of-00002.safetensors": b"weights", "README.md": b"# older"}
    hub.repositories["models/me/it"] = Repository(dict(older), is_private=True)
    line = is_one_line(push(tmp_path, hub, model), 2)
    assert "holds model-00001-of-00002.safetensors, which would stand beside these" in line
    assert pushed(hub) == older


def test_without_a_token_the_page_that_makes_one_is_named(tmp_path, hub, model):
    line = is_one_line(push(tmp_path, hub, model, HF_TOKEN="", HF_HOME=str(tmp_path)), 3)
    assert f"found no token for {hub.address}: make a token that may write at" in line
    assert f"{hub.address}/settings/tokens, and type `hf auth login`, or set HF_TOKEN" in line
    assert hub.requests == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "folder"), "--to folder: expected --push OWNER/NAME beside it"),
        (("--to", "gguf", "--public"), "--public: expected --push OWNER/NAME beside it"),
        (("--to", "gguf", "--dry-run"), "--dry-run: expected --push OWNER/NAME beside it"),
        (("--to", "folder", "--push", "it"), "'it': is no name on a hub; expected OWNER/NAME"),
        (("--to", "folder", "--push", "me/it@v1"), "--push me/it@v1: expected OWNER/NAME alone"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path, hub, model, words, said):
    assert said in is_one_line(launch(tmp_path, hub, "export", str(model), *words), 2)
    assert hub.requests == []


def test_a_folder_without_weights_is_refused(tmp_path, hub, model):
    (model / "model.safetensors").unlink()
    assert "holds no weights, expected a finished" in is_one_line(push(tmp_path, hub, model), 3)
    assert hub.commits == []


def test_without_network_an_upload_ends_within_seconds(tmp_path, hub, model):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = push(tmp_path, hub, model, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    assert "cannot be reached (" in is_one_line(done, 11)
    line = is_one_line(push(tmp_path, hub, model, HF_HUB_OFFLINE="1"), 2)
    assert line == "error: me/it: HF_HUB_OFFLINE is set, which forbids uploads; unset it"


# ---- cuts
# ---------------------------------------------------------------------------


def test_a_file_whose_connection_is_cut_once_is_sent_again(tmp_path, hub, model):
    hub.cuts["stored"] = [300_000]
    done = push(tmp_path, hub, model)
    assert done.returncode == 0, done.stderr
    assert pushed(hub)["model.safetensors"] == WEIGHTS


def test_a_cut_at_the_commit_publishes_nothing_and_the_next_sends_no_weights(tmp_path, hub, model):
    hub.cuts["commit"] = [10]
    line = is_one_line(push(tmp_path, hub, model), 11)
    assert "(no answer: " in line and "the same line again goes on" in line
    assert pushed(hub) == {}
    hub.requests.clear()
    assert push(tmp_path, hub, model).returncode == 0
    assert pushed(hub).keys() == PUSHED and not hub.asked("/stored/")


@pytest.mark.parametrize(("number", "exit_code"), [(9, -9), (signal.SIGTERM, 75)])
def test_an_upload_that_is_ended_in_the_middle_publishes_nothing_and_the_next_goes_on(
    tmp_path, hub, model, number, exit_code
):
    hub.stalls["stored"] = 300_000
    variables = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    words = ("export", str(model), "--to", "folder", "--push", "me/it")
    child = subprocess.Popen(
        [sys.executable, "-m", "launch", *words],
        env=builders.environment(tmp_path, **variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while not hub.asked("/stored/"):
        assert time.monotonic() < until
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(60) == exit_code
    assert pushed(hub) == {} and hub.commits == []
    hub.stalls.clear()
    assert push(tmp_path, hub, model).returncode == 0
    assert pushed(hub)["model.safetensors"] == WEIGHTS
