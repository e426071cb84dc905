"""The Accelerator of every script, on the requested device, processes and threads."""

import os
import resource
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator, PartialState
from accelerate.commands.config import config_args
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.environment import (
    check_launcher,
    launcher_command,
    launcher_number,
    launcher_option,
    processes_here,
    under_launcher,
    usable_cores,
    world_size,
)
from gpt2_ddp.distributed.peers import connect
from gpt2_ddp.distributed.ranks import COLLECTIVE, let_wait
from gpt2_ddp.errors import UserError

USE_TORCHRUN = (
    "use `torchrun --nproc_per_node {n} SCRIPT` or"
    " `accelerate launch --multi_gpu --num_processes {n} SCRIPT`"
)


class UnusedOption(NamedTuple):
    """An option of Accelerate's launcher that only its plugins read."""

    harmless: tuple[str, ...]  # values that ask for nothing
    hint: str  # what to set instead


UNUSED_OPTIONS = {
    "gradient_accumulation_steps": UnusedOption(
        ("1", "auto"),
        "set --train.global_batch_tokens and --train.micro_batch_size,"
        " from which the accumulation follows",
    ),
    "gradient_clipping": UnusedOption(("auto", "none"), "set --optim.grad_clip"),
}
UNUSED_PLUGINS = (
    "USE_FSDP",
    "USE_DEEPSPEED",
    "USE_MEGATRON_LM",
    "DYNAMO_BACKEND",
    "USE_PARALLELISM_CONFIG",
)
"""Variables ACCELERATE_... of plugins that a training here does not use."""


def start_run(config: RunConfig) -> PartialState:
    """Connects the processes of a training run, deterministic if configured. Raises UserError as
    `connect_processes`; also for a missing tracker package, and for ranks that cannot connect."""
    train = config.train
    for name in config.tracking.log_with:
        if find_spec(name) is None:
            hint = f"is not installed; `pip install {name}`, or remove it"
            raise UserError("tracking.log_with", name, hint)
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    start = partial(
        connect_processes,
        train.device,
        train.mixed_precision,
        section="train.",
        backend=config.backend,
    )
    if world_size() == 1:
        processes = start()
    else:
        processes = connect(start, train.patience_seconds)
        let_wait(dist.group.WORLD)
    if str(processes.device).startswith("cuda") and not train.deterministic:
        torch.set_float32_matmul_precision("high")  # TF32 where autocast does not reach
    return processes


def build_accelerator(
    device: str = "auto", mixed_precision: str = "auto", timeout: timedelta = COLLECTIVE
) -> Accelerator:
    """The Accelerator of every script but trainings. Raises UserError as `connect_processes`; also
    for ranks that cannot connect, unless the script has a `timeout` of its own."""
    start = partial(connect_processes, device, mixed_precision)
    if world_size() == 1 or timeout != COLLECTIVE:
        start(timeout=timeout)
    else:
        connect(start, None)
        everyone: Any = dist.group.WORLD
        everyone.set_timeout(timeout)
    return make_accelerator(pick_precision(mixed_precision, pick_device(device)))


def connect_processes(
    device: str,
    mixed_precision: str,
    *,
    section: str = "",
    backend: str = "auto",
    timeout: timedelta = COLLECTIVE,
) -> PartialState:
    """Connects this process to the others.

    Args:
        device: as `pick_device`, whose messages begin with `section`.
        mixed_precision: as `pick_precision`.
        backend: of the process group: auto (nccl between GPUs, gloo between CPU processes), nccl or
            gloo.
        timeout: of collectives of the default group.

    Raises:
        UserError: fewer processes than requested; an unavailable device, precision or plugin; a
            launcher's variable that is not a number.
    """
    check_launcher()
    started = world_size()
    asked = processes_asked_for()
    allow_open_files()
    if started < asked:
        hint = f"only {started} started, which would train alone; " + USE_TORCHRUN.format(n=asked)
        raise UserError("processes", asked, hint)
    target = pick_device(device, section)
    _check_environment(target, backend)
    pick_precision(mixed_precision, target, section)
    if target.type == "cpu":
        set_cpu_threads()
    # without `cpu`, CPU ranks stay unconnected
    chosen = None if backend == "auto" else backend
    processes = PartialState(cpu=target.type == "cpu", timeout=timeout, backend=chosen)
    if processes.num_processes != started:
        hint = f"only {processes.num_processes} connected; " + USE_TORCHRUN.format(n=started)
        raise UserError("processes", started, hint)
    device_of_accelerate = cast(torch.device, processes.device)
    if device_of_accelerate.type != target.type:
        problem = f"by ACCELERATE_TORCH_DEVICE, but this command uses {target.type}"
        hint = f"{problem}; unset the variable, or choose its device"
        raise UserError(f"{section}device", device_of_accelerate, hint)
    return processes


def make_accelerator(precision: str) -> Accelerator:
    """The Accelerator of the connected processes, with their device, in `no`, `bf16` or `fp16`."""
    # torch 2.13 has a new name for this setting, 2.11 only the old one
    warnings.filterwarnings(
        "ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning
    )
    return Accelerator(
        mixed_precision=precision,
        # the environment cannot override it
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=False, even_batches=False, non_blocking=True
        ),
        rng_types=[],
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        ],
    )


def allow_open_files() -> None:
    """Raises the soft limit of open files to the hard one: a rank has connections to all others."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def pick_device(name: str, section: str = "") -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `mps`. Raises UserError: the device is not
    available, or `auto` finds a visible NVIDIA device that CUDA cannot use."""
    field = f"{section}device"
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true") and name == "auto":
        name = "cpu"
    if name == "auto":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
        if not available["cuda"] and visible and any(Path("/dev").glob("nvidia[0-9]*")):
            problem = "an NVIDIA device is present but CUDA cannot use it"
            hint = f"check the driver and torch's build ({torch.__version__}), or say --{field} cpu"
            raise UserError(field, "auto", f"{problem}; {hint}")
        name = next(kind for kind, is_available in available.items() if is_available)
    if not available.get(name):
        hint = f"is not available in torch {torch.__version__} here; use auto or cpu"
        raise UserError(field, name, hint)
    return torch.device(name)


def processes_asked_for() -> int:
    """Number of processes that the user requested from the launcher, as far as known; at least 1.
    Raises UserError: a launcher's variable is not a number."""
    env = os.environ
    sizes = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    asked = [*map(launcher_number, sizes)]
    # Kubeflow; torchrun reads PET_*, accelerate does not
    per_node = env.get("PET_NPROC_PER_NODE", "")
    asked.append(launcher_number("PET_NNODES") * (int(per_node) if per_node.isdecimal() else 1))
    # Accelerate starts one with `--cpu --num_processes 2`
    if "WORLD_SIZE" not in env and under_launcher():
        given = launcher_option("num.processes") or str(_accelerate_file().get("num_processes", 1))
        asked.append(int(given) if given.isdecimal() else 1)
    return max(asked)


def _accelerate_file() -> dict[str, Any]:
    """The answers of `accelerate config` that the `accelerate launch` above this process read:
    those in its --config_file or, unless it has --cpu, in Accelerate's default file. Empty
    without."""
    words = launcher_command()
    if not any(Path(word).name.startswith("accelerate") for word in words):
        return {}
    file = launcher_option("config.file")
    if not file and "--cpu" not in words:
        file = config_args.default_config_file
    if not file or not Path(file).is_file():
        return {}
    answers = yaml.safe_load(Path(file).read_text(encoding="utf-8"))  # JSON is YAML
    return cast(dict[str, Any], answers) if isinstance(answers, dict) else {}


def _check_environment(target: torch.device, backend: str) -> None:
    """Raises UserError for too many processes per GPU, nccl without GPUs, or settings of Accelerate
    that would change nothing here."""
    if target.type == "cuda" and processes_here() > torch.cuda.device_count():
        hint = f"more than the {torch.cuda.device_count()} GPUs of this machine; start one per GPU"
        raise UserError("processes", processes_here(), hint)
    if backend == "nccl" and target.type != "cuda":
        hint = f"needs CUDA devices, not {target.type}; use gloo or auto"
        raise UserError("launch.backend", "nccl", hint)
    for plugin in UNUSED_PLUGINS:
        value = os.environ.get(f"ACCELERATE_{plugin}", "").lower()
        if value not in ("", "no", "false"):
            hint = "this training does not use it; answer no in `accelerate config`"
            raise UserError(f"ACCELERATE_{plugin}", value, hint)
    for option, (harmless, hint) in UNUSED_OPTIONS.items():
        variable = f"ACCELERATE_{option.upper()}"
        if variable in os.environ:
            name = variable
            value = os.environ[variable]
        else:
            name = f"--{option}"
            value = launcher_option(option.replace("_", ".")) if under_launcher() else ""
        if value not in ("", *harmless):
            raise UserError(name, value, f"of `accelerate launch` changes nothing here; {hint}")


def pick_precision(name: str, target: torch.device, section: str = "") -> str:
    """`no`, `bf16` or `fp16`; for `auto` the precision of `accelerate launch`, else bf16 on GPUs
    that have it. `fast`: bf16 on these GPUs; on CPUs it stays `fast`, which `distributed.precision`
    replaces. Raises UserError if it is not available."""
    on_gpu = "bf16" if target.type == "cuda" and multiplies_bf16(target) else "no"
    precision = name
    if name == "auto":
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", on_gpu)
    elif name == "fast" and target.type != "cpu":
        precision = on_gpu
    if precision == "fp16" and target.type != "cuda":
        hint = f"needs a CUDA device, not {target.type}; use bf16 or no"
        raise UserError(f"{section}mixed_precision", "fp16", hint)
    if precision not in ("no", "bf16", "fp16", "fast"):
        raise UserError(f"{section}mixed_precision", precision, "use no, bf16 or fp16")
    return precision


def multiplies_bf16(target: torch.device) -> bool:
    """Whether a device computes in bf16 in a bf16 training: GPUs that have instructions for it, and
    CPUs."""
    if target.type == "cuda":  # a plan may be for GPUs of another machine
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(
            including_emulation=False
        )
    return target.type == "cpu"


def set_cpu_threads() -> None:
    """Divides the cores among this machine's processes, unless OMP_NUM_THREADS is set. Launchers
    set it to 1: under a launcher, 1 counts as unset."""
    given = os.environ.get("OMP_NUM_THREADS")
    if not given or (given == "1" and under_launcher()):
        threads = max(usable_cores() // processes_here(), 1)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # or Accelerate would choose a number, too
