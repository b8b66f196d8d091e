#!/usr/bin/env bash
# Makes a Slurm of one node of this machine, as root: packages (Debian, Ubuntu), a munge key, all CPUs, the memory less
# 1 GiB, every NVIDIA card as gres gpu; jobs are held to the memory and the cards that they asked for.
#
#   sudo scripts/slurm_one_box.sh            # writes /etc/slurm/*.conf, starts the daemons; again: the same
#   sudo scripts/slurm_one_box.sh --print    # shows what it would write
#   python3 -m launch submit slurm sft_fast  # as any user
#
# It leaves a Slurm that something else has set up alone. To undo it: systemctl disable --now slurmctld slurmd munge.
set -euo pipefail
readonly MARK='# written by scripts/slurm_one_box.sh'
readonly CONFIG=/etc/slurm/slurm.conf
export PATH="$PATH:/usr/sbin:/sbin"

die() { echo "slurm_one_box.sh: $*" >&2; exit 3; }

# prints each card's device, such as /dev/nvidia0
cards() { find /dev -maxdepth 1 -name 'nvidia[0-9]*' | sort -V; }

slurm_conf() {
    local name cpus memory count
    name="$(hostname -s)"
    cpus="$(nproc --all)"
    memory="$(awk '/^MemTotal:/ { print int($2 / 1024) - 1024 }' /proc/meminfo)"
    count="$(cards | wc -l)"
    ((memory > 0)) || die "this machine has less than 1 GiB of memory"
    cat <<EOF
$MARK
ClusterName=one-box
SlurmctldHost=$name(127.0.0.1)
AuthType=auth/munge
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
# 5 minutes for a checkpoint when a job is cancelled or preempted
KillWait=300
ProctrackType=proctrack/$1
TaskPlugin=task/$2
# cores and memory are shared out; a job without --mem gets its share of the memory
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$((memory / cpus))
GresTypes=gpu
NodeName=$name NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory$( ((count == 0)) || echo " Gres=gpu:$count") State=UNKNOWN
PartitionName=main Nodes=$name Default=YES MaxTime=UNLIMITED State=UP
EOF
}

cgroup_conf() {
    cat <<EOF
$MARK
ConstrainCores=yes
ConstrainDevices=yes
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
AllowedSwapSpace=0
EOF
}

gres_conf() {
    echo "$MARK"
    cards | while IFS= read -r card; do echo "Name=gpu File=$card"; done
}

# prints "cgroup cgroup" (process tracking, limits), or what holds jobs together where no cgroup can be made
plugins() {
    local folder=/sys/fs/cgroup
    [[ -f "$folder/cgroup.controllers" ]] || folder=/sys/fs/cgroup/memory
    if mkdir "$folder/slurm_one_box.$$" 2>/dev/null; then
        rmdir "$folder/slurm_one_box.$$"
        echo cgroup cgroup
    else
        echo linuxproc none
    fi
}

# runs PIDFILE: whether that process is there
runs() { [[ -s "$1" ]] && kill -0 "$(cat "$1")" 2>/dev/null; }

# starts DAEMON [ARGUMENT...]: by systemd where it runs, else itself
start() {
    if [[ -d /run/systemd/system ]]; then
        systemctl enable --quiet "$1"
        systemctl restart "$1"
    elif [[ "$1" == munge ]]; then
        install -d -o munge -g munge -m 755 /run/munge
        runs /run/munge/munged.pid || setpriv --reuid=munge --regid=munge --clear-groups munged
    else
        ! runs "/run/$1.pid" || { kill "$(cat "/run/$1.pid")"; sleep 2; }
        "$1"
    fi
}

main() {
    local process_tracking task
    read -r process_tracking task < <(plugins)
    if [[ "${1:-}" == --print ]]; then
        slurm_conf "$process_tracking" "$task"
        cgroup_conf
        gres_conf
        return
    fi
    (($# == 0)) || die "found $*, expected nothing or --print"
    ((EUID == 0)) || die "only root can set Slurm up: sudo $0"
    if [[ -e "$CONFIG" ]] && ! grep -qxF "$MARK" "$CONFIG"; then
        die "$CONFIG is there and not ours; move it away to set Slurm up anew"
    fi
    if ! command -v slurmctld slurmd munged >/dev/null; then
        command -v apt-get >/dev/null || die "no apt-get here: install slurmctld, slurmd and munge first"
        apt-get install -y --no-install-recommends slurm-wlm munge
    fi
    [[ "$task" == cgroup ]] || echo "slurm_one_box.sh: no cgroup can be made here, so memory and cards are not enforced" >&2
    [[ -s /etc/munge/munge.key ]] || install -o munge -g munge -m 400 <(head -c 1024 /dev/urandom) /etc/munge/munge.key
    install -d -m 755 /etc/slurm /var/log/slurm
    install -d -o slurm -g slurm -m 755 /var/lib/slurm/slurmctld
    install -d -m 755 /var/lib/slurm/slurmd
    slurm_conf "$process_tracking" "$task" >"$CONFIG"
    cgroup_conf >/etc/slurm/cgroup.conf
    gres_conf >/etc/slurm/gres.conf
    chown slurm:slurm /var/log/slurm
    start munge
    start slurmctld
    start slurmd
    for _ in {1..30}; do
        if [[ "$(timeout 5 sinfo --noheader --format=%T 2>/dev/null)" =~ ^(idle|mixed|allocated) ]]; then
            sinfo --Node --long
            return
        fi
        sleep 1
    done
    timeout 5 sinfo --Node --long >&2 || :
    die "the node is not idle after 30 s; see /var/log/slurm"
}

main "$@"
