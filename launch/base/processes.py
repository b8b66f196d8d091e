"""The processes of a run. They are found by the tag in their environment, because launchers start
ranks in sessions of their own."""

import ctypes
import io
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from launch.base.errors import LaunchError, ResourceError
from launch.base.files import system_text
from launch.base.text import shown

POLL_S = 0.2  # pause between two checks of a run
# Rounds that a thread of OpenMP spins before it sleeps, some 20 us, as libgomp does where threads
# outnumber cores. Threads that sleep at once double the step of a small model; with libgomp's
# 300,000, steps beside a busy process take 1.8 times as long (benchmarks/results/thread_waits.md).
SPINS = "1000"
_UNKILLABLE_S = 10.0  # limit for the end of a process after SIGKILL
THREADS = 4  # threads of a process beside its pools, which grow with the number of CPUs
_THREAD_STACK_BYTES = 64 << 10  # else each takes 8 MiB of what `ulimit -v` allows
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1  # prctl(2)
SIZES = re.compile(rb"^(\w+):\s+(\d+) kB$", re.MULTILINE)
# smaps: is it code, the path of a file with an inode, resident pages, those of them that are copies
_MAPPED_FILE = re.compile(
    rb"^[\da-f]+-[\da-f]+ ..(.). [\da-f]+ \S+ [1-9]\d* +(.+)\n(?:[A-Z].*\n)*?Rss: +(\d+) kB\n"
    rb"(?:[A-Z].*\n)*?Anonymous: +(\d+) kB$",
    re.MULTILINE,
)
# device files: pages mapped from them stay in RAM
_DRIVERS = (b"/dev/nvidia", b"/dev/kfd", b"/dev/dri/")
# share of the time; a walk takes 20 ms per resident GiB and 10 ms per 1,000 mappings
_WALKING_SHARE = 0.01


def child_main(work: Callable[..., object], *arguments: Any) -> int:
    """The exit code of a child that does this work. The user's error is one line on stderr."""
    settle_process()
    try:
        work(*arguments)
    except LaunchError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def adopt() -> None:
    """Make orphans below this process its children from now on, so that none is lost."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def tagged(tag: str) -> list[psutil.Process]:
    """Every process that has the run's tag in its environment, wherever it is in the process
    tree."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and is_tagged(process.pid, tag)
    ]


def is_tagged(pid: int, tag: str) -> bool:
    """True if a process that is there has the run's tag in its environment."""
    try:
        process = psutil.Process(pid)
        return (
            process.environ().get("LOWMEM_RUN") == tag and process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # gone meanwhile, or another user's


def end_tree(tag: str) -> list[psutil.Process]:
    """Send SIGKILL to all processes of the run; return those there after _UNKILLABLE_S."""
    until = time.monotonic() + _UNKILLABLE_S
    while (remaining := tagged(tag)) and time.monotonic() <= until:
        for process in remaining:
            send(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    return remaining


def reap() -> None:
    """Collect the exit codes of adopted orphans. There must be no child whose end somebody else
    waits for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # gone meanwhile
        os.kill(pid, number)


def cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def scheduled() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread of this process has run, and has waited for a core; {} where the
    kernel does not count them (CONFIG_SCHED_INFO)."""
    times: dict[str, tuple[int, int]] = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # the thread has ended
            ran, waited, _ = map(int, file.read_text(encoding="utf-8").split())
            times[file.parent.name] = ran, waited
    return times


def _busy_s() -> float:
    """The seconds that cores which this process may use have been busy since the system started,
    with any program but this. Where the system does not say, nothing was."""
    ticks, usable = 0, {f"cpu{number}" for number in os.sched_getaffinity(0)}
    for line in system_text(Path("/proc/stat")).splitlines():
        name, *fields = line.split()
        if name in usable:
            user, nice, system, _, _, interrupt, soft_interrupt, stolen = map(int, fields[:8])
            ticks += user + nice + system + interrupt + soft_interrupt + stolen
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


_BEGAN = time.monotonic(), _busy_s()  # 0.1 ms; later, children of a plan would count as others


def taken_cores() -> float:
    """The number of cores that other programs, and children of this one, have kept busy since this
    process began."""
    began, busy_s = _BEGAN
    return max(_busy_s() - busy_s, 0.0) / (time.monotonic() - began)


def core_share(before: Mapping[str, tuple[int, int]]) -> float:
    """The share of the time since `before` that threads had a core, of that in which they could
    run; 1 where it is not known. What a hypervisor takes counts as had."""
    ran = waited = 0
    for thread, (ran_ns, waited_ns) in scheduled().items():
        ran_before, waited_before = before.get(thread, (0, 0))
        ran, waited = ran + ran_ns - ran_before, waited + waited_ns - waited_before
    return ran / (ran + waited) if ran else 1.0


def status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def is_alive(pid: int) -> bool:
    return status(pid) not in ("gone", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def start_ticks(pid: int) -> int | None:
    """The start of a process in clock ticks since boot, which with the pid identifies the process.
    None: it is gone."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def die_with_launcher(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent dies, so that no rank outlives its
    launcher."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def settle_child() -> None:
    """End with the launcher, and keep a request for a checkpoint (SIGUSR2) waiting.

    `scancel --signal=USR2 --full` sends it to every process of a run, and it ends those that do not
    handle it. A process that does handle it unblocks it."""
    die_with_launcher()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


def settle_process() -> None:
    """Make files of this process and its children private to the user, write no memory to disk
    after a crash, and write characters that a terminal's encoding lacks as escapes."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it was closed
            stream.reconfigure(errors="backslashreplace")


def settle_threads() -> None:
    """Let threads of OpenMP sleep soon where the user's variables do not say when. To be called
    before torch is imported, with which libgomp is loaded."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


@contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Raise MemoryError where this process takes so many bytes more. A limit of its user's own
    stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        pages = os.pread(_statm(os.getpid()), 256, 0).split()[5]  # proc(5): data and stack
        most = int(pages) * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@cache
def _statm(pid: int) -> int:
    """The open file of a process's memory, which is read for each row."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def check_proc() -> None:
    """Raise ResourceError without a /proc in which the processes of this program are found."""
    try:
        number = str(Path("/proc/self").readlink())
    except OSError:
        number = ""
    if number != str(os.getpid()):
        state = "shows another PID namespace" if number else "is not mounted"
        raise ResourceError(
            f"/proc {state}: memory and processes are read there; mount it for the processes that"
            " are here (`mount -t proc proc /proc`; unshare: --mount-proc; bwrap: --proc /proc)"
        )


def check_threads() -> None:
    """Start as many threads as libraries of native code start in one process, and end them.

    Where the system refuses one of theirs, OpenBLAS ends the process with SIGINT and tokenizers
    with a panic, and neither names a limit that the user could raise. Raises ResourceError."""
    needed = THREADS + 2 * (os.cpu_count() or 1)  # OpenBLAS, and a pool of pyarrow or tokenizers
    over, threads = threading.Event(), []
    before = threading.stack_size(_THREAD_STACK_BYTES)
    try:
        for _ in range(needed):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:  # can't start new thread
        raise ResourceError(
            f"a process of lowmem may start only {len(threads)} threads, expected {needed};"
            f" {limit_of_processes()}"
        ) from error
    finally:
        over.set()
        for thread in threads:
            thread.join()
        threading.stack_size(before)


def limit_of_processes() -> str:
    """The limit of this user's processes and threads, and how to raise it."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        f"`ulimit -u`, which counts all processes and threads of this user, is {shown}: raise it"
        " (`ulimit -u 4096`), or a container's --pids-limit, or end other programs of this user"
    )


def boot_id() -> str:
    """The identifier of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class Pages:
    """Resident bytes of a process that the kernel has to keep, or that it reads all the time."""

    # anonymous and shared memory, its share where several processes map a page, and drivers' memory
    own_bytes: int
    shared_bytes: int  # anonymous and shared memory beyond own_bytes; below 0: that of drivers
    mapped_bytes: int  # shared memory, whole
    library_bytes: int  # pages of files whose code it has mapped
    weight_bytes: int  # pages of .safetensors files


def pages(pid: int | None = None) -> Pages:
    """Walk the pages of a process, of this one without `pid`. Raises OSError of a process that is
    gone or another user's, KeyError of one that has ended."""
    folder = Path(f"/proc/{pid or 'self'}")
    sizes = _sizes(folder / "smaps_rollup")
    shared_memory = _sizes(folder / "status")["RssShmem"]
    unlike_files = sizes["Anonymous"] + shared_memory
    anonymous_bytes = (
        sizes["Pss_Anon"] + sizes["Pss_Shmem"]
        if "Pss_Anon" in sizes
        else min(sizes["Pss"], unlike_files)  # before Linux 5.3
    )
    mappings = _MAPPED_FILE.findall((folder / "smaps").read_bytes())
    libraries = {path for is_code, path, *_ in mappings if is_code == b"x"}
    clean = [(path, int(resident) - int(copied)) for _, path, resident, copied in mappings]
    anonymous_bytes += sum(kib for path, kib in clean if path.startswith(_DRIVERS)) << 10
    return Pages(
        anonymous_bytes,
        unlike_files - anonymous_bytes,
        shared_memory,
        sum(kib for path, kib in clean if path in libraries) << 10,
        sum(kib for path, kib in clean if b".safetensors" in path) << 10,
    )


def _pages_or_none(pid: int) -> Pages | None:
    try:
        return pages(pid)
    except (OSError, KeyError):
        return None


def _sizes(file: Path) -> dict[str, int]:
    return {name.decode(): int(kib) << 10 for name, kib in SIZES.findall(file.read_bytes())}


def forget_peak() -> None:
    """Let the highest resident size of this process (VmHWM) begin anew."""
    with suppress(OSError):  # a sandbox without it: an older peak may be reported
        Path("/proc/self/clear_refs").write_bytes(b"5")


class JobMemory:
    """Host RAM of a process and its descendants, as if no other job ran on this machine.

    Their anonymous and shared memory counts, and once for all of them the libraries and, from the
    training on, weights that lie in files: frozen ones of a CPU run, which each step reads. Pages
    of other mapped files (a model that is loaded, rows, checkpoints) can be dropped at any time and
    do not count. The kernel's counters are read each time; what is shared and mapped is looked up
    in _WALKING_SHARE of the time, and for new processes. Processes that are gone or another user's
    are left out."""

    def __init__(self, root_pid: int) -> None:
        self._root = root_pid
        self._pages: dict[int, Pages | None] = {}
        self._walk_s = 0.0  # earliest time of the next walk, on the monotonic clock
        self._mapped: dict[int, int] = {}  # most bytes of files that a process mapped in training
        self._library_bytes = self._weight_bytes = 0
        self.bytes = self.peak_bytes = 0

    def read(self, in_training: bool, is_exact: bool = False) -> int:
        """Find the processes of the job, and sample them."""
        try:
            children = psutil.Process(self._root).children(recursive=True)
        except psutil.NoSuchProcess:
            return self.bytes
        pids = {self._root, *(child.pid for child in children)}
        began, is_new = time.monotonic(), pids != self._pages.keys()
        if is_new or is_exact or began >= self._walk_s:
            self._pages = {pid: _pages_or_none(pid) for pid in pids}
            walked = [each for each in self._pages.values() if each]
            self._library_bytes = max((each.library_bytes for each in walked), default=0)
            if in_training:
                self._weight_bytes = max((each.weight_bytes for each in walked), default=0)
            took_s = time.monotonic() - began
            # a new process may be about to run another program: it is walked again
            self._walk_s = 0.0 if is_new else began + took_s / _WALKING_SHARE
        return self.sample(in_training)

    def sample(self, in_training: bool) -> int:
        """Bytes now of the processes that were found last; the highest are in `peak_bytes`.

        In training, where few files are mapped and none dropped, the highest resident size (VmHWM)
        less the mapped pages shows a peak between two samples. For several ranks that peak at
        different times it is an upper bound. Shared memory that has come since the last walk is
        taken for the same in all processes: the ranks map streamed weights."""
        anonymous_bytes = above = come_bytes = 0
        if not in_training:
            self._mapped.clear()
        for pid, walked in self._pages.items():
            try:
                sizes = _sizes(Path(f"/proc/{pid}/status"))
            except OSError:
                continue
            if walked is None or "RssAnon" not in sizes:
                continue
            unlike_files = sizes["RssAnon"] + sizes["RssShmem"]
            new_bytes = max(sizes["RssShmem"] - walked.mapped_bytes, 0)
            anonymous_bytes += max(unlike_files - walked.shared_bytes - new_bytes, 0)
            come_bytes = max(come_bytes, new_bytes)
            if in_training:
                mapped = max(sizes["RssFile"], self._mapped.get(pid, 0))
                above += max(sizes["VmHWM"] - mapped - unlike_files, 0)
                self._mapped[pid] = mapped
        self.bytes = anonymous_bytes + come_bytes + self._library_bytes + self._weight_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes + above)
        return self.bytes
