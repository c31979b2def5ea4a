"""Selects the operations for a model, by device, processor and configuration.

Owns the choice and the fallback. Must not know what is computed.
"""

from collections.abc import Callable
from typing import Any

import torch

from charonia.config import EngineArgs
from charonia.data.ops.base import Ops
from charonia.data.ops.composed import ComposedOps
from charonia.data.ops.native.build import (
    KernelsUnavailableError,
    choices_path,
    load_kernels,
    supported_isas,
)
from charonia.data.ops.native.ops import NativeOps
from charonia.data.ops.native.threads import ThreadLayout
from charonia.data.ops.native.tuning import Tuner
from charonia.data.ops.torch_ops import TorchOps
from charonia.errors import ConfigError


def select_ops(
    args: EngineArgs,
    dtype: torch.dtype,
    device: torch.device,
    log: Callable[[str], None],
    *,
    local_rank: int = 0,
    num_local_ranks: int = 1,
) -> Ops[Any]:
    """Choose the operations.

    Args:
        local_rank, num_local_ranks: this process's index among those that share the machine's
            cores, and their number.

    With cpu_kernels = 'auto', torch's operations are used if the kernels are not available, and the
    reason is logged.

    Raises:
        ConfigError: kernels that the configuration names are not available.
    """
    composed = ComposedOps(TorchOps(), args.quantization)
    if device.type != "cpu":
        return composed
    threads = ThreadLayout.of(args.cpu_threads, args.cpu_binding, local_rank, num_local_ranks)
    if args.cpu_kernels == "torch":
        torch.set_num_threads(threads.num_threads)
        log(f"computing with torch's operations, {threads.num_threads} threads")
        return composed
    problem = NativeOps.obstacle(dtype, args.block_size)
    isas = supported_isas()
    if args.cpu_kernels != "auto":
        if args.cpu_kernels not in isas:
            problem = f"this processor has no {args.cpu_kernels}; it has {', '.join(isas)}"
        isas = [args.cpu_kernels]
    for isa in isas if problem is None else []:
        try:
            kernels = load_kernels(isa, log)
        except KernelsUnavailableError as error:
            problem = problem or str(error)
        else:
            if problem:
                log(f"warning: the CPU kernels for {isas[0]} cannot be used: {problem}")
            log(f"computing with the CPU kernels for {isa}, {threads}")
            tuner = Tuner(kernels, choices_path(isa), log)
            return NativeOps(kernels, threads, args.quantization, tuner=tuner)
    if args.cpu_kernels != "auto":
        raise ConfigError(f"cpu_kernels = {args.cpu_kernels!r} cannot be used: {problem}")
    log(
        "warning: the CPU kernels cannot be used, torch's operations are, which are slower:"
        f" {problem}"
    )
    torch.set_num_threads(threads.num_threads)
    return composed
