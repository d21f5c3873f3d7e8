"""Which of a model's copies an engine has: all (some of them maybe on hosts that join it), or those that another load balancer
has given it (hybrid, external).

Copies do not talk to one another, unless they share experts: nothing but their numbers has to fit together.
"""

import dataclasses
from typing import Any, TypeVar

from quire import envs
from quire.config.engine import read_eplb_config
from quire.engine.settings import EngineSettings
from quire.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound=EngineSettings)


@dataclasses.dataclass(frozen=True)
class CopiesHere:
    """`count` copies, numbered from `first`; so many of them, the last ones, are `elsewhere`: on hosts that join."""

    count: int
    first: int = 0
    elsewhere: int = 0

    @property
    def on_this_host(self) -> int:
        return self.count - self.elsewhere

    def shares_experts(self, args: EngineSettings) -> bool:
        """Whether the experts are divided among all copies."""
        return args.enable_expert_parallel and self.count > 1


def copies_of_nodes(args: SettingsT) -> SettingsT:
    """`nnodes` hosts of whole copies: in words of copies, with the first one as the head node.
    Raises ConfigError: there is no such host, or copies cannot be divided among them."""
    count, size = args.nnodes, args.data_parallel_size
    if args.node_rank >= count:
        raise ConfigError.of("node_rank", f"it is {args.node_rank}; with nnodes={count} it is below that.")
    if count == 1 or size == 1:
        return args
    if size % count:
        text = f"data_parallel_size={size} copies cannot be divided among {count} hosts: each has whole ones."
        raise ConfigError.of("nnodes", text)
    return dataclasses.replace(
        args,
        nnodes=1,
        node_rank=0,
        data_parallel_size_local=size // count,
        data_parallel_start_rank=args.node_rank * size // count or None,
        data_parallel_address=args.data_parallel_address or args.master_addr,
        data_parallel_rpc_port=args.data_parallel_rpc_port or args.master_port,
    )


def copies_here(args: EngineSettings) -> CopiesHere:
    """The copies of this engine, of `data_parallel_size` in all.

    Raises:
        ConfigError: settings of load balancing that contradict one another, or numbers beyond the size.
    """
    size, rank, local = args.data_parallel_size, args.data_parallel_rank, args.data_parallel_size_local
    start = args.data_parallel_start_rank
    if args.distributed_executor_backend == "external_launcher" and size > 1:
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        return CopiesHere(1, int(envs.foreign("RANK") or 0) // ranks % size)
    if args.data_parallel_external_lb or rank is not None:
        return _one_copy(args)
    if not args.data_parallel_hybrid_lb and start is None:
        here = size if local is None else local
        if here > size:
            raise _wrong("data_parallel_size_local", f"it is {here}, of data_parallel_size={size}")
        return CopiesHere(size, elsewhere=size - here)
    if local is None:
        raise _wrong(
            "data_parallel_size_local", "hybrid load balancing and headless hosts need it: how many copies are here"
        )
    first = start or 0
    if local < 1 or first + local > size:
        numbers = f"{local} copies from number {first} on are not among data_parallel_size={size}"
        raise _wrong("data_parallel_start_rank" if first else "data_parallel_size_local", numbers)
    return CopiesHere(local, first)


def parallel_settings(args: EngineSettings) -> dict[str, Any]:
    """The fields of `ParallelConfig` that tell of copies. Raises ConfigError, as `copies_here` does, and for hosts
    among which the ranks cannot be divided."""
    copies = copies_here(args)
    _check_nodes(args)
    return {
        "data_parallel_size": copies.count,
        "data_parallel_start": copies.first,
        "data_parallel_rank": 0,
        "copies_everywhere": args.data_parallel_size,
        "data_parallel_elsewhere": copies.elsewhere,
        "data_parallel_address": args.data_parallel_address or "127.0.0.1",
        "data_parallel_rpc_port": args.data_parallel_rpc_port or 29550,
        "eplb": read_eplb_config(
            args.enable_eplb,
            args.eplb_config,
            args.enable_expert_parallel and args.tensor_parallel_size * args.data_parallel_size > 1,
        ),
    }


def _check_nodes(args: EngineSettings) -> None:
    size, count = args.tensor_parallel_size * args.pipeline_parallel_size, args.nnodes
    if size % count:
        text = (
            f"tensor_parallel_size times pipeline_parallel_size is {size}, which cannot be divided among {count} hosts."
        )
        raise ConfigError.of("nnodes", text)
    if args.tensor_parallel_size % args.decode_context_parallel_size:
        text = f"it is {args.decode_context_parallel_size}, and no divisor of tensor_parallel_size={args.tensor_parallel_size}."
        raise ConfigError.of("decode_context_parallel_size", text)
    backend, parts = args.distributed_executor_backend, args.prefill_context_parallel_size
    if parts > 1 and (count > 1 or backend not in (None, "mp")):
        text = "ranks that share prompts are processes of one host: leave it out, or nnodes and distributed_executor_backend."
        raise ConfigError.of("prefill_context_parallel_size", text)
    if count == 1:
        return
    if args.distributed_executor_backend not in (None, "mp"):
        text = f"the ranks of several hosts are processes ('mp'), not {args.distributed_executor_backend!r}: leave one out."
        raise ConfigError.of("nnodes", text)


def _one_copy(args: EngineSettings) -> CopiesHere:
    size, rank = args.data_parallel_size, args.data_parallel_rank
    if args.data_parallel_hybrid_lb:
        raise _wrong("data_parallel_hybrid_lb", "it does not go with data_parallel_external_lb or data_parallel_rank")
    if rank is None:
        raise _wrong("data_parallel_rank", "data_parallel_external_lb needs it: the number of this engine's copy")
    if rank >= size:
        raise _wrong("data_parallel_rank", f"it is {rank}; with data_parallel_size={size} it is below that")
    if args.data_parallel_size_local not in (None, 1):
        raise _wrong("data_parallel_size_local", "an engine behind an external balancer has 1 copy")
    return CopiesHere(1, rank)


def _wrong(setting: str, text: str) -> ConfigError:
    return ConfigError(text if text.startswith("data_parallel") else f"{setting}: {text}", setting=setting)
