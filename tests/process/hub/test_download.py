"""`python -m launch download` and `--download` with a hub on the loopback: what is fetched, what is
refused, and what is left by faults."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests import builders, namespaces
from tests.process import forked_starts
from tests.process.hub import server
from tests.process.hub.server import COMMIT, Hub, Repository

pytestmark = pytest.mark.process

TOKEN = "hf_" + "aB3" * 10
WEIGHTS = random.Random(0).randbytes(900_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "README.md": b"# A model",
}
NEVER = {
    "pytorch_model.bin": b"a pickle",
    "modeling_llama.py": b"raise SystemExit",
    "rng.pt": b"a pickle",
    "state.pkl": b"a pickle",
    "model.Q4.gguf": b"GGUF",
    "onnx/model.safetensors": b"a copy",
    "../evil.json": b"{}",
    "/etc/evil.json": b"{}",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with server.hub() as served:
        served.repositories["models/Qwen/Tiny"] = Repository(dict(FILES), {"license": "mit"})
        yield served


def launch(
    workspace: Path, hub: Hub, *words: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    variables["NO_PROXY"] = "*"
    return forked_starts.start(words, builders.environment(workspace, **variables | extra))


def download(workspace: Path, hub: Hub, name: str = "Qwen/Tiny", **extra: str):
    return launch(workspace, hub, "download", name, **extra)


def folder(workspace: Path) -> Path:
    return workspace / "data" / "hub" / "models" / "Qwen" / "Tiny" / COMMIT / "Tiny"


def is_one_line(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The line of an error, which is all that stderr has beside what the library says of tries."""
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    return line


# ---- what is fetched
# ---------------------------------------------------------------------------


def test_safetensors_tokenizer_config_and_card_are_fetched_and_nothing_else(tmp_path, hub):
    hub.repositories["models/Qwen/Tiny"].files |= NEVER
    done = download(tmp_path, hub)
    assert done.returncode == 0, done.stderr
    here = {path.name: path.read_bytes() for path in folder(tmp_path).iterdir()}
    record = json.loads(here.pop(".downloaded"))
    assert here == FILES
    assert (record["commit"], record["licence"]) == (COMMIT, "mit")
    assert len(hub.asked("/resolve/")) == len(FILES)
    assert (
        "at commit 7ae557604adf, licence: mit: 4 files, 878.9 KiB, 878.9 KiB to go" in done.stdout
    )
    assert "--model.path=Qwen/Tiny" in done.stdout.splitlines()


def test_a_gguf_file_is_fetched_by_its_name_alone(tmp_path, hub):
    hub.repositories["models/Qwen/Tiny"].files |= NEVER
    assert download(tmp_path, hub, "Qwen/Tiny/model.Q4.gguf").returncode == 0
    here = folder(tmp_path).with_name("model.Q4.gguf")
    assert sorted(path.name for path in here.iterdir()) == [
        ".downloaded",
        "README.md",
        "model.Q4.gguf",
    ]
    refused = is_one_line(download(tmp_path, hub, "Qwen/Tiny/pytorch_model.bin"), 2)
    assert "names no .gguf file" in refused
    assert not hub.asked(".bin")


def test_a_second_download_asks_once_and_fetches_what_is_new(tmp_path, hub):
    download(tmp_path, hub)
    hub.requests.clear()
    assert download(tmp_path, hub).returncode == 0
    assert [request.path for request in hub.requests] == ["/api/models/Qwen/Tiny/revision/main"]
    hub.repositories["models/Qwen/Tiny"].commit = "b" * 40
    hub.requests.clear()
    assert "b" * 40 in download(tmp_path, hub).stdout
    assert len(hub.asked("/resolve/" + "b" * 40)) == len(FILES)
    assert folder(tmp_path).is_dir()


def test_a_name_with_a_commit_is_taken_from_here_without_a_request(tmp_path, hub):
    download(tmp_path, hub)
    hub.requests.clear()
    name = f"--model.path=Qwen/Tiny@{COMMIT}"
    done = launch(tmp_path, hub, "plan", "sft", name, "--download", HF_HUB_OFFLINE="1")
    # the model is opened: its config is that of no whole Llama
    assert str(folder(tmp_path)) in is_one_line(done, 3)
    assert hub.requests == []


def test_large_files_come_from_another_host_which_never_gets_the_token(tmp_path, hub):
    hub.storage = f"http://localhost:{hub.port}"
    done = download(tmp_path, hub)
    assert done.returncode == 0, done.stderr
    elsewhere = [request for request in hub.requests if request.host.startswith("localhost")]
    assert [(request.path.rsplit("/", 1)[1], request.token) for request in elsewhere] == [
        ("model.safetensors", None)
    ]
    own = [request.token for request in hub.requests if request not in elsewhere]
    assert set(own) == {f"Bearer {TOKEN}"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in done.stdout + done.stderr


def test_a_model_that_has_moved_is_fetched_from_its_new_name(tmp_path, hub):
    hub.moved["Qwen/Old"] = "Qwen/Tiny"
    done = download(tmp_path, hub, "Qwen/Old")
    assert done.returncode == 0, done.stderr
    here = tmp_path / "data" / "hub" / "models" / "Qwen" / "Old" / COMMIT / "Old"
    assert (here / "model.safetensors").read_bytes() == WEIGHTS
    assert {request.token for request in hub.requests} == {f"Bearer {TOKEN}"}


def test_the_token_is_not_sent_over_http_to_another_machine(tmp_path):
    addresses = (each for of in psutil.net_if_addrs().values() for each in of)
    own = [each.address for each in addresses if each.family == socket.AF_INET]
    outside = [address for address in own if not address.startswith("127.")]
    if not outside:
        pytest.skip("this machine has no address but that of the loopback")
    with server.hub(outside[0]) as hub:
        hub.repositories["models/Qwen/Tiny"] = Repository(dict(FILES))
        done = download(tmp_path, hub, HF_ENDPOINT=f"http://{outside[0]}:{hub.port}")
        assert done.returncode == 0, done.stderr
        assert {request.token for request in hub.requests} == {None}


# ---- faults of the way
# ---------------------------------------------------------------------------


def test_a_connection_that_is_cut_goes_on_with_the_bytes_that_are_there(tmp_path, hub):
    hub.cuts["model.safetensors"] = [300_000, 600_000]
    assert download(tmp_path, hub).returncode == 0
    ranges = [request.range for request in hub.asked("model.safetensors")]
    assert ranges == [None, "bytes=262144-", "bytes=524288-"]
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


def start(workspace: Path, hub: Hub, **extra: str) -> subprocess.Popen[str]:
    variables = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", **extra}
    return subprocess.Popen(
        [sys.executable, "-m", "launch", "download", "Qwen/Tiny"],
        env=builders.environment(workspace, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, num_bytes: int) -> None:
    until = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size >= num_bytes):
        assert time.monotonic() < until, f"{path} has not come"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(9, -9), (signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
def test_a_start_that_is_ended_in_the_middle_leaves_nothing_whole_and_the_next_goes_on(
    tmp_path, hub, number, exit_code
):
    hub.stalls["model.safetensors"] = 300_000
    part = folder(tmp_path).with_name("Tiny.part") / "model.safetensors"
    child = start(tmp_path, hub)
    wait_for(part, 1 << 18)
    os.kill(child.pid, number)
    assert child.wait(60) == exit_code
    assert child.stdout is not None
    assert ("the same line again goes on" in child.stdout.read()) == (exit_code != -9)
    assert not folder(tmp_path).exists()
    line = launch(tmp_path, hub, "plan", "sft", "--model.path=Qwen/Tiny")
    assert "there is no folder" in is_one_line(line, 3)
    hub.stalls.clear()
    num_bytes = part.stat().st_size
    hub.requests.clear()
    done = download(tmp_path, hub)
    assert done.returncode == 0, done.stderr
    assert [request.range for request in hub.asked("model.safetensors")] == [f"bytes={num_bytes}-"]
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert not part.parent.exists()


def test_a_connection_that_breaks_ends_the_start_and_the_next_goes_on(tmp_path, hub):
    hub.cuts["model.safetensors"], hub.resets = [600_000], True
    line = is_one_line(download(tmp_path, hub), 11)
    assert "Qwen/Tiny: model.safetensors: the connection to http://127.0.0.1:" in line
    hub.resets = False
    part = folder(tmp_path).with_name("Tiny.part") / "model.safetensors"
    num_bytes = part.stat().st_size
    assert num_bytes in (1 << 18, 2 << 18)
    assert download(tmp_path, hub).returncode == 0
    assert hub.asked("model.safetensors")[-1].range == f"bytes={num_bytes}-"


def test_a_disk_that_takes_no_more_ends_the_start_and_the_next_goes_on(tmp_path, hub):
    line = f"ulimit -f 600; exec {sys.executable} -m launch download Qwen/Tiny"
    variables = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        ["bash", "-c", line],
        env=builders.environment(tmp_path, **variables),
        capture_output=True,
        text=True,
    )
    assert "File too large; make room there" in is_one_line(done, 10)
    assert not folder(tmp_path).exists()
    assert download(tmp_path, hub).returncode == 0
    assert hub.asked("model.safetensors")[-1].range is not None


def test_a_hub_that_ignores_ranges_sends_the_file_again(tmp_path, hub):
    hub.ignores_ranges = True
    hub.cuts["model.safetensors"] = [300_000]
    assert download(tmp_path, hub).returncode == 0
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_with_another_hash_is_removed_and_named_and_fetched_again(tmp_path, hub, file):
    right = hub.repositories["models/Qwen/Tiny"].files[file]
    hub.contents[file] = bytes([right[0] ^ 1]) + right[1:]
    line = is_one_line(download(tmp_path, hub), 3)
    assert f"Qwen/Tiny: {file}: what came is not what the hub lists" in line
    assert not folder(tmp_path).exists()
    assert not (folder(tmp_path).with_name("Tiny.part") / file).exists()
    hub.contents.clear()
    assert download(tmp_path, hub).returncode == 0
    assert (folder(tmp_path) / file).read_bytes() == right


def test_bytes_that_were_damaged_before_the_next_start_are_fetched_again(tmp_path, hub):
    part = folder(tmp_path).with_name("Tiny.part")
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"\0" * 1000)
    (part / "config.json").write_bytes(b"longer than the file that is listed")
    assert "model.safetensors: what came" in is_one_line(download(tmp_path, hub), 3)
    assert download(tmp_path, hub).returncode == 0
    assert {path.name: path.read_bytes() for path in folder(tmp_path).glob("[!.]*")} == FILES


@pytest.mark.parametrize("change", [-5, 5])
def test_a_file_of_another_size_than_listed_is_no_whole_one(tmp_path, hub, change):
    hub.contents["config.json"] = (FILES["config.json"] + b"     ")[
        : len(FILES["config.json"]) + change
    ]
    line = is_one_line(download(tmp_path, hub), 11)
    assert "config.json: the hub sent another number of bytes than it has announced" in line
    assert not folder(tmp_path).exists()


def test_of_two_starts_at_once_one_downloads_and_the_other_waits(tmp_path, hub):
    hub.stalls["model.safetensors"] = 300_000
    first = start(tmp_path, hub, HF_HUB_DOWNLOAD_TIMEOUT="2")
    wait_for(folder(tmp_path).with_name("Tiny.part") / "model.safetensors", 1 << 18)
    second = start(tmp_path, hub)
    assert second.stdout is not None
    assert second.stdout.readline().startswith("waiting: the download of Qwen/Tiny is in use by")
    hub.stalls.clear()  # the library asks again after 2 s without a byte
    assert (first.wait(60), second.wait(60)) == (0, 0)
    assert len(hub.asked("/api/models")) == 1
    assert len(hub.asked("config.json")) == 1
    assert folder(tmp_path).is_dir()


# ---- damage after a download
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "there"),
    [
        (lambda path: os.truncate(path, 7), "found 7 bytes, expected 900,000 bytes"),
        (lambda path: path.unlink(), "found no file, expected 900,000 bytes"),
        (lambda path: path.write_bytes(WEIGHTS[::-1]), ""),
    ],
)
def test_a_file_that_was_damaged_later_is_named_and_download_mends_it(tmp_path, hub, damage, there):
    assert download(tmp_path, hub).returncode == 0
    damage(folder(tmp_path) / "model.safetensors")
    if there:
        line = is_one_line(launch(tmp_path, hub, "plan", "sft", "--model.path=Qwen/Tiny"), 3)
        assert f"model.safetensors: is not what was downloaded: {there}; mend it with" in line
        assert line.endswith("python -m launch download Qwen/Tiny")
    hub.requests.clear()
    done = download(tmp_path, hub)
    assert "fetched again: model.safetensors" in done.stdout
    assert {path.name: path.read_bytes() for path in folder(tmp_path).glob("[!.]*")} == FILES
    assert len(hub.asked("/resolve/")) == 1


def test_a_damaged_file_of_a_name_has_the_line_that_fetches_it_in_the_place_of_a_copy(
    tmp_path, hub
):
    assert download(tmp_path, hub).returncode == 0
    file = folder(tmp_path) / "config.json"
    file.write_bytes(b"x" * file.stat().st_size)
    line = is_one_line(launch(tmp_path, hub, "plan", "sft", "--model.path=Qwen/Tiny"), 3)
    assert line.startswith(f"error: {file}: is not JSON")
    assert line.endswith("; fetch it again with python -m launch download Qwen/Tiny")


def test_names_behind_a_wrong_one_are_fetched_and_a_wrong_one_leaves_nothing(tmp_path, hub):
    done = launch(tmp_path, hub, "download", "Nobody/Nope", "hf:Qwen/Tiny", "Qwen/Tiny", "a b")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1] for line in errors] == [" Nobody/Nope", " hf", " 'a b'"]
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    below = tmp_path / "data" / "hub"
    assert sorted(path.name for path in below.glob("*/*")) == ["Qwen"]
    assert not (below / "datasets" / "Qwen").exists()


# ---- refusals of the hub
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "headers", "exit_code", "said"),
    [
        (
            "Qwen/Tiny",
            401,
            {},
            3,
            r"refuses it \(401\): accept the conditions at http://\S+/Qwen/Tiny,",
        ),
        ("Qwen/Tiny", 403, {"X-Error-Code": "GatedRepo"}, 3, r"refuses it \(403\): accept the"),
        ("hf:Qwen/Tiny", 403, {}, 3, r"accept the conditions at http://\S+/datasets/Qwen/Tiny,"),
        ("Qwen/Tiny", 401, {"X-Error-Code": "RepoNotFound"}, 2, "there is no such model, or it is"),
        (
            "Qwen/Nope",
            None,
            {},
            2,
            r"there is no such model, or it is private: http://\S+/Qwen/Nope",
        ),
        ("hf:Qwen/Tiny", None, {}, 2, "there is no such data set"),
        ("Qwen/Tiny@v2", None, {}, 2, "/Qwen/Tiny has no revision v2"),
        ("Qwen/Tiny", 429, {"Retry-After": "7"}, 11, r"answers 429 at \S+; try again in 7 s"),
        ("Qwen/Tiny", 500, {}, 11, r"answers 500 at \S+; try again later"),
    ],
)
def test_an_answer_that_refuses_is_one_line_with_its_exit_code(
    tmp_path, hub, name, status, headers, exit_code, said
):
    if status is not None:
        hub.statuses["api"] = [(status, headers)]
    line = is_one_line(download(tmp_path, hub, name), exit_code)
    assert re.match(rf"error: {name}: .*{said}", line), line
    assert not hub.asked("/resolve/")


def test_a_file_that_is_gated_names_the_page(tmp_path, hub):
    hub.statuses["model.safetensors"] = [(403, {"X-Error-Code": "GatedRepo"})]
    line = is_one_line(download(tmp_path, hub), 3)
    assert (
        f"model.safetensors: the hub refuses it (403): accept the conditions at {hub.address}"
        in line
    )


def test_a_hub_that_is_asked_too_often_is_asked_again_after_its_pause(tmp_path, hub):
    hub.statuses["model.safetensors"] = [(429, {"Retry-After": "1"})]
    done = download(tmp_path, hub)
    assert done.returncode == 0
    assert "Rate limited. Waiting 2.0s" in done.stderr
    assert len(hub.asked("model.safetensors")) == 2


@pytest.mark.parametrize("body", [b"<html>log in to this network</html>", b'{"id": "x"}'])
def test_what_does_not_answer_as_a_hub_is_named(tmp_path, hub, body):
    hub.body = body
    line = is_one_line(download(tmp_path, hub), 11)
    assert f"{hub.address} does not answer as a hub does" in line


# ---- without a hub
# ---------------------------------------------------------------------------


def test_without_network_a_start_ends_within_seconds(tmp_path, hub):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    line = is_one_line(download(tmp_path, hub, HF_ENDPOINT=f"http://127.0.0.1:{port}"), 11)
    assert "cannot be reached (" in line and "Connection refused" in line
    line = is_one_line(download(tmp_path, hub, HF_ENDPOINT="https://no.such.host.invalid"), 11)
    assert "https://no.such.host.invalid cannot be reached (" in line


# a name server that takes questions and never answers
MUTE = "import socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 53))"


def asked_of_a_mute_name_server(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    said = tmp_path / "said"
    return namespaces.bash(
        f"""set -e
        ip link set lo up
        mount --bind {tmp_path}/resolv.conf /etc/resolv.conf
        {sys.executable} -c "{MUTE}; print('bound', flush=True); time.sleep(100)" > {said} &
        until grep -q bound {said}; do sleep 0.1; done
        code=0; {sys.executable} -m launch download Qwen/Tiny || code=$?
        kill %1; exit $code""",
        "--mount",
        "--net",
        workspace=tmp_path,
        HF_HUB_OFFLINE="0",
        **dict.fromkeys(("HTTPS_PROXY", "https_proxy"), ""),
    )


def test_a_hub_and_a_name_server_that_never_answer_are_given_up_after_ten_seconds(tmp_path, hub):
    """Both at once: that is ten seconds less."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        done = pool.submit(asked_of_a_mute_name_server, tmp_path)
        port = silent.getsockname()[1]
        line = is_one_line(
            download(tmp_path / "silent", hub, HF_ENDPOINT=f"http://127.0.0.1:{port}"), 11
        )
    assert "cannot be reached (" in line
    done = done.result()
    assert "https://huggingface.co cannot be reached (no answer in 10 s)" in is_one_line(done, 11)


def test_downloads_that_the_environment_forbids_are_refused(tmp_path, hub):
    line = is_one_line(download(tmp_path, hub, HF_HUB_OFFLINE="1"), 2)
    assert line == "error: Qwen/Tiny: HF_HUB_OFFLINE is set, which forbids downloads; unset it"
    assert hub.requests == []


# ---- what is not taken
# ---------------------------------------------------------------------------


def test_a_model_without_safetensors_is_refused_before_anything_is_fetched(tmp_path, hub):
    hub.repositories["models/Qwen/Tiny"].files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    line = is_one_line(download(tmp_path, hub), 3)
    assert "found config.json, pytorch_model.bin, expected safetensors, the only weights" in line
    assert not hub.asked("/resolve/")


def test_names_that_differ_in_case_alone_are_refused(tmp_path, hub):
    hub.repositories["models/Qwen/Tiny"].files["Config.json"] = b"{}"
    assert "'Config.json': collides with 'config.json'" in is_one_line(download(tmp_path, hub), 3)


def test_more_than_the_disk_holds_with_a_tenth_to_spare_is_refused_before_it_starts(tmp_path, hub):
    names = [f"model-{number:05}-of-03000.safetensors" for number in range(3000)]
    sizes = dict.fromkeys(names, 40 << 30)
    repository = Repository(dict.fromkeys(names, b"x"), num_bytes=sizes)
    hub.repositories["models/Qwen/Tiny"] = repository
    line = is_one_line(download(tmp_path, hub), 3)
    assert "120,000.00 GiB to download need 132,000.00 GiB (a tenth to spare), and /" in line
    assert not hub.asked("/resolve/")


def test_a_file_that_only_xet_sends_is_named(tmp_path, hub):
    hub.repositories["models/Qwen/Tiny"].num_bytes["model.safetensors"] = 51 * 10**9
    line = is_one_line(download(tmp_path, hub), 3)
    assert "model.safetensors: has 47.50 GiB, and the hub sends such a file over Xet" in line


def test_a_text_that_is_no_name_is_refused(tmp_path, hub):
    line = is_one_line(download(tmp_path, hub, "a/../b"), 2)
    assert line.startswith("error: 'a/../b': is no name on a hub; expected OWNER/NAME or")
    assert hub.requests == []


# ---- data
# ---------------------------------------------------------------------------

ROWS = b'{"prompt": "a", "response": "b"}\n'


@pytest.fixture
def data(hub) -> Repository:
    files = {
        f"{part}/{split}.jsonl": ROWS
        for part in ("main", "socratic")
        for split in ("train", "test")
    }
    card = {"license": ["mit", "cc0-1.0"]}
    hub.repositories["datasets/openai/gsm8k"] = repository = Repository(files, card)
    return repository


def test_of_several_configurations_one_is_named(tmp_path, hub, data):
    line = is_one_line(download(tmp_path, hub, "hf:openai/gsm8k"), 4)
    assert (
        "found main:train, main:test, socratic:train, socratic:test, expected one of them" in line
    )
    assert "by its name: hf:openai/gsm8k/main:train;" in line
    done = download(tmp_path, hub, "hf:openai/gsm8k/main:test")
    assert done.returncode == 0, done.stderr
    assert "licence: mit, cc0-1.0" in done.stdout
    assert [request.path.rsplit("/resolve/")[1] for request in hub.asked("/resolve/")] == [
        f"{COMMIT}/main/test.jsonl"
    ]
    here = tmp_path / "data/hub/datasets/openai/gsm8k" / COMMIT / "gsm8k-main-test"
    assert (here / "main--test.jsonl").read_bytes() == ROWS


def test_a_name_on_the_hub_without_its_prefix_is_no_file(tmp_path, hub):
    words = ("plan", "sft", "--data.train_file=openai/gsm8k/main")
    line = is_one_line(launch(tmp_path, hub, *words), 4)
    assert "no such file or folder: openai/gsm8k/main; of a data set on a hub, type" in line
    assert line.endswith("--data.train_file=hf:openai/gsm8k/main --download")
    assert hub.requests == []


def test_data_is_shown_by_its_name_and_only_downloaded_where_it_is_allowed(tmp_path, hub, data):
    source = "[{path: hf:openai/gsm8k/main, weight: 2}, hf:openai/gsm8k/socratic]"
    recipe = builders.recipe(tmp_path)
    words = ("show", str(recipe), f"--data.train_file={source}", "--data.validation_file=null")
    line = is_one_line(launch(tmp_path, hub, *words), 4)
    assert "type python -m launch download hf:openai/gsm8k/main" in line
    assert hub.requests == []
    done = launch(tmp_path, hub, *words, "--download")
    assert done.returncode == 0, done.stderr
    assert "/main--train.jsonl:1 (2 times an epoch): " in done.stdout
    assert "/socratic--train.jsonl:1: " in done.stdout
    hub.requests.clear()
    again = launch(tmp_path, hub, *words, HF_HUB_OFFLINE="1")
    assert (again.returncode, hub.requests) == (0, [])
