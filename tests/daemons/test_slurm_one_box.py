"""scripts/slurm_one_box.sh makes a Slurm whose jobs are held to their memory, in namespaces of its
own: nothing of this machine's /etc and /run is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import builders, slurm

SCRIPT = builders.CODE / "scripts/slurm_one_box.sh"
NOT_ROOT = "" if os.geteuid() == 0 else "only root can set Slurm up"
FOLDERS = "/etc/slurm /etc/munge /run /var/lib/slurm /var/log"
TAKES = "x = bytearray(600 << 20); x[::4096] = b'1' * len(x[::4096]); print('taken')"
# the script twice, a job within its memory, one beyond it, and a run; Slurm wants another interface
# than the loopback
INSIDE = f"""
set -e
for folder in {FOLDERS}; do mkdir -p "$folder"; mount -t tmpfs none "$folder"; done
chown munge:munge /etc/munge
mkdir /var/log/munge && chown munge:munge /var/log/munge
ip link set lo up
ip link add one type veth peer other
ip address add 192.0.2.77/24 dev one
ip link set one up && ip link set other up
{SCRIPT}
{SCRIPT}
ended() {{
    while state="$(scontrol show job "$1" | grep -o "JobState=[A-Z_]*")"; do
        case "$state" in *PENDING|*RUNNING|*COMPLETING) sleep 0.5 ;; *) break ;; esac
    done
    echo "job $1: $state"
}}
cd "$1"
for mem in 1000M 200M; do
    sbatch --mem="$mem" --wrap="exec {sys.executable} -c \\"{TAKES}\\""
done
ended 1
ended 2
{sys.executable} -m launch submit slurm "$2" --launch.num_processes=1
ended 3
"""


def test_jobs_get_the_memory_that_they_asked_for_and_a_run_trains(tmp_path: Path, needs):
    needs(slurm.missing() or NOT_ROOT)
    recipe = builders.recipe(tmp_path, training={"num_train_epochs": 2})
    namespaces = ("unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "--kill-child")
    done = subprocess.run(
        [*namespaces, "bash", "-c", INSIDE, "bash", str(tmp_path), str(recipe)],
        env=builders.environment(tmp_path / "workspace"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job 1: JobState=COMPLETED" in done.stdout, done.stdout + done.stderr
    if "not enforced" not in done.stderr:
        assert "job 2: JobState=OUT_OF_MEMORY" in done.stdout, done.stdout
    assert "job 3: JobState=COMPLETED" in done.stdout, done.stdout


def test_a_slurm_of_somebody_else_is_left_alone(needs):
    needs(NOT_ROOT)
    inside = f"""
mkdir -p /etc/slurm && mount -t tmpfs none /etc/slurm && echo mine >/etc/slurm/slurm.conf
{SCRIPT}; echo "code $?"; cat /etc/slurm/slurm.conf"""
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", inside], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "code 3\nmine\n"
    assert "move it away to set Slurm up anew" in done.stderr
