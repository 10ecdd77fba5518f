"""Many runs: which are done, what is left, several at once. A run has one folder, whichever table asks for it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from .config import Config, available_cores, configure
from .errors import ConfigError, UserError
from .runs import OF_NO_CONSEQUENCE, Result, load_result, run_or_resume

ON_A_GPU = 8  # processes that share one: as many as were measured to help (docs/gpu.md)
# imported once for all runs, which takes more seconds than a small run has
PRELOADED = [__name__, "fedhpro.use", "fedhpro.report.curves", "torch._dynamo", "torch.utils.flop_counter"]
PRELOADED += ["matplotlib.figure", "matplotlib.backends.backend_agg"]
MPS_PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
Say = Callable[[Config, str], None]  # "finished", "interrupted", or a sentence that says what was wrong


def fingerprint(config: Config) -> str:
    """The same for two configs whose runs have the same numbers, also where a later version has more keys."""
    usual = configure(method=config.method, data=config.data).flat()
    keys = {name: value for name, value in config.flat().items() if value != usual[name] or name in ("method", "data")}
    told = {name: value for name, value in keys.items() if name not in OF_NO_CONSEQUENCE | {"out"}}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def placed(config: Config, store: Path) -> Config:
    """In its folder of the store; a thousand runs keep one checkpoint each."""
    folder = store / f"{config.method}-{config.data.replace('/', '-')}-seed{config.seed}-{fingerprint(config)}"
    return config.model_copy(update={"out": str(folder), "keep_checkpoints": 1})


def found_in_place(config: Config) -> Result | None:
    """The run in its folder, finished or not; None also where that is a run of another config."""
    with contextlib.suppress(OSError, ValueError, UserError):
        result = load_result(Path(config.out))
        return result if fingerprint(result.config) == fingerprint(config) else None
    return None


def is_done(config: Config) -> bool:
    result = found_in_place(config)
    return result is not None and result.status == "finished"


def how_many(engine: str, wanted: int | None) -> int:
    """Runs at once: one per core, or a few on a GPU."""
    if wanted is not None and wanted > ON_A_GPU and engine == "cuda":
        raise ConfigError(f"--parallel {wanted}: at most {ON_A_GPU} runs share a GPU")
    return wanted or (4 if engine == "cuda" else available_cores())


def gpu_share(runs: int) -> tuple[int, int] | None:
    """Of several runs that share a GPU through MPS: the per cent of it that each may use, and its slots. None: all.

    Convolutions are timed on what a process may use. On a small part the fastest is the one with the least work; on
    the whole it is the one that spreads best, which is of no use when others want the rest (docs/gpu.md has numbers).
    """
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if runs < 4 or MPS_PERCENT in os.environ or not Path(pipes, "control").exists():
        return None
    return min(100, 144 // runs), max(2, 16 // runs)


def use_of_gpu(percent: int | None) -> None:
    """Set in a run's own process before CUDA starts, which reads it."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # a GPU has a limited number of them for all processes
    if percent is not None:
        os.environ[MPS_PERCENT] = str(percent)


def run_all(configs: Sequence[Config], parallel: int, say: Say) -> bool:
    """Run what is not done, each run in a process of its own with one torch thread; `say` hears how each ended.

    False after Ctrl-C: runs in progress have saved their last whole round by then, and the same call goes on with them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ways = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in ways else "spawn")
    if "forkserver" in ways:
        multiprocessing.set_forkserver_preload(PRELOADED)
    running: dict[int, tuple[multiprocessing.process.BaseProcess, Config, Connection]] = {}

    def collect(sentinel: int) -> None:
        process, config, answer = running.pop(sentinel)
        process.join()
        try:
            status = answer.recv()
        except EOFError:  # killed, for want of memory perhaps
            status = f"its process ended with exit code {process.exitcode}"
        answer.close()
        say(config, status)

    waiting = [config for config in configs if not is_done(config)][::-1]
    share = gpu_share(min(parallel, len(waiting)))
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                config = waiting.pop()
                if config.engine == "cpu":
                    config = config.model_copy(update={"workers": 0})
                elif config.engine == "cuda" and share and config.workers is None:
                    config = config.model_copy(update={"workers": share[1]})
                answer, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_in_process, args=(config, theirs, share))  # type: ignore[attr-defined]
                process.start()
                theirs.close()
                running[process.sentinel] = (process, config, answer)
            for sentinel in wait(list(running)):
                collect(sentinel)  # type: ignore[arg-type]
        return True
    except KeyboardInterrupt:
        for process, _, _ in running.values():
            process.terminate()
        for sentinel in list(running):
            collect(sentinel)
        return False


def _in_process(config: Config, answer: Connection, share: tuple[int, int] | None = None) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the first passes it on
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    use_of_gpu(share[0] if share else None)
    answer.send(_outcome(config))


def _outcome(config: Config) -> str:
    try:
        return run_or_resume(config).status
    except KeyboardInterrupt:  # outside of its rounds
        return "interrupted"
    except UserError as error:
        return str(error)
    except Exception as error:  # a mistake in one run is no reason to lose the others
        return f"{type(error).__name__}: {error}"
