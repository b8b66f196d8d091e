"""The machine as probe.py sees it. Fakes are folder trees and environments."""

from __future__ import annotations

import dataclasses
import os
import resource
from pathlib import Path

import pytest

from launch.base.errors import ConfigError, ResourceError
from launch.probe import described
from launch.probe import machine as probe_machine
from launch.probe.machine import OomKills
from launch.schema.machine import GIB, Machine

pytestmark = pytest.mark.unit

MACHINES = Path(__file__).parents[3] / "configs/machines"
V1_UNLIMITED = "9223372036854771712"
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"


def tree(
    root: Path, mounts: list[str], own: list[str], files: dict[str, str | int], total_gib: int = 64
) -> Path:
    """A root folder with /proc for these mounts and this /proc/self/cgroup; `files` are below
    /sys/fs/cgroup."""
    total_kib = total_gib << 20
    meminfo = [
        f"MemTotal: {total_kib} kB",
        "MemFree: 1024 kB",
        f"MemAvailable: {total_kib // 2} kB",
        "HugePages_Total: 0",
    ]
    contents: dict[str, str | int] = {
        "proc/meminfo": "\n".join(meminfo),
        "proc/self/mountinfo": "\n".join(["23 1 254:0 / / rw - ext4 /dev/vda rw", *mounts]),
        "proc/self/cgroup": "\n".join(own),
        **{f"sys/fs/cgroup/{path}": text for path, text in files.items()},
    }
    for path, text in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return root


def limit(root: Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    return min(probe_machine.host_limits(root, env or {}))


# ---- host memory
# ---------------------------------------------------------------------------


def test_without_any_cap_the_limit_is_memtotal(tmp_path):
    root = tree(tmp_path, [V2_MOUNT], ["0::/"], {})
    assert limit(root) == (64 * GIB, "MemTotal in /proc/meminfo = 64.00 GiB")
    assert probe_machine.host_available(root, {}) == (
        32 * GIB,
        "MemAvailable in /proc/meminfo = 32.00 GiB",
    )


def test_a_v2_ancestor_with_the_smallest_limit_binds(tmp_path):
    files: dict[str, str | int] = {
        "user.slice/memory.max": 8 * GIB,
        "user.slice/job/memory.max": 16 * GIB,
        "user.slice/job/step/memory.max": "max",
    }
    root = tree(tmp_path, [V2_MOUNT], ["0::/user.slice/job/step"], files)
    assert limit(root) == (8 * GIB, "/sys/fs/cgroup/user.slice/memory.max = 8.00 GiB")
    # MemTotal and the two folders that have a number
    assert len(probe_machine.host_limits(root, {})) == 3


def test_v2_memory_high_is_a_limit_too(tmp_path):
    files: dict[str, str | int] = {"job/memory.max": 8 * GIB, "job/memory.high": 6 * GIB}
    root = tree(tmp_path, [V2_MOUNT], ["0::/job"], files)
    assert limit(root) == (6 * GIB, "/sys/fs/cgroup/job/memory.high = 6.00 GiB")


def test_a_v1_limit_binds_and_its_word_for_unlimited_does_not(tmp_path):
    files: dict[str, str | int] = {
        "memory/memory.limit_in_bytes": V1_UNLIMITED,
        "memory/slurm/memory.limit_in_bytes": V1_UNLIMITED,
        "memory/slurm/job_7/memory.limit_in_bytes": 4 * GIB,
    }
    own = ["4:memory:/slurm/job_7", "1:cpu,cpuacct:/elsewhere"]
    root = tree(tmp_path, [V1_MOUNT], own, files)
    assert limit(root) == (
        4 * GIB,
        "/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes = 4.00 GiB",
    )
    assert len(probe_machine.host_limits(root, {})) == 2


@pytest.mark.parametrize("unlimited", [V1_UNLIMITED, "9223372036854710272", "9223372036854775807"])
def test_no_page_size_makes_unlimited_a_number(tmp_path, unlimited):
    root = tree(tmp_path, [V1_MOUNT], ["4:memory:/"], {"memory/memory.limit_in_bytes": unlimited})
    assert len(probe_machine.host_limits(root, {})) == 1


def test_in_a_hybrid_both_hierarchies_are_read(tmp_path):
    mounts = [V1_MOUNT, "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"]
    files: dict[str, str | int] = {
        "memory/a/memory.limit_in_bytes": 5 * GIB,
        "unified/b/memory.max": 3 * GIB,
    }
    root = tree(
        tmp_path, mounts, ["4:memory:/a", "2:cpuacct:/z", "1:name=systemd:/b", "0::/b"], files
    )
    assert [cap for cap, _ in probe_machine.host_limits(root, {})] == [64 * GIB, 5 * GIB, 3 * GIB]


def test_a_container_that_mounts_its_own_part_of_the_tree_is_found_there(tmp_path):
    # docker with the host's cgroup namespace: /proc/self/cgroup shows the host's path, the mount
    # only what is below it
    mount = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory"
    files: dict[str, str | int] = {
        "memory/memory.limit_in_bytes": 2 * GIB,
        "memory/inner/memory.limit_in_bytes": V1_UNLIMITED,
    }
    root = tree(tmp_path, [mount], ["4:memory:/docker/abc/inner"], files)
    assert limit(root) == (2 * GIB, "/sys/fs/cgroup/memory/memory.limit_in_bytes = 2.00 GiB")


@pytest.mark.parametrize("own", ["0::/docker/abcdef", "0::/../sibling"])
def test_a_process_outside_the_mounted_part_takes_the_limit_at_the_mount_point(tmp_path, own):
    mount = "31 23 0:28 /docker/abc /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
    root = tree(tmp_path, [mount], [own], {"memory.max": 2 * GIB, "def/memory.max": GIB})
    assert limit(root)[0] == 2 * GIB


def test_a_mount_point_with_a_space_is_unescaped(tmp_path):
    mount = r"31 23 0:28 / /sys/fs/cgroup/a\040b rw,relatime - cgroup2 cgroup2 rw"
    root = tree(tmp_path, [mount], ["0::/job"], {"a b/job/memory.max": 2 * GIB})
    assert limit(root)[1] == "/sys/fs/cgroup/a b/job/memory.max = 2.00 GiB"


def test_page_cache_counts_as_free_in_v2(tmp_path):
    stat = (
        f"anon {GIB}\nfile {6 * GIB}\nshmem {GIB}\nslab_unreclaimable 0\nslab_reclaimable"
        f" {GIB}\nsock 0"
    )
    files: dict[str, str | int] = {
        "job/memory.max": 8 * GIB,
        "job/memory.current": 8 * GIB,
        "job/memory.stat": stat,
    }
    available, reason = probe_machine.host_available(
        tree(tmp_path, [V2_MOUNT], ["0::/job"], files), {}
    )
    assert available == 6 * GIB
    assert (
        reason
        == "/sys/fs/cgroup/job/memory.max = 8.00 GiB less 2.00 GiB in use that cannot be reclaimed"
    )


def test_page_cache_counts_as_free_in_v1(tmp_path):
    stat = f"cache 1\nrss 1\ntotal_cache {3 * GIB}\ntotal_rss {GIB}\ntotal_shmem {GIB}"
    files: dict[str, str | int] = {
        "memory/job/memory.limit_in_bytes": 4 * GIB,
        "memory/job/memory.stat": stat,
    }
    available, _ = probe_machine.host_available(
        tree(tmp_path, [V1_MOUNT], ["4:memory:/job"], files), {}
    )
    assert available == 2 * GIB


def test_an_ancestor_with_a_larger_limit_but_less_left_binds_what_is_available(tmp_path):
    files: dict[str, str | int] = {
        "job/memory.max": 16 * GIB,
        "job/memory.stat": f"anon {15 * GIB}",
        "job/step/memory.max": 8 * GIB,
        "job/step/memory.stat": f"anon {2 * GIB}",
    }
    root = tree(tmp_path, [V2_MOUNT], ["0::/job/step"], files)
    assert limit(root)[0] == 8 * GIB
    available, reason = probe_machine.host_available(root, {})
    assert (available, reason.split(" ")[0]) == (GIB, "/sys/fs/cgroup/job/memory.max")


def test_a_cgroup_over_its_soft_limit_has_nothing_available_rather_than_less(tmp_path):
    files: dict[str, str | int] = {"job/memory.high": GIB, "job/memory.stat": f"anon {2 * GIB}"}
    assert probe_machine.host_available(tree(tmp_path, [V2_MOUNT], ["0::/job"], files), {})[0] == 0


@pytest.mark.parametrize(
    ("env", "gib", "where"),
    [
        ({"SLURM_MEM_PER_NODE": "8192"}, 8, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_NODE": "8G"}, 8, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_NODE": "8388608K"}, 8, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_NODE": "4096m"}, 4, "SLURM_MEM_PER_NODE"),
        (
            {"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "3"},
            6,
            "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE",
        ),
        (
            {"SLURM_MEM_PER_GPU": "20G", "SLURM_GPUS_ON_NODE": "2"},
            40,
            "SLURM_MEM_PER_GPU x SLURM_GPUS_ON_NODE",
        ),
        ({"SLURM_MEM_PER_NODE": "1T"}, 64, "MemTotal in /proc/meminfo"),
        (
            {"SLURM_MEM_PER_NODE": "0", "SLURM_MEM_PER_CPU": "0", "SLURM_CPUS_ON_NODE": "4"},
            64,
            "MemTotal in /proc/meminfo",
        ),
        ({"SLURM_MEM_PER_CPU": "2048"}, 64, "MemTotal in /proc/meminfo"),
    ],
)
def test_slurm_limits_are_megabytes_or_carry_a_suffix_and_zero_is_none(tmp_path, env, gib, where):
    root = tree(tmp_path, [], [], {})
    assert limit(root, env) == (gib * GIB, f"{where} = {gib:.2f} GiB")
    assert probe_machine.host_available(root, env)[0] == min(gib, 32) * GIB


def test_a_slurm_size_that_is_none_is_the_users_error(tmp_path):
    with pytest.raises(ConfigError, match='SLURM_MEM_PER_NODE="lots" is not a size'):
        probe_machine.host_limits(tree(tmp_path, [], [], {}), {"SLURM_MEM_PER_NODE": "lots"})
    with pytest.raises(ConfigError, match='SLURM_CPUS_ON_NODE="4-8" is not a count'):
        probe_machine.host_limits(tree(tmp_path, [], [], {}), {"SLURM_CPUS_ON_NODE": "4-8"})


def test_a_system_without_proc_is_named(tmp_path):
    with pytest.raises(ResourceError, match="no MemTotal"):
        probe_machine.host_limits(tmp_path, {})


def test_oom_kills_are_read_from_the_nearest_cgroup_that_counts_them(tmp_path):
    files: dict[str, str | int] = {
        "a/memory.events": "low 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0",
        "a/b/x": 0,
    }
    found = probe_machine.oom_kills(tree(tmp_path / "v2", [V2_MOUNT], ["0::/a/b"], files))
    assert found == OomKills(3)
    files = {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2"}
    found = probe_machine.oom_kills(tree(tmp_path / "v1", [V1_MOUNT], ["4:memory:/a"], files))
    assert found == OomKills(2)
    root = tree(tmp_path / "none", [V2_MOUNT], ["0::/"], {})
    assert probe_machine.oom_kills(root) == OomKills(None, is_of_machine=True)
    (root / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 5\n")
    assert probe_machine.oom_kills(root) == OomKills(5, is_of_machine=True)


# ---- CPUs, /dev/shm, disk
# ---------------------------------------------------------------------------


def test_a_cpu_quota_of_an_ancestor_binds_and_is_rounded_up(tmp_path):
    files: dict[str, str | int] = {"job/cpu.max": "50000 100000", "job/step/cpu.max": "max 100000"}
    count, reason = probe_machine.cpus(tree(tmp_path, [V2_MOUNT], ["0::/job/step"], files), {})
    assert count == 1
    assert (
        len(os.sched_getaffinity(0)) == 1
        or reason == "/sys/fs/cgroup/job/cpu.max = 50000 of 100000 us"
    )


def test_a_v1_cpu_quota_binds_and_minus_one_does_not(tmp_path):
    files: dict[str, str | int] = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": 25_000,
        "cpu,cpuacct/job/cpu.cfs_period_us": 50_000,
    }
    root = tree(tmp_path / "a", [V1_CPU_MOUNT], ["3:cpu,cpuacct:/job"], files)
    assert probe_machine.cpus(root, {})[0] == 1
    files["cpu,cpuacct/job/cpu.cfs_quota_us"] = -1
    root = tree(tmp_path / "b", [V1_CPU_MOUNT], ["3:cpu,cpuacct:/job"], files)
    assert probe_machine.cpus(root, {}) == (len(os.sched_getaffinity(0)), "sched_getaffinity")


@pytest.mark.parametrize("variable", ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"])
def test_slurms_cpus_bind(tmp_path, variable):
    count, reason = probe_machine.cpus(tree(tmp_path, [], [], {}), {variable: "1"})
    assert count == 1
    assert len(os.sched_getaffinity(0)) == 1 or reason == variable


def test_an_absent_dev_shm_is_zero_with_the_reason(tmp_path):
    machine = probe_machine.machine(tree(tmp_path, [], [], {}), {})
    assert (machine.shm_bytes, machine.shm_reason) == (0, "/dev/shm: No such file or directory")


def test_the_disk_is_that_of_the_nearest_folder_that_exists(tmp_path):
    machine = probe_machine.machine(
        tree(tmp_path, [], [], {}), {}, run_dir=tmp_path / "runs/not/yet"
    )
    assert machine.disk_free_bytes > 0
    assert machine.disk_reason == f"free to this user at {tmp_path}"


# ---- the whole machine
# ---------------------------------------------------------------------------


def test_this_machine_is_probed_with_a_reason_beside_each_fact(tmp_path):
    machine = probe_machine.machine(run_dir=tmp_path)
    assert 0 < machine.host_available_bytes <= machine.host_limit_bytes
    assert machine.host_limit_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 <= machine.cpu_count <= (os.cpu_count() or 1)
    assert machine.disk_free_bytes > 0
    for field in dataclasses.fields(Machine):
        if field.name.endswith("_reason"):
            assert getattr(machine, field.name), field.name
    for gpu in machine.gpus:
        assert 0 < gpu.free_bytes <= gpu.total_bytes
        assert gpu.architecture


def test_the_environment_of_this_process_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "64")
    machine = probe_machine.machine(tree(tmp_path, [], [], {}))
    assert machine.host_limit_reason == "SLURM_MEM_PER_NODE = 64.0 MiB"
    assert machine.host_available_bytes == 64 << 20


def test_describe_says_each_fact_in_gib_with_its_reason():
    lines = probe_machine.describe(described.from_file(MACHINES / "2x3080-20g-16g.yaml"))
    assert (
        lines[1]
        == "GPU 0: NVIDIA GeForce RTX 3080, 19.60 GiB free of 20.00 GiB, 8.6, driver 550.54.15"
        " (described)"
    )
    assert "host memory available: 7.00 GiB (described)" in lines
    assert len(lines) == 9


# ---- described machines
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "vram_gib", "architecture", "host_gib", "cpus"),
    [
        ("2x3080-20g-16g", 2, 20.0, "8.6", 16, 8),
        ("a5000-16g", 1, 16.0, "8.6", 64, 16),
        ("a6000-48g", 1, 48.0, "8.6", 60, 16),
        ("r9700-32g", 1, 31.9, "gfx1201", 64, 16),
        ("h200", 1, 139.8, "9.0", 128, 16),
        ("cpu", 0, 0.0, "", 24, 2),
    ],
)
def test_each_described_machine_loads(name, gpus, vram_gib, architecture, host_gib, cpus):
    machine = described.from_file(MACHINES / f"{name}.yaml")
    assert (len(machine.gpus), machine.cpu_count) == (gpus, cpus)
    assert machine.host_limit_bytes == host_gib * GIB
    assert machine.host_available_bytes < machine.host_limit_bytes
    for index, gpu in enumerate(machine.gpus):
        assert (gpu.index, gpu.total_bytes, gpu.architecture) == (
            index,
            int(vram_gib * GIB),
            architecture,
        )
        assert gpu.free_bytes < gpu.total_bytes


def test_every_file_in_configs_machines_loads():
    names = [described.from_file(path).name for path in sorted(MACHINES.iterdir())]
    assert len(set(names)) == len(names) >= 6


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cpu_count: 8", "cpu_counts: 8", "unknown key cpu_counts; did you mean cpu_count?"),
        (
            "host_limit_gib: 16.0",
            "host_limit_bytes: 16.0",
            "unknown key host_limit_bytes; did you mean host_limit_gib?",
        ),
        ("cpu_count: 8", "cpu_count: 8\nzzz: 1", "unknown key zzz"),
        (
            "    total_gib: 20.0\n",
            "",
            "NVIDIA GeForce RTX 3080: there are several of that name: RTX 3080 10GB, RTX 3080 12GB",
        ),
        (
            "host_limit_gib: 16.0\n",
            "",
            "missing key ram_gib; expected gpu (a card of configs/cards.yaml)",
        ),
        ("cpu_count: 8", "ram_gib: 8", "ram_gib and host_limit_gib are both given; expected one"),
        ("cpu_count: 8", "gpu: RTX 3090", "; expected how many of gpu, from 1"),
        ("    free_gib", "    fre_gib", "unknown key gpus[0].fre_gib; did you mean free_gib?"),
        ('"8.6"', "8.6", "gpus[0].architecture is 8.6; expected text (a number in quotes)"),
        ("vendor: nvidia", "vendor: intel", "gpus[0].vendor is 'intel'; expected nvidia or amd"),
        ("cpu_count: 8", "cpu_count: 8.5", "cpu_count is 8.5; expected a whole number"),
        ("cpu_count: 8", "cpu_count: yes", "cpu_count is True; expected a whole number"),
        (
            "host_limit_gib: 16.0",
            "host_limit_gib: 16G",
            "host_limit_gib is '16G'; expected a size in GiB",
        ),
        (
            "host_limit_gib: 16.0",
            "host_limit_gib: -1",
            "host_limit_gib is -1; expected a size in GiB",
        ),
        (
            "host_limit_gib: 16.0",
            "host_limit_gib: .nan",
            "host_limit_gib is nan; expected a size in GiB",
        ),
        (
            "host_limit_gib: 16.0",
            "host_limit_gib: .inf",
            "host_limit_gib is inf; expected a size in GiB",
        ),
        (
            "cpu_count: 8",
            "cpu_count: 8\npackages: [flashattn]",
            "packages is ['flashattn']; expected a list of flash_attn, liger_kernel, triton, []",
        ),
        (
            "cpu_count: 8",
            "cpu_count: 8\npackages: flash_attn",
            "packages is 'flash_attn'; expected a list of flash_attn, liger_kernel",
        ),
        ("  - index: 0", "  - 3\n  - index: 0", "gpus[0] is not a mapping"),
        ("name: 2x", "name: [", "not YAML"),
    ],
)
def test_a_bad_description_names_the_file_and_the_key(tmp_path, old, new, said):
    text = (MACHINES / "2x3080-20g-16g.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=r"mine\.yaml: ") as caught:
        described.from_file(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_description_that_is_empty_or_absent_is_named(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"empty.yaml: the file is not a mapping"):
        described.from_file(tmp_path / "empty.yaml")
    with pytest.raises(ResourceError, match=r"absent.yaml: No such file"):
        described.from_file(tmp_path / "absent.yaml")


def test_a_file_needs_the_card_and_the_ram_only(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("gpu: RTX 3090\ngpus: 2\nram_gib: 32\n")
    machine = described.from_file(path)
    assert machine == described.from_words("RTX 3090", 2, 32)
    assert [gpu.index for gpu in machine.gpus] == [0, 1]
    assert {gpu.free_bytes for gpu in machine.gpus} == {24576 << 20}
    assert (machine.name, machine.cpu_count) == ("2x RTX 3090", described.CPUS)
    assert machine.host_available_bytes == machine.host_limit_bytes == 32 * GIB
    assert machine.shm_bytes == 16 * GIB
    assert machine.cpu_reason == machine.disk_reason == "assumed"
    assert machine.assumed == (
        "all of each card's memory is free, driver not known, all of the RAM is free, 8 CPUs,"
        " /dev/shm half of the RAM, 500.00 GiB of disk free"
    )


def test_what_a_file_says_is_not_assumed(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "gpus: [{name: RTX 3090, free_gib: 20}]\nram_gib: 32\nhost_available_gib: 20\n"
        "cpu_count: 4\n"
    )
    machine = described.from_file(path)
    assert (machine.gpus[0].free_bytes, machine.cpu_count) == (20 * GIB, 4)
    assert machine.host_available_bytes == 20 * GIB
    assert machine.assumed == (
        "driver not known, /dev/shm half of the RAM, 500.00 GiB of disk free"
    )


def test_all_missing_keys_are_named_at_once(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: missing keys gpu, ram_gib; expected gpu"):
        described.from_file(path)
    path.write_text("gpus: [{index: 0}]\n")
    with pytest.raises(
        ConfigError,
        match=r"missing keys gpus\[0\]\.name, gpus\[0\]\.vendor, gpus\[0\]\.total_gib,"
        r" gpus\[0\]\.free_gib, gpus\[0\]\.architecture, ram_gib;",
    ):
        described.from_file(path)


def test_the_files_of_the_project_assume_nothing():
    machines = map(described.from_file, sorted(MACHINES.iterdir()))
    assert [machine.assumed for machine in machines if machine.assumed] == []


@pytest.mark.parametrize(
    ("overcommit", "largest_gib", "available", "counts"),
    [
        ("0", 72, 32, ""),
        ("1", None, 32, ""),
        ("2", None, 7, "vm.overcommit_memory = 2"),
    ],
)
def test_mapped_files_count_where_the_kernel_promises_memory(
    tmp_path, overcommit, largest_gib, available, counts
):
    root = tree(tmp_path, [], ["0::/"], {})
    (root / "proc/sys/vm").mkdir(parents=True)
    (root / "proc/sys/vm/overcommit_memory").write_text(overcommit)
    swap_and_commits = [("SwapTotal", 8), ("CommitLimit", 40), ("Committed_AS", 33)]
    with (root / "proc/meminfo").open("a") as meminfo:
        meminfo.writelines(f"{name}: {gib << 20} kB\n" for name, gib in swap_and_commits)
    largest = probe_machine.largest_mapping(root)
    assert (largest and largest[0]) == (largest_gib and largest_gib * GIB)
    assert probe_machine.host_available(root, {})[0] == available * GIB
    assert probe_machine.machine(root, {}).mappings_count == counts
    probe_machine.check_mapping(Path("/models/m"), 72 * GIB, root)
    if largest_gib:
        with pytest.raises(ResourceError, match=r"none can be mapped .*; add swap, or"):
            probe_machine.check_mapping(Path("/models/m"), 72 * GIB + 1, root)


def test_a_limit_of_this_process_counts_what_it_maps():
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 45, hard))
    try:
        assert probe_machine.machine().mappings_count == "RLIMIT_DATA"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert probe_machine.machine().mappings_count == ""
