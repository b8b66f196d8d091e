"""`python -m launch submit`: what is refused, and what is written."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.base import files
from launch.base.workspace import Workspace
from launch.commands.submit import crontab, job
from launch.hub import names
from launch.schema.result import DOWNLOADED, Downloaded
from tests import builders


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch) -> Path:
    for name, value in builders.environment(tmp_path / "workspace").items():
        if name.startswith("LOWMEM_"):
            monkeypatch.setenv(name, value)
    return tmp_path / "workspace"


@pytest.fixture
def sbatch(tmp_path, monkeypatch) -> None:
    """A program in place of Slurm's, which takes every job."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "sbatch"
    program.write_text("#!/bin/sh\necho 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def submit(capsys, *argv: str) -> tuple[int, str]:
    code = main(["submit", *argv])
    done = capsys.readouterr()
    return code, done.out + done.err


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["local"], "submit: expected a recipe"),
        (["local", "16", "sft_fast"], "found 16 before the recipe; write sft_fast 16"),
        (["local", "sft_fst"], "did you mean sft_fast?"),
        (["local", "sft_fast", "--resume"], "argument --resume: expected one argument"),
        (["local", "sft_fast", "--dry-run"], "submit: --dry-run is for launch run; leave it out"),
        (["local", "sft_fast", "--resume", "never"], "each start of the job would begin anew"),
        (
            ["local", "sft_fast", "--print"],
            "--print is for slurm, skypilot and dstack; leave it out to start the job; python -m"
            " launch run RECIPE --dry-run",
        ),
        (
            ["cron", "--print", "0 2 * * *", "sft_fast"],
            "--print is for slurm, skypilot and dstack; leave it out to add a line to your crontab,"
            " which submit cron remove JOB takes away again; python -m launch run RECIPE --dry-run",
        ),
        (["local", "sft_fast", "--gpu=H100"], "is for slurm, skypilot and dstack; leave it out\n"),
        (["slurm", "sft_fast", "--reboot"], "--reboot is for local; leave it out"),
        (["skypilot", "sft_fast"], "add --print, and give the file to sky jobs launch"),
        (["dstack", "sft_fast"], "add --print, and give the file to dstack apply -f"),
        (["slurm", "sft_fast", "--sweep=training.seed"], "--sweep training.seed: expected a key"),
        (["slurm", "sft_fast", "--sweep=training.seed=1,1"], "expected a key and several values"),
        (["cron"], 'such as submit cron "0 2 * * *" sft'),
        (["cron", "0", "2", "*", "*", "*", "sft"], "'0': expected five fields in quotes, minute"),
        (["cron", "2 in the night", "sft_fast"], "expected five fields in quotes, minute hour day"),
        (["cron", "0 2 * * *\n* * * * * rm", "sft_fast"], "expected five fields"),
        (["cron", "remove", "x"], "submit cron remove: found x; cron starts no job of /"),
        (["cron", "remove"], "found no name of a job; cron starts no job of /"),
        (["slrum", "sft_fast"], "expected one of local, cron, slurm, skypilot, dstack; did you"),
        (["start", "/tmp"], "/tmp: holds no job; expected submitted/<recipe>-<time>"),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_what_to_write(capsys, argv, error):
    code, text = submit(capsys, *argv)
    assert (code, error in text, text.count("\n")) == (2, True, 1), text


def test_a_job_whose_data_changed_is_refused_and_its_status_says_so(
    capsys, tmp_path, workspace, sbatch
):
    path = builders.recipe(tmp_path, launch={"num_processes": 1})
    code, said = submit(capsys, "slurm", str(path))
    assert code == 0 and "Slurm job 7: " in said, said
    (job,) = workspace.glob("submitted/tiny-*")
    builders.write_parquet(tmp_path / "valid.parquet", builders.rows(11, seed=2))
    started = subprocess.run([job / "job.sh"], env={}, capture_output=True, text=True)
    assert started.returncode == 4, started.stdout + started.stderr
    assert f"job {job.name}: data.validation_file changed since it was submitted" in started.stderr
    assert '"exit_code": 4' in (job / "status.json").read_text()
    assert not list((workspace / "runs").glob("*/2*"))


def test_a_job_stays_with_the_commit_of_a_name_on_a_hub(capsys, tmp_path, workspace, sbatch):
    path = builders.recipe(tmp_path, launch={"num_processes": 1})
    name = names.parse("hf:tiny/rows", is_data=True)
    target = name.folder(workspace) / ("a" * 40) / "rows-default-train"
    target.mkdir(parents=True)
    (tmp_path / "train.parquet").rename(target / "train.parquet")
    files.write_json(target / DOWNLOADED, Downloaded(str(name), "a" * 40, "mit"))
    names.remember(name, workspace, target, name)
    code, said = submit(capsys, "slurm", str(path), "--data.train_file=hf:tiny/rows")
    assert code == 0, said
    (stored,) = workspace.glob("submitted/tiny-*/job.json")
    argv = json.loads(stored.read_text())["argv"]
    assert argv[-2] == f"--data.train_file={target}"


def test_a_job_that_slurm_refuses_leaves_nothing(capsys, tmp_path, workspace):
    code, said = submit(capsys, "slurm", str(builders.recipe(tmp_path)))
    assert code == 3 and "sbatch" in said, said  # there is no cluster here
    assert not list(workspace.glob("submitted/*/job.json"))


def test_a_secret_stays_out_of_a_job_unless_the_recipe_names_it(
    capsys, tmp_path, monkeypatch, sbatch
):
    monkeypatch.setenv("WANDB_API_KEY", "a-key-of-somebody")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_$(touch found)", "1")  # no variable of a script
    for passed in ((), ("WANDB_API_KEY",)):
        launch = {"num_processes": 1, "pass_env": list(passed)}
        submit(capsys, "slurm", str(builders.recipe(tmp_path, launch=launch)))
        newest = max((tmp_path / "workspace").glob("submitted/tiny-*"), key=os.path.getmtime)
        script = newest / "job.sh"
        assert ("a-key-of-somebody" in script.read_text()) is bool(passed)
        assert "export OMP_NUM_THREADS=1" in script.read_text()
        assert "touch" not in script.read_text()
        assert script.stat().st_mode & 0o777 == 0o700


def test_a_script_of_slurm_takes_the_users_options_in_place_of_the_plans(capsys, tmp_path):
    path = builders.recipe(tmp_path, launch={"num_processes": 1})
    words = ("--print", str(path), "--gpu", "RTX 3090", "--gpus", "2", "--ram", "64")
    code, script = submit(capsys, "slurm", *words)
    assert code == 0 and "#SBATCH --gpus-per-node=1\n" in script
    assert script.count("#SBATCH --time=") == script.count("#SBATCH --mem=") == 1
    options = '--sbatch=--time=2-0 --mem=5G --comment="two words"'
    _, other = submit(capsys, "slurm", *words, options)
    assert "#SBATCH --time=2-0\n" in other and "#SBATCH --mem=5G\n" in other
    assert '#SBATCH "--comment=two words"\n' in other
    assert other.count("#SBATCH --time=") == other.count("#SBATCH --mem=") == 1
    assert subprocess.run(["bash", "-n"], input=other, text=True).returncode == 0


def test_times_of_cron_are_five_fields_or_a_word():
    assert crontab.check("0  2 *\t* 1-5") == "0 2 * * 1-5"
    assert crontab.check("@daily") == "@daily"


# ---- what is not ours
# ---------------------------------------------------------------------------


@pytest.fixture
def crontab_file(tmp_path, monkeypatch) -> Path:
    """A program in place of cron's, which keeps the lines in this file, and knows no day fry."""
    file, program = tmp_path / "tab", tmp_path / "bin" / "crontab"
    program.parent.mkdir()
    refuse = f"if grep fry {file}.new; then echo bad day-of-week >&2; exit 1; fi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in -l) cat {file};; -r) rm {file};;'
        f" -) cat >{file}.new; {refuse}; mv {file}.new {file};; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return file


@pytest.mark.parametrize("times", ["0 2 * * *", "@reboot"])
def test_the_lines_of_others_in_a_crontab_stay_byte_for_byte(tmp_path, crontab_file, times):
    before = (
        b'0 1 * * * grep "x\x0cy" f\n0 2 * * * echo "a\xe2\x80\xa8b\x85"\n'
        b"0 3 * * * echo crlf\r\n\n# t\xe2che\x1c\n"
    )
    crontab_file.write_bytes(before)
    script, output = tmp_path / "gr\xf6\xdfe" / "job.sh", tmp_path / "output.txt"
    assert crontab.add(tmp_path, "a", times, script, output)
    assert not crontab.add(tmp_path, "a", times, script, output)
    written = crontab_file.read_bytes()
    assert written.startswith(before) and written[len(before) :].count(b"\n") == 1
    assert crontab.is_there(tmp_path, "a") and not crontab.is_there(tmp_path, "t")
    crontab.remove(tmp_path, "a")
    assert crontab_file.read_bytes() == before


def test_of_times_that_crontab_refuses_nothing_is_written(
    capsys, tmp_path, workspace, crontab_file
):
    path = builders.recipe(tmp_path, launch={"num_processes": 1})
    crontab_file.write_text("0 1 * * * another's line\n")
    code, said = submit(capsys, "cron", "0 2 * * fry", str(path))
    assert (code, said) == (
        2,
        "error: crontab refuses the times '0 2 * * fry': bad day-of-week; man 5 crontab has the"
        " rules\n",
    )
    assert list(workspace.glob("submitted/*")) == []
    assert submit(capsys, "cron", "5 3 * * *", str(path))[0] == 0

    def written() -> dict[Path, bytes]:
        names = [*workspace.glob("submitted/tiny-cron/job.*"), crontab_file]
        return {file: file.read_bytes() for file in names}

    before = written()
    assert len(before) == 3
    assert submit(capsys, "cron", "0 2 * * fry", str(path))[0] == 2
    assert written() == before
    assert "tiny-cron: 5 3 * * *\n" in submit(capsys, "cron", "list")[1]


def test_without_crontab_no_job_is_left(capsys, tmp_path, workspace, monkeypatch):
    path = builders.recipe(tmp_path, launch={"num_processes": 1})
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = submit(capsys, "cron", "@daily", str(path))
    assert code == 3 and "no crontab program; install it" in said
    assert list(workspace.glob("submitted/*")) == []


def test_only_copies_of_the_code_that_no_job_names_are_removed(workspace):
    code = workspace / "submitted" / "code"
    old = [code / name for name in ("0" * 16, "1" * 16, f"{'2' * 16}.77.tmp")]
    theirs = [code / "mine", code / "notes.txt", code / ("3" * 16)]
    for folder in (*old, theirs[0], workspace / "submitted" / "job"):
        folder.mkdir(parents=True)
    theirs[1].write_text("mine")
    theirs[2].symlink_to(theirs[0])
    job_file = workspace / "submitted" / "job" / "job.json"
    job_file.write_text('{"name": "job", "argv')  # may name any of them
    for path in (*old, *theirs):
        os.utime(path, (0, 0), follow_symlinks=False)
    job.forget_old(Workspace(workspace))
    assert all(map(os.path.lexists, (*old, *theirs)))
    named = job.SubmittedJob("job", (), workspace, 0.0, code="1" * 16)
    files.write_json(job_file, named)
    job.forget_old(Workspace(workspace))
    assert [path.exists() for path in old] == [False, True, False]
    assert all(map(os.path.lexists, theirs))


def test_a_job_behind_a_link_stays(tmp_path, workspace):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (workspace / "submitted").mkdir(parents=True)
    (workspace / "submitted" / "job").symlink_to(elsewhere)
    job.remove(job.JobDir(workspace / "submitted" / "job"))
    assert elsewhere.is_dir()


def test_a_folder_with_a_line_break_makes_no_line_of_a_script(capsys, tmp_path, monkeypatch):
    path = builders.recipe(tmp_path, launch={"num_processes": 1})
    folder = tmp_path / "a\ntouch found"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = ("--print", str(path), "--gpu", "RTX 3090", "--gpus", "1", "--ram", "64")
    code, said = submit(capsys, "slurm", *words)
    assert code == 2 and "holds a line break" in said and "#!" not in said
    monkeypatch.chdir(tmp_path)
    code, said = submit(capsys, "slurm", *words, '--sbatch=--comment="a\ntouch"')
    assert code == 2 and "holds a line break" in said and "#!" not in said


def test_names_that_are_no_utf_8_are_refused_before_a_job_is_made(
    capsys, tmp_path, workspace, monkeypatch, crontab_file
):
    path = builders.recipe(tmp_path, launch={"num_processes": 1})
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/gr\xfc\xdfe"))
    folder.mkdir()
    for start in (("cron", "@daily"), ("local",), ("slurm",)):
        monkeypatch.chdir(folder)
        code, said = submit(capsys, *start, str(path))
        assert code == 2 and "the folder of the start is" in said and said.count("\n") == 1, said
        monkeypatch.chdir(tmp_path)
        with monkeypatch.context() as changed:
            changed.setenv("PATH", os.fsdecode(b"/b\xfcn:") + os.environ["PATH"])
            code, said = submit(capsys, *start, str(path))
        assert code == 2 and "PATH is " in said and said.count("\n") == 1, said
    assert not list(workspace.glob("submitted/*"))
    assert not crontab_file.exists()
