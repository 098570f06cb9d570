"""What `enginepool doctor` looks at, and what it concludes for each way of using the pool."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from enginepool import __version__
from enginepool.errors import ConfigError
from enginepool.host.folders import exposed, written_by_others
from enginepool.host.kernel_caches import DEFAULT_PLACES, size_of
from enginepool.net.address import STATE_DIR, default_address, is_in_use

GB = 1e9
#: What the coordinator and the sim engine import.
CORE = ("msgspec", "numpy", "psutil", "pyzmq", "uvloop")
#: What a real engine imports, by the names under which it is imported.
ENGINE = ("sglang", "torch", "triton", "transformers", "tokenizers", "compressed_tensors", "xgrammar")
#: What SGLang needs of images. On a CPU it gets a stand-in.
IMAGES = "torchvision"
#: The first and the last version of SGLang that is supported.
SGLANG_OLDEST, SGLANG_NEWEST = "0.5.17", "0.5.23"
#: Memory of one engine with a tiny model on a CPU: the host, its scheduler and its detokenizer.
CPU_ENGINE_BYTES = 1.4 * GB
#: A socket for each client and worker, and what an engine opens.
FILES = 1024
#: Packages are imported by a process of its own, which must not outlast the user's patience.
PROBE_S = 90.0
#: Imports the packages that it is given, says why one cannot be, and asks torch for GPUs. An image package that cannot be
#: imported is hidden from the others, as it is from an engine on a CPU.
_PROBE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
errors, cuda, devices = {}, "", []
def attempt(name, act):
    try:
        return act()
    except BaseException as error:
        lines = str(error).strip().splitlines()
        errors[name] = f"{type(error).__name__}: {lines[0] if lines else ''}"
        sys.modules[name] = None
for name in sys.argv[1:]:
    attempt(name, lambda: importlib.import_module(name))
torch = sys.modules.get("torch")
def find():
    return [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
if torch is not None:
    devices = [(one.name, one.total_memory) for one in attempt("torch", find) or []]
    cuda = torch.version.cuda or ""
print(json.dumps({"errors": errors, "cuda": cuda, "devices": devices}))
"""


class CheckResult(msgspec.Struct, frozen=True):
    """One thing that was looked at. `note` is neither good nor bad by itself."""

    what: str
    state: Literal["good", "bad", "note"]
    said: str


class Verdict(msgspec.Struct, frozen=True):
    """Whether one use is possible here, and what is missing where it is not."""

    use: str
    can: bool
    said: str


class DoctorChecks(msgspec.Struct, frozen=True):
    """Everything that was found, and the verdicts: coordinator, sim engine, real engine on the CPU, real engine on GPUs."""

    version: str
    findings: list[CheckResult]
    verdicts: list[Verdict]


class Probe(msgspec.Struct):
    """What a process that imported packages found.

    Attributes:
        errors: why those packages that cannot be imported cannot be.
        cuda: torch's CUDA version.
        devices: name and bytes of each GPU that torch can use.
    """

    errors: dict[str, str] = {}
    cuda: str = ""
    devices: list[tuple[str, int]] = []


def verify(caches: Sequence[str] = ()) -> DoctorChecks:
    """Look at this machine. Takes some ten seconds where SGLang is installed: what is reported as good has been imported.

    `caches`: the folders in which kernels that were compiled are kept; none: those that libraries choose by themselves.
    """
    python = sys.version_info >= (3, 11)
    cores = len(os.sched_getaffinity(0))
    installed = [name for name in (IMAGES, *ENGINE) if find_spec(name) is not None]
    found = probe(installed)
    gpus = found.devices or _driver_gpus()
    available, total = _memory()
    findings = [
        CheckResult("Python", "good" if python else "bad", f"{platform.python_version()} ({sys.executable})"),
        CheckResult("system", "note", f"{platform.system()} {platform.machine()}, {cores} CPU cores to use"),
        *(_core_package(name) for name in CORE),
        *(_engine_package(name, found.errors) for name in (*ENGINE[:4], IMAGES)),
        _gpus(found, gpus),
        CheckResult("memory", "note", f"{available / GB:.1f} of {total / GB:.1f} GB available"),
        *(_disk(), *kernel_caches(caches), _shm(), _files(), endpoint()),
    ]
    bad = [finding.what for finding in findings if finding.state == "bad"]
    why_not = f"missing: {', '.join(bad)}" if bad else ""
    missing = why_not or _missing_engine(installed, found.errors)
    images = "" if IMAGES in installed and IMAGES not in found.errors else f"{IMAGES} cannot be imported or is not installed"
    fits = int(available // CPU_ENGINE_BYTES)
    if missing:
        on_cpu = f"{missing}; `make demo` in a clone of the project sets it up"
    else:
        on_cpu = f"up to {fits} workers with tiny models in this memory" if fits else "less than 1.4 GB of memory"
    verdicts = [
        Verdict("coordinator", not why_not, why_not or "needs no torch and no GPU"),
        Verdict("engine sim", not why_not, why_not or "scores by a cost model, without torch: for dry runs"),
        Verdict("real engine, CPU", not missing and fits > 0, on_cpu),
        Verdict(
            "real engine, GPU",
            bool(found.devices) and not (missing or images),
            _gpu_verdict(gpus, missing or images, bool(found.devices)),
        ),
    ]
    return DoctorChecks(__version__, findings, verdicts)


def _missing_engine(installed: Sequence[str], errors: Mapping[str, str]) -> str:
    """Why SGLang cannot run here, even on a CPU, or ""."""
    if absent := [name for name in ENGINE if name not in installed]:
        return f"not installed: {', '.join(absent)}"
    if useless := [name for name in ENGINE if name in errors]:
        return f"cannot be imported: {', '.join(useless)}"
    if not supported(version := version_of("sglang") or ""):
        return f"sglang {version} is not supported: {SGLANG_OLDEST} to {SGLANG_NEWEST} are"
    return ""


def _gpu_verdict(gpus: Sequence[tuple[str, int]], missing: str, usable: bool) -> str:
    if not gpus:
        return "no NVIDIA GPU found"
    if missing:
        return f"{missing}; pip install 'enginepool[sglang]'"
    if not usable:
        return "this torch cannot use CUDA; pip install 'enginepool[sglang]' in a fresh environment brings one that can"
    return f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: one worker each"


def version_of(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _core_package(name: str) -> CheckResult:
    version = version_of(name)
    if version is None:
        return CheckResult(name, "bad", f"not installed: pip install {name}")
    return CheckResult(name, "good", version)


def supported(version: str) -> bool:
    """Whether this version of SGLang is one of those that were tested."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    ends = [tuple(map(int, end.split("."))) for end in (SGLANG_OLDEST, SGLANG_NEWEST)]
    return found is not None and ends[0] <= tuple(map(int, found.groups())) <= ends[1]


def probe(names: Sequence[str]) -> Probe:
    """Import these packages one after the other, in a process of its own."""
    command = [sys.executable, "-c", _PROBE, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return Probe(dict.fromkeys(names, f"the import of {', '.join(names)} took over {PROBE_S:.0f} s"))
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Probe(dict.fromkeys(names, f"the process that imported {', '.join(names)} ended: {last}"))
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Probe)


def _engine_package(name: str, broken: Mapping[str, str]) -> CheckResult:
    version = version_of(name)
    if find_spec(name) is None:
        said = "not installed; an engine on a CPU does without" if name == IMAGES else "not installed"
        return CheckResult(name, "note", said)
    if name in broken:
        instead = f"; an engine on a CPU does without: pip uninstall {name}" if name == IMAGES else ""
        return CheckResult(name, "note", f"{version}, but it cannot be imported: {broken[name]}{instead}")
    if name == "sglang":
        which = f"{SGLANG_OLDEST} to {SGLANG_NEWEST}"
        if not supported(version or ""):
            return CheckResult(name, "note", f"{version} is not supported: {which} are")
        return CheckResult(name, "good", f"{version} (supported: {which})")
    return CheckResult(name, "good", version or "")


def _gpus(found: Probe, gpus: Sequence[tuple[str, int]]) -> CheckResult:
    if found.devices:
        size = min(nbytes for _, nbytes in gpus) / GB
        return CheckResult("GPUs", "good", f"{len(gpus)} x {gpus[0][0]}, {size:.0f} GB (torch's CUDA {found.cuda})")
    if gpus:
        return CheckResult("GPUs", "note", f"{len(gpus)} x {gpus[0][0]} (by nvidia-smi; torch cannot use them)")
    return CheckResult("GPUs", "note", "none that torch can use, and none by nvidia-smi")


def _driver_gpus() -> list[tuple[str, int]]:
    """The NVIDIA GPUs that the driver knows, by name; their bytes are not asked for."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        asked = [program, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return []
    return [(line.strip(), 0) for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _memory() -> tuple[int, int]:
    """Bytes available and in all, on this machine or in the container that holds this process, whichever is less."""
    machine = psutil.virtual_memory()
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        most = int(text)
        return min(machine.available, max(most - int(used.read_text()), 0)), min(machine.total, most)
    return machine.available, machine.total


def _disk() -> CheckResult:
    try:
        state = Path(STATE_DIR).expanduser()
    except RuntimeError as error:  # no HOME, and a user of no name
        return CheckResult("state directory", "bad", f"{error}; set state_dir in pool.toml")
    stands = next(path for path in (state, *state.parents) if path.exists())
    if not os.access(stands, os.W_OK):
        return CheckResult("state directory", "bad", f"{state}: {stands} cannot be written; set state_dir in pool.toml")
    free = shutil.disk_usage(stands).free
    return CheckResult("state directory", "good" if free > 0.1 * GB else "bad", f"{state}, {free / GB:.1f} GB free")


def kernel_caches(folders: Sequence[str]) -> list[CheckResult]:
    """A line for each folder in which compiled kernels are kept."""
    if folders:
        return [_kernel_cache(Path(os.path.expanduser(folder))) for folder in dict.fromkeys(folders)]
    found = [Path(os.path.expanduser(folder)) for folder in DEFAULT_PLACES]
    return [_kernel_cache(folder) for folder in found if folder.is_dir()] or [CheckResult("kernel cache", "note", "none yet")]


def _kernel_cache(folder: Path) -> CheckResult:
    stands = next(path for path in (folder, *folder.parents) if path.exists())
    said = f"{folder}, {size_of(folder) / GB:.1f} GB in it, {shutil.disk_usage(stands).free / GB:.1f} GB free"
    try:
        why = written_by_others(folder)
    except OSError as error:
        why = f"{stands}: {error.strerror}"
    if why:
        return CheckResult("kernel cache", "note", f"{said}; engines run what lies there, and {why}")
    if not os.access(stands, os.W_OK) or not stands.is_dir():
        return CheckResult("kernel cache", "note", f"{said}; {stands} cannot be written: engines may not start with it")
    return CheckResult("kernel cache", "good", said)


def _shm() -> CheckResult:
    path = Path("/dev/shm")
    if not path.is_dir():
        return CheckResult("/dev/shm", "note", "does not exist; engines on several GPUs need it")
    total = shutil.disk_usage(path).total
    few = total < GB
    said = f"{total / GB:.1f} GB" + ("; engines on several GPUs want 1 GB (docker: --shm-size)" if few else "")
    return CheckResult("/dev/shm", "note" if few else "good", said)


def _files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < FILES
    said = f"{_limit(soft)} (can be raised to {_limit(hard)})"
    return CheckResult(
        "open files", "note" if few else "good", said + (f"; ulimit -n {FILES} or more is better" if few else "")
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def endpoint() -> CheckResult:
    """Whether a pool can listen on the default endpoint: an ipc socket in a directory of this user alone."""
    try:
        listen = default_address()
    except ConfigError as error:
        return CheckResult("default endpoint", "note", str(error))
    folder = Path(listen.removeprefix("ipc://")).parent
    try:
        if why := exposed(folder) if folder.exists() else "":
            return CheckResult("default endpoint", "note", f"{listen}: {why}")
    except OSError:
        return CheckResult("default endpoint", "good", f"{listen} is free")
    if is_in_use(listen):
        return CheckResult("default endpoint", "note", f"{listen}: in use; is a pool running? (enginepool status)")
    return CheckResult("default endpoint", "good", f"{listen} is free")
