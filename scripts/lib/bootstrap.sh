# shellcheck shell=bash
# Sets and exports PYTHON, the interpreter that runs lowmem; makes or renews $ROOT/.venv when that is needed.
#
#   ROOT=/the/repository; source "$ROOT/scripts/lib/bootstrap.sh"; exec "$PYTHON" ...
#
# From the user: PYTHON=... is used instead of .venv, after a check; LOWMEM_DEV=1 installs requirements-dev.txt;
# LOWMEM_REQUIRE_HASHES=1 installs requirements.lock, and no file whose hash is not in it. LOWMEM_TORCH=rocm|cu126|...
# puts that build of torch into .venv; .venv.torch remembers it for later starts. Without it a new .venv gets the build
# for the CPU where there is no sign of a card, else what the package index gives. See docs/cards.md.
# Messages go to stderr, pip's to .venv/install.log; a shortage ends the caller with exit code 3, like launch's ResourceError.

_lowmem_say() { printf 'lowmem: %s\n' "$*" >&2; }
_lowmem_die() { _lowmem_say "$*"; exit 3; }

# default: what the package index gives; the others are folders of PyTorch's own index, or of a mirror that
# LOWMEM_TORCH_INDEX names.
LOWMEM_TORCH_BUILDS=(default cpu cu126 cu130 rocm)
_LOWMEM_TORCH_INDEX="${LOWMEM_TORCH_INDEX:-https://download.pytorch.org/whl}"
_LOWMEM_ROCM=rocm7.2 # of the version of torch in requirements.txt
_LOWMEM_TORCH_PIN="(^|"$'\n'")torch==([0-9.]+)"
_LOWMEM_LAST_LINES=15 # of the log, shown after a failure

_lowmem_sha256() {
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi
}

# Whether the user has chosen a build of torch, now or before.
_lowmem_torch_chosen() { [[ -n "${LOWMEM_TORCH:-}" || -e "$ROOT/.venv.torch" ]]; }

# Prints the build of torch that .venv is to have: LOWMEM_TORCH, else the remembered one, else the one that was chosen
# for lack of a card when this .venv was made, unless hashes are required, else default.
_lowmem_torch_wanted() {
    local word="${LOWMEM_TORCH:-}" from=LOWMEM_TORCH build
    if [[ -z "$word" && -r "$ROOT/.venv.torch" ]]; then
        from="$ROOT/.venv.torch"
        IFS= read -r word <"$from" || :
    fi
    if [[ "${LOWMEM_REQUIRE_HASHES:-}" != 1 ]] && ! _lowmem_torch_chosen && [[ -r "$ROOT/.venv/.lowmem-torch" ]]; then
        from="$ROOT/.venv/.lowmem-torch"
        { IFS= read -r word && IFS= read -r build && [[ "$build" == automatic ]]; } <"$from" || word=''
    fi
    for build in "${LOWMEM_TORCH_BUILDS[@]}"; do
        [[ "${word:-default}" != "$build" ]] || { printf '%s\n' "$build"; return; }
    done
    _lowmem_die "$from says $word; expected one of ${LOWMEM_TORCH_BUILDS[*]}"
}

# Prints the build of torch that .venv has.
_lowmem_torch_there() {
    local word=''
    [[ ! -r "$ROOT/.venv/.lowmem-torch" ]] || IFS= read -r word <"$ROOT/.venv/.lowmem-torch" || :
    printf '%s\n' "${word:-default}"
}

# What LOWMEM_TORCH says, kept for starts without it.
_lowmem_remember_torch() {
    local word=''
    [[ -n "${LOWMEM_TORCH:-}" ]] || return 0
    [[ ! -r "$ROOT/.venv.torch" ]] || IFS= read -r word <"$ROOT/.venv.torch" || :
    [[ "$word" == "$LOWMEM_TORCH" ]] ||
        { printf '%s\n' "$LOWMEM_TORCH" >"$ROOT/.venv.torch.new" && mv "$ROOT/.venv.torch.new" "$ROOT/.venv.torch"; } ||
        _lowmem_die "cannot write $ROOT/.venv.torch"
}

# Hash of what a start installs: requirements.txt, and requirements-cuda.txt where it is.
_lowmem_run_hash() {
    local text cuda=''
    text="$(<"$ROOT/requirements.txt")" || return 1
    [[ ! -r "$ROOT/requirements-cuda.txt" ]] || cuda="$(<"$ROOT/requirements-cuda.txt")"
    _lowmem_sha256 <<<"$text$cuda"
}

# .venv/.lowmem-requirements: hash of _lowmem_run_hash, hash of requirements-dev.txt or -, Python's version, the file
# that .venv/bin/python must still lead to (an upgrade of the system's Python leaves a .venv without packages).
_lowmem_ready() {
    local venv="$ROOT/.venv" run_hash='' dev_hash='' base='' wanted
    [[ -x "$venv/bin/python" && -r "$venv/.lowmem-requirements" ]] || return 1
    { read -r run_hash && read -r dev_hash && read -r && IFS= read -r base; } <"$venv/.lowmem-requirements" || return 1
    [[ "$venv/bin/python" -ef "$base" ]] || return 1
    wanted="$(_lowmem_run_hash)" || return 1
    [[ "${wanted%% *}" == "$run_hash" ]] || return 1
    [[ "$(_lowmem_torch_there)" == "$LOWMEM_TORCH_WANTED" ]] || return 1
    [[ "${LOWMEM_DEV:-}" == 1 ]] || return 0
    wanted="$(_lowmem_sha256 <"$ROOT/requirements-dev.txt")" || return 1
    [[ "${wanted%% *}" == "$dev_hash" ]]
}

# Asks an interpreter (any, down to Python 2) for "version has-ensurepip real-path"; -I: nothing from the user's folder.
_lowmem_describe() {
    "$1" -I -c 'import os, sys
try:
    import ensurepip, venv
    pip = "pip"
except ImportError:
    pip = "no-pip"
print("%d.%d.%d %s %s" % (sys.version_info[:3] + (pip, os.path.realpath(sys.executable))))' </dev/null 2>/dev/null
}

# _lowmem_minor 3.12.1 -> 12; 0 for every major version but 3, and for what is no version
_lowmem_minor() {
    if [[ "$1" =~ ^3\.([0-9]+) ]]; then echo "${BASH_REMATCH[1]}"; else echo 0; fi
}

# Prints the base interpreter for .venv: the first on PATH that is 3.11 to 3.13, for which every wheel exists, else the
# first that is newer.
_lowmem_find_base() {
    local name path told version pip minor seen=() newer='' without_pip=''
    for name in python3 python3.13 python3.12 python3.11 python; do
        while IFS= read -r path; do
            told="$(_lowmem_describe "$path")" || continue # such as pyenv's stand-in for a version that is switched off
            read -r version pip _ <<<"$told"
            seen+=("$path is $version")
            minor="$(_lowmem_minor "$version")"
            if ((minor < 11)); then
                continue
            elif [[ "$pip" != pip ]]; then
                without_pip="${without_pip:-$path ($version)}"
            elif ((minor <= 13)); then
                printf '%s\n' "$path"
                return
            else
                newer="${newer:-$path}"
            fi
        done < <(type -aP "$name")
    done
    if [[ -n "$newer" ]]; then
        printf '%s\n' "$newer"
    elif [[ -n "$without_pip" ]]; then
        _lowmem_die "$without_pip cannot make a virtual environment: its venv or ensurepip module is missing;" \
            "install it (Debian, Ubuntu: apt install python3-venv), or set PYTHON to a Python that has the packages"
    else
        local list='no Python'
        ((${#seen[@]} == 0)) || list="$(printf '%s, ' "${seen[@]}")"
        _lowmem_die "needs Python 3.11, 3.12 or 3.13; found on PATH: ${list%, };" \
            "install one of them, or set PYTHON=/path/to/python"
    fi
}

# Locks file 9, which this shell keeps open; the kernel frees it when the last process that has it ends, in any way.
_lowmem_lock() { # [-n]: fail instead of waiting
    local python
    if command -v flock >/dev/null; then
        flock "$@" 9
    else # macOS has none
        python="$(_lowmem_find_base)" || exit $?
        "$python" -I -c 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if "-n" in sys.argv else 0))
except BlockingIOError:
    sys.exit(1)' "$@"
    fi
}

# Runs its arguments while no other start does; a subshell, so that file 9 and the lock end with it.
_lowmem_with_lock() (
    umask u=rwx
    trap 'exit 130' INT # pip makes an ordinary failure of it
    trap 'exit 143' TERM
    exec 9>"$ROOT/.venv.lock" || _lowmem_die "cannot write $ROOT/.venv.lock"
    if ! _lowmem_lock -n; then
        _lowmem_say "another start is installing into $ROOT/.venv; waiting for it"
        _lowmem_lock || _lowmem_die "cannot lock $ROOT/.venv.lock"
    fi
    "$@"
)

# Whether there is a card of NVIDIA or AMD, or a sign of a driver: also under WSL2 and on a Jetson, which have none on the
# PCI bus. Ends the start if the torch that the package index gives, for NVIDIA cards and CUDA 13, cannot compute on it:
# before gigabytes are downloaded.
_lowmem_sees_card() {
    local system="${LOWMEM_SYSTEM_ROOT:-}" device='' vendor='' kind='' vram='' amd='' line='' driver='' nvidia='' sign=''
    for device in "$system"/proc/driver/nvidia "$system"/dev/{nvidia[0-9]*,nvidiactl,nvhost-gpu,nvgpu,kfd,dxg} \
        "$system"/usr/lib/wsl/lib/libcuda.so*; do
        [[ ! -e "$device" ]] || sign="$device"
    done
    if [[ -r "$system/proc/driver/nvidia/version" ]]; then
        IFS= read -r line <"$system/proc/driver/nvidia/version" || :
        [[ ! "$line" =~ Module.*[[:space:]]([0-9]+)\.[0-9.]+[[:space:]] ]] || driver="${BASH_REMATCH[1]}"
    fi
    if [[ -n "$driver" ]] && ((driver < 525)); then
        _lowmem_die "the NVIDIA driver here is $driver; torch needs 580 or newer (its build for CUDA 12.6: 525 or newer)." \
            "Update the driver, or start again with LOWMEM_TORCH=cpu to train on the CPU"
    elif [[ -n "$driver" ]] && ((driver < 580)); then
        _lowmem_die "the NVIDIA driver here is $driver, and the torch that the package index gives needs 580 or newer." \
            "Start again with LOWMEM_TORCH=cu126 (remembered), whose CUDA 12.6 this driver serves, or update the driver;" \
            "LOWMEM_TORCH=default installs that torch all the same"
    fi
    for device in "$system"/sys/bus/pci/devices/*; do
        [[ -r "$device/vendor" && -r "$device/class" ]] || continue
        { IFS= read -r vendor <"$device/vendor" && IFS= read -r kind <"$device/class"; } || continue
        [[ "$vendor" == 0x10de || "$vendor" == 0x1002 ]] && [[ "$kind" == 0x03* || "$kind" == 0x12* ]] || continue
        sign="$device"
        [[ "$vendor" != 0x10de || "$kind" != 0x03* ]] || nvidia="$device"
        [[ "$vendor" == 0x1002 && ("$kind" == 0x03* || "$kind" == 0x12*) ]] || continue
        vram=''
        [[ ! -r "$device/mem_info_vram_total" ]] || IFS= read -r vram <"$device/mem_info_vram_total" || :
        # up to 4 GiB it is taken for graphics built into a processor, as in launch/probe/gpu_signs.py
        [[ ! "$vram" =~ ^[0-9]+$ ]] || ((vram <= 4 << 30)) || amd="PCI ${device##*/}, $((vram >> 30)) GiB"
    done
    if [[ -n "$amd" && -z "$nvidia$driver" ]]; then
        _lowmem_die "an AMD card is here ($amd), and the torch that the package index gives is for NVIDIA cards." \
            "Start again with LOWMEM_TORCH=rocm (remembered); LOWMEM_TORCH=cpu trains on the CPU," \
            "LOWMEM_TORCH=default installs that torch all the same"
    fi
    [[ -n "$sign" ]]
}

# Makes .venv where there is none, or a broken or half-made one; then brings its packages to requirements.txt.
# `.lowmem-installing` stands in it until the stamp is written: who finds it makes an interrupted .venv anew.
_lowmem_install() {
    local venv="$ROOT/.venv" requirements="$ROOT/requirements.txt" base told version real run_hash dev_hash=- made='' how=()
    local torch pin='' build=() automatic='' release='' words
    # again: the start that we waited for may have done it, with a build that it chose
    LOWMEM_TORCH_WANTED="$(_lowmem_torch_wanted)" || exit $?
    ! _lowmem_ready || return 0
    torch="$LOWMEM_TORCH_WANTED"
    told="$(_lowmem_describe "$venv/bin/python")" || told=''
    read -r version _ real <<<"$told"
    if [[ -e "$venv/.lowmem-installing" || -z "$version" ]] || _lowmem_python_changed "$real"; then made=1; fi
    [[ ! -r "$ROOT/requirements.txt" || ! "$(<"$ROOT/requirements.txt")" =~ $_LOWMEM_TORCH_PIN ]] ||
        release="${BASH_REMATCH[2]}"
    if ! _lowmem_torch_chosen; then
        if [[ -n "$made" ]]; then
            torch=default
            _lowmem_sees_card || [[ -z "$release" || "${LOWMEM_REQUIRE_HASHES:-}" == 1 || "$OSTYPE" != linux* ]] || torch=cpu
        fi
        [[ "$torch" == default ]] || automatic=automatic
    fi
    # Triton is for the builds of torch that bring it
    [[ "$torch" == cpu || "$torch" == rocm || "$OSTYPE" != linux* || ! -r "$ROOT/requirements-cuda.txt" ]] ||
        requirements="$ROOT/requirements-cuda.txt"
    [[ "${LOWMEM_DEV:-}" != 1 ]] || requirements="$ROOT/requirements-dev.txt"
    if [[ "${LOWMEM_REQUIRE_HASHES:-}" == 1 ]]; then
        [[ "${LOWMEM_DEV:-}" != 1 ]] || _lowmem_die "requirements.lock holds no hashes of requirements-dev.txt;" \
            "unset LOWMEM_DEV or LOWMEM_REQUIRE_HASHES"
        [[ "$torch" == default ]] || _lowmem_die "requirements.lock holds no hashes of the $torch build of torch;" \
            "unset LOWMEM_REQUIRE_HASHES, or set LOWMEM_TORCH=default"
        requirements="$ROOT/requirements.lock" how=(--require-hashes)
    fi
    [[ -r "$requirements" ]] || _lowmem_die "$requirements is missing: is this a whole copy of the repository?"
    if [[ "$torch" != default ]]; then
        [[ -n "$release" ]] ||
            _lowmem_die "$ROOT/requirements.txt pins no torch, whose $torch build LOWMEM_TORCH asks for"
        pin="${torch/rocm/$_LOWMEM_ROCM}"
        # alone, and the other packages after it: PyTorch's index is asked for torch and its libraries only
        build=("torch==$release+$pin" --extra-index-url "$_LOWMEM_TORCH_INDEX/$pin" -c "$ROOT/requirements.txt")
    fi

    if [[ -n "$made" ]]; then
        base="$(_lowmem_find_base)" || exit $?
        read -r version _ <<<"$(_lowmem_describe "$base")"
        _lowmem_say "making $venv with $base ($version) and installing ${requirements##*/} into it" \
            "${pin:+with torch for $pin }(this happens once and can take some minutes)"
        [[ -z "$automatic" ]] || _lowmem_say "no card and no driver of one is here, so this torch computes on the CPU only;" \
            "LOWMEM_TORCH=default ./scripts/install.sh installs the one for NVIDIA cards, rocm instead of default the one for AMD cards"
        # emptied, not replaced: .venv may be a link to a larger disk; -m venv itself refuses a link
        { mkdir -p "$venv" && : >"$venv/.lowmem-installing"; } || _lowmem_die "cannot write to $venv"
        find "$venv/" -mindepth 1 ! -name .lowmem-installing -delete || _lowmem_die "cannot empty $venv"
        "$base" -I -m venv "$(cd -P -- "$venv" && pwd)" >&2 ||
            _lowmem_die "$base -m venv failed; the reason stands above"
    else
        (($(_lowmem_minor "$version") >= 11)) ||
            _lowmem_die "$venv is Python $version, 3.11 or newer is needed; remove it and start again"
        if [[ "$(_lowmem_torch_there)" != "$torch" ]]; then
            _lowmem_say "installing torch for $torch (before: $(_lowmem_torch_there)) into $venv; this happens once"
        else
            _lowmem_say "installing ${requirements##*/}, which is new or has changed, into $venv (Python $version);" \
                "this happens once"
        fi
        : >"$venv/.lowmem-installing" || _lowmem_die "cannot write to $venv"
        "$venv/bin/python" -I -c 'import pip' 2>/dev/null || # uv makes a .venv without it
            "$venv/bin/python" -I -m ensurepip >&2 || _lowmem_die "$venv has no pip; remove it and start again"
    fi
    : >"$venv/install.log" || _lowmem_die "cannot write to $venv"
    rm -f "$venv/.lowmem-requirements"

    # hashed before: a file that is edited meanwhile differs from the stamp and is installed at the next start
    run_hash="$(_lowmem_run_hash)" || _lowmem_die "needs sha256sum or shasum on PATH"
    [[ "${LOWMEM_DEV:-}" != 1 ]] || dev_hash="$(_lowmem_sha256 <"$requirements")"
    # without its libraries, which requirements.txt names: an index that does not answer costs half a minute, not ten
    if [[ -n "$automatic" ]]; then
        _lowmem_phase "installing torch for the CPU" \
            _lowmem_pip_install --no-deps --timeout 15 --retries 1 "${build[@]}" || {
            _lowmem_say "$_LOWMEM_TORCH_INDEX/$pin does not give torch $release for the CPU, so the package index's torch" \
                "is installed, which may be larger; LOWMEM_TORCH_INDEX=URL names a mirror"
            torch=default automatic='' pin=''
        }
        build=()
    fi
    words="installing ${requirements##*/} ($(_lowmem_count_pins "$requirements") packages"
    if [[ -n "$made" && -n "$release" && "$torch" == default ]]; then words="$words, up to 3 GB to fetch"; fi
    if [[ -n "$made" && "$torch" == cpu ]]; then words="$words, 1.7 GB on the disk"; fi
    words="$words)"
    if ! _lowmem_install_torch "$torch" ${build[@]+"${build[@]}"} ||
        ! _lowmem_phase "$words" _lowmem_pip_install ${how[@]+"${how[@]}"} -r "$requirements"; then
        _lowmem_show_end
        # an update that pip itself gave up has changed nothing: the packages of before stay, whatever the network does
        [[ -n "$made" ]] || rm -f "$venv/.lowmem-installing"
        _lowmem_die "pip could not install ${requirements##*/}${pin:+ with torch for $pin}; the reason stands above," \
            "all that pip wrote in $venv/install.log;" \
            "${build[0]:+see that $_LOWMEM_TORCH_INDEX/$pin can be reached; }the next start tries again"
    fi
    printf '%s\n' "$torch" $automatic >"$venv/.lowmem-torch" || _lowmem_die "cannot write to $venv"

    # aside, then renamed: a stamp is whole or absent
    read -r version _ real <<<"$(_lowmem_describe "$venv/bin/python")"
    {
        printf '%s\n' "${run_hash%% *}" "${dev_hash%% *}" "$version" "$real" >"$venv/.lowmem-requirements.new" &&
            mv "$venv/.lowmem-requirements.new" "$venv/.lowmem-requirements"
    } || _lowmem_die "cannot write to $venv"
    rm -f "$venv/.lowmem-installing"
}

# Prints the number of packages that a file of requirements pins, with those of the file that it includes.
_lowmem_count_pins() {
    local line='' count=0 file
    for file in "$1" "$ROOT/requirements.txt"; do
        while IFS= read -r line || [[ -n "$line" ]]; do
            [[ ! "$line" =~ ^[A-Za-z0-9._-]+== ]] || count=$((count + 1))
        done <"$file"
        [[ "$1" == */requirements-*.txt ]] || break
    done
    printf '%s\n' "$count"
}

# _lowmem_phase WORDS COMMAND...: runs it with its output in install.log; one line says what it does and how long it took.
_lowmem_phase() {
    local words="$1" began=$SECONDS status=0 ending="done"
    shift
    printf 'lowmem: %s; its output is in %s ... ' "$words" "$ROOT/.venv/install.log" >&2
    "$@" >>"$ROOT/.venv/install.log" 2>&1 || status=$?
    ((status == 0)) || ending=failed
    printf '%s in %d s\n' "$ending" "$((SECONDS - began))" >&2
    return "$status"
}

# Shows the last lines of install.log.
_lowmem_show_end() {
    local line='' lines=() first
    while IFS= read -r line || [[ -n "$line" ]]; do lines+=("$line"); done <"$ROOT/.venv/install.log"
    first=$((${#lines[@]} > _LOWMEM_LAST_LINES ? ${#lines[@]} - _LOWMEM_LAST_LINES : 0))
    ((${#lines[@]} == 0)) || printf '  %s\n' "${lines[@]:first}" >&2
}

_lowmem_pip() { "$ROOT/.venv/bin/python" -I -m pip --disable-pip-version-check --no-input "$@"; }

# pip install with these arguments. triton and triton-rocm write the same files: where one came beside the other, both go
# and the one that this build of torch needs is installed again.
_lowmem_pip_install() {
    local name='' files=() there=()
    _lowmem_pip install --no-user "$@" || return 1
    for name in triton triton_rocm pytorch_triton_rocm; do
        files=("$ROOT"/.venv/lib/python*/site-packages/"$name"-*.dist-info)
        [[ ! -e "${files[0]}" ]] || there+=("$name")
    done
    ((${#there[@]} > 1)) || return 0
    _lowmem_pip uninstall --yes "${there[@]}" && _lowmem_pip install --no-user "$@"
}

# A build of torch ($1), by pip's arguments; without any the package index's, which comes with the other packages unless
# another is there: to pip that one is the pinned version as well. Nothing to do where it is there.
_lowmem_install_torch() {
    local words="installing torch for $1" torch="$1"
    shift
    if (($# > 0)); then
        _lowmem_phase "$words" _lowmem_pip_install "$@"
    elif [[ "$torch" != default || "$(_lowmem_torch_there)" == default ]]; then
        return 0
    elif [[ "${LOWMEM_REQUIRE_HASHES:-}" == 1 ]]; then # requirements.lock brings it back, by its hash
        _lowmem_phase "removing torch for $(_lowmem_torch_there)" _lowmem_pip uninstall --yes torch
    elif [[ "$(<"$ROOT/requirements.txt")" =~ $_LOWMEM_TORCH_PIN ]]; then
        _lowmem_phase "$words" \
            _lowmem_pip install --no-user --force-reinstall --no-deps "torch==${BASH_REMATCH[2]}" -c "$ROOT/requirements.txt"
    fi
}

# Whether a .venv that we stamped leads to another Python ($1) now, whose packages are elsewhere.
_lowmem_python_changed() {
    local base=''
    [[ -r "$ROOT/.venv/.lowmem-requirements" ]] || return 1
    { read -r && read -r && read -r && IFS= read -r base; } <"$ROOT/.venv/.lowmem-requirements" || return 0
    [[ "$base" != "$1" ]]
}

# Checks the user's own PYTHON. Its packages are the user's too: that the big ones are there, not which versions.
_lowmem_check_given() {
    local given="$PYTHON" told version
    PYTHON="$(type -P -- "$given")" || _lowmem_die "PYTHON=$given: no such program"
    [[ "$PYTHON" == /* ]] || PYTHON="$PWD/$PYTHON"
    told="$("$PYTHON" -c 'import sys
sys.path = [path for path in sys.path if path]
print("%d.%d.%d" % sys.version_info[:3])
if sys.version_info >= (3, 11):
    from importlib.util import find_spec
    modules = "torch", "transformers", "accelerate", "pydantic", "yaml", "psutil", "rich", "pyarrow"
    print(" ".join(name for name in modules if find_spec(name) is None))' </dev/null)" ||
        _lowmem_die "PYTHON=$given does not run Python code; unset PYTHON to let lowmem make its own .venv"
    version="${told%%$'\n'*}"
    (($(_lowmem_minor "$version") >= 11)) ||
        _lowmem_die "PYTHON=$given is Python $version, 3.11 or newer is needed; unset PYTHON or name a newer one"
    [[ "$told" != *$'\n'* ]] ||
        _lowmem_die "PYTHON=$given lacks ${told#*$'\n'}; install them ($given -m pip install -r requirements.txt)," \
            "or unset PYTHON to let lowmem make its own .venv"
}

if [[ -n "${PYTHON:-}" ]]; then
    _lowmem_check_given
    [[ -z "${LOWMEM_TORCH:-}" || "$PYTHON" -ef "$ROOT/.venv/bin/python" ]] ||
        _lowmem_say "PYTHON=$PYTHON is used as it is: LOWMEM_TORCH changes .venv only"
else
    LOWMEM_TORCH_WANTED="$(_lowmem_torch_wanted)" || exit $?
    _lowmem_ready || _lowmem_with_lock _lowmem_install || exit $?
    _lowmem_remember_torch
    PYTHON="$ROOT/.venv/bin/python"
fi
export PYTHON PYTHONUTF8="${PYTHONUTF8:-1}" # text files are UTF-8, whatever the locale of a cron job says
