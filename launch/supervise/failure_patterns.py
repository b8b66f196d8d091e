"""The lines by which Python, torch, CUDA, HIP, NCCL and the kernel name a cause, and one fix for
each. Pure."""

import re
from dataclasses import dataclass
from typing import Literal

SMALLER = (
    "halve training.per_device_train_batch_size and double training.gradient_accumulation_steps"
)
AGAIN = "run the same line again"
# Text before an exception at the end of a traceback: the rank as torchrun writes it, the
# exception's module.
_EXCEPTION = r"^(\[(rank|default)?\d+\]:\s*)?([A-Za-z_]\w*\.)*"


# A text that a message quotes, on one line; an apostrophe within a word opens none, and what a C++
# program prints of its own exception ('with description "..."') is no quotation
_QUOTED = re.compile(r"""(?<![\w)\]])(?<!description )(['"])(?:(?!\1)[^\\\n]|\\.)+\1(?!\w)""")
# Exceptions on a value, whose messages repeat it: a row's text is none of the machine's words
_OF_A_VALUE = re.compile(
    rf"{_EXCEPTION}((Value|Key|Type|Lookup|Index|Attribute|Unicode\w*|JSONDecode|Template"
    r"|Undefined|Validation)Error|Arrow(Invalid|TypeError|KeyError)): "
)
# kinds that such an exception may name; a rank that wrote its error would have named them itself
OWN_KINDS = ("data", "weights", "configuration", "library")


@dataclass(frozen=True)
class Pattern:
    """Lines that name a cause, wherever a rank or a library wrote them.

    A consequence is what is left to the others after one has failed: it is a cause only where
    nothing else is."""

    kind: str
    exit_code: int
    cause: str
    fix: str
    lines: tuple[str, ...]  # regular expressions; one that spans lines is proved by its last
    role: Literal["root", "consequence"] = "root"

    def find(self, text: str) -> str | None:
        """The first line of the text in which one of the pattern's lines ends, outside of quoted
        values."""
        first: re.Match[str] | None = None
        for line in self.lines:
            matches = re.finditer(line, text, re.MULTILINE)
            match = next((match for match in matches if self._is_said(match)), None)
            if match and (first is None or match.end() < first.end()):
                first = match
        return full_line(first) if first else None

    def _is_said(self, match: re.Match[str]) -> bool:
        line, begin = full_line(match), match.string.rfind("\n", 0, match.end()) + 1
        start, end = match.start() - begin, match.end() - begin
        if any(quote.start() < start and end < quote.end() for quote in _QUOTED.finditer(line)):
            return False
        return self.kind in OWN_KINDS or not _OF_A_VALUE.match(line)


def full_line(match: re.Match[str]) -> str:
    """The line of the text in which the match ends."""
    begin = match.string.rfind("\n", 0, match.end()) + 1
    end = match.string.find("\n", match.end())
    return match.string[begin : end if end >= 0 else None]


# Xids after which a card, its driver or its link is at fault, in the words of NVIDIA's catalog
# (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html; 175: nverror.h of the open driver)
HARDWARE_XIDS = {
    8: "the GPU stopped processing",
    48: "double bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapper failure",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    154: "GPU recovery action changed",
    158: "GPU fatal timeout",
    167: "PCIe fatal timeout",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
    175: "memory subsystem error",
}

# The first that a text has is its cause: special words before general ones, the card's own before
# what follows.
PATTERNS = (
    Pattern(
        "library",
        3,
        "the optimizer of bitsandbytes touched memory that is not its own",
        "choose another training.optim, one that is not paged or has 32 bits; or install another"
        " version (`pip install -U bitsandbytes`)",
        (r"bitsandbytes/optim/\S{1,40}, line \d+, in [\s\S]{0,400}?CUDA error: an illegal memory",),
    ),
    Pattern(
        "gpu_broken",
        3,
        "a GPU, its memory or its driver failed",
        "run `python -m launch doctor` and see `dmesg`; if it repeats, restart the machine, and"
        " then leave that card out with CUDA_VISIBLE_DEVICES",
        (
            r"uncorrectable ECC error|ECCUncorrectable|ECC_UNCORRECTABLE",
            r"NVRM: Xid \(PCI",
            r"fallen off the bus|GPU is lost",
            r"HSA_STATUS_ERROR_(?!OUT_OF_RESOURCES|INVALID_ISA)\w+:",
            r"Memory access fault by GPU node",
            (
                r"hipErrorIllegalAddress|hipErrorLaunchFailure|HIP error: (an illegal memory"
                r" access|unspecified launch failure)"
            ),
            (
                r"CUDA( driver)? error: (an illegal memory access was|misaligned address|an illegal"
                r" instruction was)"
            ),
            (
                r"CUDA( driver)? error: (unspecified launch failure|unknown error|hardware stack"
                r" error)"
            ),
            (
                r"(Cuda|HIP) failure \d* ?'(an illegal memory access was|unspecified launch"
                r" failure|unknown error)"
            ),
        ),
    ),
    Pattern(
        "driver",
        3,
        "torch cannot use the GPUs with this driver",
        "update the GPU driver, or install the torch build that fits it (docs/cards.md);"
        " `python -m launch doctor` names both",
        (
            r"CUDA driver version is insufficient|cudaErrorInsufficientDriver",
            r"driver on your system is too old",
            (
                r"Found no NVIDIA driver|No (CUDA|HIP) GPUs are available|no (CUDA|ROCm)-capable"
                r" device is detected|CUDA driver initialization failed|CUDA_ERROR_NO_DEVICE"
            ),
            r"Torch not compiled with CUDA enabled",
            r"Failed to initialize NVML: Driver/library version mismatch",
            r"device kernel image is invalid",
        ),
    ),
    Pattern(
        "driver",
        3,
        "a rank asks for a GPU that is not there",
        "`nvidia-smi -L` lists the GPUs: see CUDA_VISIBLE_DEVICES and launch.num_processes; if one"
        " is missing there, restart the machine",
        (r"invalid device ordinal|device < num_gpus INTERNAL ASSERT FAILED",),
    ),
    Pattern(
        "driver",
        3,
        "the driver of the GPUs does not start, or refuses what torch asks of it",
        "restart the machine after an update of the driver; with NVSwitch (error 802) `systemctl"
        " start nvidia-fabricmanager`; for error 804 unset LD_LIBRARY_PATH; for an invalid argument"
        " unset PYTORCH_CUDA_ALLOC_CONF",
        (
            r"Unexpected error from (cuda|hip)GetDeviceCount\(\)",
            (
                r"(CUDA|Cuda|HIP) (error: |failure \d* ?')(initialization error|system (not yet"
                r" initialized|has unsupported)|forward compatibility was)|cuda runtime error"
                r" \((3|80[234])\)"
            ),
            r"CUDA unknown error - this may be due to",
            r"CUDA driver error: (?!out of memory)",
        ),
    ),
    Pattern(
        "gpu_busy",
        3,
        "another program holds a GPU",
        "end it (`nvidia-smi` or `rocm-smi` lists them), or leave that GPU out with"
        " CUDA_VISIBLE_DEVICES",
        (r"device\(s\) is/are busy or unavailable",),
    ),
    Pattern(
        "gpu_unsupported",
        3,
        "this build of torch has no kernels for the GPU",
        "install the build of torch that serves the card (docs/cards.md); a Radeon may run as a"
        " listed one of its generation, e.g. gfx1032 with HSA_OVERRIDE_GFX_VERSION=10.3.0",
        (
            r"(CUDA|HIP) error: (invalid device function|no kernel image is available)",
            (
                r"Error (no kernel image is available|invalid device function).* at line \d+ in"
                r" file"
            ),
            r"hipErrorInvalidDeviceFunction|hipErrorNoBinaryForGpu|HSA_STATUS_ERROR_INVALID_ISA",
        ),
    ),
    Pattern(
        "gpu_unsupported",
        3,
        "a kernel, or the compiler that builds it, does not serve the GPU",
        "leave out what the traceback names: --training.torch_compile=false,"
        " --training.use_liger_kernel=false or --model.attn_implementation=sdpa; for a new card"
        " TRITON_PTXAS_PATH names a newer ptxas",
        (
            r"ptxas fatal\s*: Value 'sm_\w+' is not defined",
            r"too old to be supported by the triton",
            rf"{_EXCEPTION}OutOfResources: out of resource",
            rf"{_EXCEPTION}RuntimeError: PassManager::run failed",
            r"only supports? Ampere GPUs or newer",
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ARCH_MISMATCH",
        ),
    ),
    Pattern(
        "gpu_resources",
        3,
        "the ROCm runtime could not get a resource: GPU memory, a thread or a queue",
        f"where the proof says that little memory is free, {SMALLER}; else see `ulimit -u` and"
        " dmesg",
        (r"HSA_STATUS_ERROR_OUT_OF_RESOURCES",),
    ),
    Pattern(
        "data",
        4,
        "the data has content that the model or its reader cannot take",
        "see that tokenizer.vocab_size (or the tokenizer of tokenizer.path) fits the model, and"
        " that data.train_file is a whole file in UTF-8",
        (
            (
                r"Assertion `?(srcIndex < srcSelectDimSize|t >= 0 && t < n_classes|ind >=? ?0 &&"
                r" ind < \w+)"
            ),
            rf"{_EXCEPTION}IndexError: index out of range in self",
            rf"{_EXCEPTION}IndexError: Target -?\d+ is out of bounds",
            rf"{_EXCEPTION}UnicodeDecodeError: ",
            rf"{_EXCEPTION}JSONDecodeError: |{_EXCEPTION}ArrowInvalid: JSON parse error",
            (
                rf"{_EXCEPTION}ArrowInvalid: (Parquet magic bytes not found|Could not open"
                r" Parquet|CSV parse error)"
            ),
            r"device-side assert triggered",
        ),
    ),
    Pattern(
        "pinned_oom",
        6,
        "the host cannot pin more memory",
        "launch.on_oom=replan offloads to memory that is not pinned, which is slower. Under WSL 2"
        " about half of the RAM can be pinned (memory= in %UserProfile%\\.wslconfig), and less in"
        " containers; elsewhere see `ulimit -l` (make it unlimited); or train without offload: name"
        " another mode with launch.mode",
        (
            (
                r"(\.pin_memory\(\)|pin_memory=(True|self\._pin_memory)\))\n(.*[~^]+\n)?.*(CUDA|HIP)"
                r" error: (out of memory|invalid argument|OS call)"
            ),
            r"the host does not lock [\d,.]+ [KMG]iB for a rank",
        ),
    ),
    Pattern(
        "device_oom",
        12,
        "the GPU ran out of memory",
        SMALLER,
        (
            # the second of torch 2.14, at a limit of the allocator
            r"(CUDA|HIP) out of memory\. (Tried|Allocation was preemptively rejected)",
            r"(CUDA|HIP)( driver)? error: out of memory",
            r"hipErrorOutOfMemory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
            r"(CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|miopenStatusAllocFailed",
            r"(Cuda|HIP) failure (2\b|'out of memory')|Failed to CUDA (c|m)alloc",
            r"Triton Error \[(CUDA|HIP)\]: out of memory",
            r"Error out of memory at line \d+ in file",
            rf"{_EXCEPTION}OutOfMemoryError: ",
            # torch's allocator, when it asks how much is free, and with expandable segments
            r"(NVML_SUCCESS == r|handles_\.at\(i\)) INTERNAL ASSERT FAILED",
        ),
    ),
    Pattern(
        "shm",
        3,
        "/dev/shm is too small, full or cannot be written",
        "enlarge it: docker run --shm-size=1g (or --ipc=host), elsewhere `mount -o remount,size=1g"
        " /dev/shm`; or train with --training.dataloader_num_workers=0",
        (
            r"is killed by signal: Bus error|Unexpected bus error encountered in worker",
            r"unable to (allocate|resize|mmap).{0,40}shared memory",
            (
                r"unable to (write to|resize|mmap \d+ bytes from) file </torch_\w+>(?!: Cannot"
                r" allocate)"
            ),
            r"unable to open shared memory object .*: (No space left|Permission denied|Read-only)",
            (
                r"SemLock\([\s\S]{0,300}?(No space left on device|Read-only file system|Permission"
                r" denied)"
            ),
            r"Error while creating shared memory segment|failed to extend /dev/shm",
        ),
    ),
    Pattern(
        "killed",
        1,
        "a data loader's worker was killed with SIGKILL, but not by the kernel's OOM killer",
        f"{AGAIN} to continue",
        (r"DataLoader worker \(pid \d+\) is killed by signal: Killed",),
    ),
    Pattern(
        "limit",
        3,
        "the system allows this user no more threads, processes or open files",
        "raise the limit: `ulimit -u` (processes and threads), `ulimit -n` (open files), a"
        " container's --pids-limit; or train with --training.dataloader_num_workers=0",
        (
            r"can't start new thread",
            r"ThreadPoolBuildError|Failed to launch worker thread",  # tokenizers, pyarrow
            r"pthread_create failed|libgomp: Thread creation failed",
            rf"{_EXCEPTION}BlockingIOError: \[Errno 11\] Resource temporarily unavailable",
            r"Too many open files",
        ),
    ),
    Pattern(
        "configuration",
        2,
        "the folder for temporary files does not serve: programs may not run there (noexec), or"
        " its path is too long",
        "set TMPDIR to a folder with a short path on another mount (`export TMPDIR=/var/tmp`), or"
        " allow programs there: `mount -o remount,exec`",
        (
            # glibc 2.36 gives no reason; a lack of memory strikes big libraries first
            r"(inductor|triton|extensions)[/_](?!_C/)[^\s:]{0,300}: failed to map segment",
            r"failed to map segment from shared object: Operation not permitted",
            r"AF_UNIX path too long",
        ),
    ),
    Pattern(
        "configuration",
        2,
        "the user of the run has no name on this machine",
        "`export USER=me LOGNAME=me`; a container gets the names with `-v"
        " /etc/passwd:/etc/passwd:ro`",
        (rf"{_EXCEPTION}(KeyError: 'getpwuid|OSError: No username set in the environment)",),
    ),
    Pattern(
        "configuration",
        2,
        "BNB_CUDA_VERSION names a build of bitsandbytes that is not installed",
        "unset BNB_CUDA_VERSION",
        (r"Configured \w+ binary not found at",),
    ),
    Pattern(
        "host_oom",
        6,
        "the host ran out of memory",
        SMALLER,
        (
            rf"{_EXCEPTION}_?(Array)?MemoryError\b",
            rf"{_EXCEPTION}ArrowMemoryError\b",
            r"std::bad_alloc",
            r"Cannot allocate memory",  # also the end of DefaultCPUAllocator's
            r"OpenBLAS error: Memory allocation still failed",
            r"memory allocation of \d+ bytes failed",
            r"failed to map segment from shared object",
            # oneDNN's, which names no cause
            rf"{_EXCEPTION}RuntimeError: could not create a (primitive|memory)\b",
        ),
    ),
    Pattern(
        "disk",
        10,
        "the disk refused a write",
        "free space at the path that the error names, else where runs/ and output_dir are (`df -h`,"
        f" `df -i`, `quota`, `ulimit -f`), then {AGAIN}",
        (
            r"No space left on device",
            r"Disk quota exceeded",
            r"File too large",
            r"Read-only file system",
            rf"{_EXCEPTION}OSError: \[Errno 5\] Input/output error",
            # torch.save
            r"inline_container\.cc:\d+\] \. unexpected pos|PytorchStreamWriter failed writing file",
            r"SafetensorError: Error while serializing: I/?O ?error",
        ),
    ),
    Pattern(
        "disk",
        10,
        "a file or folder may not be opened by this user",
        "the proof names it: give it to the user of the run (`chown`, `chmod u+rwX`), or name"
        " another output_dir or model.path",
        (rf"{_EXCEPTION}PermissionError: \[Errno 13\]",),
    ),
    Pattern(
        "disk",
        10,
        "a network file system was lost under the run, or does not do what is asked of it",
        "see the server and its network; mount it again (`umount -l`, `mount`; NFS without locks:"
        f" `-o nolock`), or write elsewhere (output_dir, TMPDIR), then {AGAIN}",
        (
            r"Stale (NFS )?file handle",
            rf"{_EXCEPTION}(OS|BrokenPipe)Error: \[Errno (37|107|108|112|121|524)\] ",
            r"fcntl\.f?lockf?\(.*\s.{0,20}OSError: \[Errno (38|95)\] ",
            # error of a named file; without a name it may be a socket's
            rf"{_EXCEPTION}(OS|Timeout)Error: \[Errno (16|110)\] [\w ]+: '(?!\S*\.nfs)",
        ),
    ),
    Pattern(
        "weights",
        3,
        "a file of weights is cut short or damaged",
        "compare it with its source (`sha256sum`) and fetch it again; model.path and the proof say"
        " which it is",
        (rf"{_EXCEPTION}SafetensorError: Error while deserializing",),
    ),
    Pattern(
        "CheckpointError",
        5,
        "a file of the checkpoint holds more than tensors and plain values; nothing of it was run",
        "it is none that a run wrote: resume from another checkpoint (--resume FOLDER), and do not"
        " trust the folder where this one comes from",
        (
            r"Weights only load failed(?:[\s\S]{0,900}?"
            r"(?:WeightsUnpickler error|[Tt]rying to load unsupported))?",
        ),
    ),
    Pattern(
        "port",
        11,
        "another process holds the port at which the ranks meet",
        "end it (`ss -tlnp` names it), or give another one with --launch.main_process_port",
        (
            r"EADDRINUSE",
            r"Address already in use",
        ),
    ),
    Pattern(
        "join",
        11,
        "the name of a machine has no address",
        "see launch.main_process_ip, /etc/hosts and the name server (`getent hosts NAME`); an"
        " address in numbers needs neither",
        (rf"{_EXCEPTION}gaierror: \[Errno -\d+\]",),
    ),
    Pattern(
        "join",
        11,
        "the network interface that a variable names is not on this machine",
        "`ip -br addr` lists the interfaces: unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or"
        " name one of them on each machine",
        (r"Unable to find address for: |no socket interface found",),
    ),
    Pattern(
        "join",
        11,
        "the machines did not all join in time",
        "start the same line on every machine, each with its launch.machine_rank, and see that"
        " launch.main_process_port of machine 0 is reachable; launch.join_timeout_s says how long"
        " is waited",
        (
            r"DistStoreError: Timed out .* clients joined",
            r"client socket has timed out .* trying to connect to",
            r"client socket has failed to connect to any network address",
        ),
    ),
    Pattern(
        "configuration",
        2,
        "the recipe asks for what is not installed here, or for values that do not go together",
        "see the proof: change that key of the recipe, or install what it names (`python -m launch"
        " doctor` shows what is there); launch.mode and training.optim choose other ways",
        (
            r"Attempted to use bitsandbytes native library functionality",
            r"not available in CPU-only version of bitsandbytes",
            (
                r"undefined symbol: c(adam|quantize|get)\w*|has no attribute"
                r" 'c(adam|quantize|get_)\w+'"
            ),
            r"FlashAttention\d? has been toggled on, but it cannot be used",
            r"Check batch related parameters",
            r"validation errors? for DeepSpeed\w*Config",
            r"CUDA_HOME (does not exist|environment variable is not set)",
            (
                r"DeepSpeed JIT builder for|Unable to JIT load|Ninja is required to load C\+\+"
                r" extensions"
            ),
            r"\" not implemented for '\w+'",
        ),
    ),
    Pattern(
        "library",
        3,
        "a library is missing, or is not the one that others were built for",
        "install the pinned versions again: `pip install --force-reinstall -r requirements.txt`,"
        " and unset LD_LIBRARY_PATH; GLIBC comes with the system: there take a wheel built for an"
        " older one",
        (
            r"cannot open shared object file: No such file or directory$",
            r"version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found",
            r"undefined symbol: ",
            r"cuDNN version (incompatibility|mismatch)|CUDNN_STATUS_(SUBLIBRARY_)?VERSION_MISMATCH",
            rf"{_EXCEPTION}ModuleNotFoundError: No module named",
            rf"{_EXCEPTION}ImportError: cannot import name",
        ),
    ),
    Pattern(
        "device_oom",
        12,
        "a library of the GPU could not start, most often because GPU memory is short",
        SMALLER,
        (
            r"CUBLAS_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\W+when calling .?cublas\w*Create",
            r"(CUSOLVER_STATUS_INTERNAL_ERROR|cusolver error: 7)\W+when calling .?cusolverDnCreate",
            r"CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR",
        ),
        "consequence",
    ),
    Pattern(
        "library",
        3,
        "a library of the GPU refused or failed a call: mixed versions most often, else the driver"
        " or the card",
        "unset LD_LIBRARY_PATH and `pip install --force-reinstall -r requirements.txt`; `python -m"
        " launch doctor` tries the card; CUDA_LAUNCH_BLOCKING=1 shows which call it is",
        (
            r"\b(CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_[A-Z_]+",
            r"unable to find an engine to execute|No (valid )?execution plans",
        ),
        "consequence",
    ),
    Pattern(
        "library",
        3,
        "code for the GPU or the CPU cannot be compiled here, or a compiled kernel failed",
        "--training.torch_compile=false goes without it; or install what the log names: gcc and"
        " g++, Python's headers (python3-dev), triton, a newer ptxas (TRITON_PTXAS_PATH)",
        (
            r"fatal error: Python\.h: No such file",
            r"Failed to find C compiler|No working C\+\+ compiler found",
            r"libcuda\.so cannot found|cannot find -lcuda",
            r"(PTXAS error|Triton PTX codegen error|`ptxas` failed with error)",
            r"CppCompileError: |Cannot find a working triton installation",
            rf"{_EXCEPTION}CalledProcessError: Command '\[.{{0,80}}\b(gcc|cc|clang|g\+\+)\b",
            rf"{_EXCEPTION}(InductorError|BackendCompilerFailed): |torch\._dynamo\.exc\.\w+: ",
            r"Triton Error \[(CUDA|HIP)\]: ",
        ),
        "consequence",
    ),
    Pattern(
        "nccl",
        11,
        "NCCL or RCCL, the link between the GPUs, failed",
        "run `python -m launch doctor`, which tries the link and names what works; NCCL_DEBUG=WARN"
        " shows more, and --launch.mode=dual_gpu_gloo goes without it",
        (
            r"ncclUnhandledCudaError|unhandled cuda error",
            r"ncclSystemError|unhandled system error",
            (
                r"ncclInternalError: Internal check failed(?![\s\S]{0,90}(closed by remote"
                r" peer|Call to \w+ from \S+ failed))"
            ),
            r"ncclInvalidUsage|Duplicate GPU detected",
        ),
        "consequence",
    ),
    Pattern(
        "collective_timeout",
        11,
        "a rank did not reach a collective operation in time",
        "see ranks/*/stacks.txt and which rank is behind; where a rank is only slow (evaluation, a"
        " save), raise training.ddp_timeout",
        (
            r"Watchdog caught collective operation timeout",
            r"wait timeout after \d+ms, keys",
            r"timed out in blocking wait",
        ),
        "consequence",
    ),
    Pattern(
        "collective_timeout",
        11,
        "a call of NCCL or CUDA did not return, and torch's watchdog waited for it in vain",
        "see ranks/*/stacks.txt, and `dmesg` for Xids; where a rank is only slow, raise"
        " TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        (r"watchdog got stuck for|Heartbeat monitor timed out",),
        "consequence",
    ),
    Pattern(
        "network",
        11,
        "the ranks could not reach each other",
        f"{AGAIN}; if it repeats, train on one process with --launch.num_processes=1",
        (
            r"ncclRemoteError|remote process exited or there was a network error",
            r"Call to (recv|send)\w* (from|to) \S+ failed",
            r"connectFullMesh failed",
            r"Connection refused",
            r"Connection (was )?(closed|reset) by (remote )?peer",
            r"Timed out waiting .*ms for (recv|send)|Timed out waiting \d+ms",
            (
                r"DistNetworkError: Broken pipe|(sendBytes|recvValue|recvBytes) failed|failed to"
                r" recv, got 0 bytes"
            ),
        ),
        "consequence",
    ),
    Pattern(
        "collective_timeout",
        11,
        "an operation of NCCL failed or was not over in time",
        "see which rank is behind in ranks/*/stacks.txt; NCCL_DEBUG=WARN shows more",
        (r"Timeout at NCCL work|Some NCCL operations have failed or timed out",),
        "consequence",
    ),
)
