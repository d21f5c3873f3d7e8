"""The worker: one device's side of the engine. Makes the model runner, divides memory, sleeps and wakes.

Knows its platform and configuration. Leaves steps to the model runner.
"""

import concurrent.futures
import dataclasses
import gc
import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec
from quire.config.kv_transfer import KV_CONNECTORS
from quire.core.output import ModelRunnerOutput, SchedulerOutput, Turn
from quire.distributed.communicator import SingleRank
from quire.distributed.store_group import CopiesGroup, open_prompt_group
from quire.errors import ConfigError, EngineError, RequestError
from quire.kernels import ops
from quire.layers.decoder import Decoder
from quire.logger import init_logger
from quire.media import MediaItem
from quire.platforms.interface import Platform
from quire.plugins.registry import import_class
from quire.sampling_params import SamplingParams
from quire.timeline import STARTUP
from quire.worker.expert_balancing import ExpertBalancing
from quire.worker.kv_budget import compute_kv_bytes
from quire.worker.parked_weights import pool_of
from quire.worker.runner import PendingStep, Runner
from quire.worker.shared_steps import SharedSteps

if TYPE_CHECKING:
    from quire.distributed.stage_link import StageLink
    from quire.worker.page_connector import KVConnectorWorker
    from quire.worker.profiling import StepProfiler
    from quire.worker.weight_update import WeightUpdates

logger = init_logger(__name__)
GIB = 1 << 30


class Worker:
    """Owns the device runtime, the model and its pages.

    Call in this order: constructor, `load_model`, `kv_cache_specs` and `available_kv_bytes`, `initialize`, `execute`.
    """

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        self.config = config
        self.platform = platform
        with STARTUP.phase("device"):
            self.runtime = platform.runtime(config)
        with STARTUP.phase("imports"):
            platform.select_kernels(deterministic=config.model.deterministic)
        self._communicator = platform.communicator(config)
        if config.parallel.prefill_context_parallel_size > 1:
            self._communicator = self._communicator or SingleRank()
            self._communicator.prompts = open_prompt_group(config.parallel, self.runtime.device())
        if (copies := config.parallel.sharing) is not None:
            self._communicator = self._communicator or SingleRank()
            sizes = config.parallel.tensor_parallel_size, config.parallel.rank
            self._communicator.copies = CopiesGroup(copies, *sizes, self.runtime.device())
        self._link: StageLink | None = None
        if config.parallel.pipeline_parallel_size > 1:
            link_class = import_class(platform.stage_link_class(), "device")
            self._link = link_class(config.parallel, self.runtime.device())
        self._connector: KVConnectorWorker | None = None
        if config.kv_transfer is not None:
            halves = KV_CONNECTORS[config.kv_transfer.kv_connector]
            self._connector = import_class(halves.worker, "kv_transfer_config")(config, self.runtime)
        self._free_at_start, self._total = self.runtime.memory_info()
        self._runner: Runner | None = None
        self.sleep_pool = pool_of(self.runtime)
        self._kv_cache: KVCacheConfig | None = None
        self._balancing: ExpertBalancing | None = None
        self._shared: SharedSteps | None = None
        self._timings: dict[str, float] = {}
        self._profiler: StepProfiler | None = None
        self._weight_updates: WeightUpdates | None = None

    @property
    def runner(self) -> "Runner":
        """The model runner.

        Raises:
            EngineError: the weights were dropped (sleep level 2), or never loaded.
        """
        if self._runner is None:
            raise EngineError("the worker has no model: wake_up() first")
        return self._runner

    def load_model(self) -> None:
        """Build the model and read its weights."""
        begin = time.perf_counter()
        with STARTUP.phase("imports"):
            runner_class = import_class(self.platform.runner_class(), "device")
        with self.sleep_pool.allocating("weights"):
            runner: Runner = runner_class(self.config, self.platform, self.runtime, self._communicator)
        self._see_mixtures(runner)
        runner.link, runner.connector, self._runner = self._link, self._connector, runner
        if self._connector is not None:
            self._connector.see_model(runner.model)
        self._timings["load_s"] = time.perf_counter() - begin
        logger.info("Model loaded in %.2f s", self._timings["load_s"])

    def _see_mixtures(self, runner: Runner) -> None:
        copies = None if self._communicator is None else self._communicator.copies
        mixtures = list(runner.model.mixtures()) if isinstance(runner.model, Decoder) else []
        if self.config.parallel.eplb is not None:
            self._balancing = ExpertBalancing(self.config.parallel.eplb, mixtures, self.runtime)
        if copies is not None:
            self._shared = SharedSteps(copies, mixtures, self.runtime.device())

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One a layer."""
        return self.runner.kv_cache_specs()

    def available_kv_bytes(self) -> int:
        """What is left for pages: the named size, or a share of the memory that was free, less everything else.

        Raises:
            ConfigError: nothing is left; the message has the numbers.
        """
        free, total = self.runtime.memory_info()
        untouched = self.runner.untouched_bytes() + (self._connector.device_bytes if self._connector else 0)
        available = compute_kv_bytes(self.config, free, untouched, self.kv_cache_specs(), self.runtime.kv_cache_cap())
        if available <= 0:
            share = self.config.cache.gpu_memory_utilization
            raise ConfigError(
                f"no memory is left for the KV cache: {free / GIB:.2f} GiB of {total / GIB:.2f} GiB are free beside the "
                f"weights, gpu_memory_utilization={share} allows {free * share / GIB:.2f} GiB of them, and buffers need "
                f"{untouched / GIB:.2f} GiB{self._of_adapters()}; lower max_num_batched_tokens or max_num_seqs, or use a smaller "
                "model",
                setting="gpu_memory_utilization",
            )
        return available

    def _of_adapters(self) -> str:
        if self.config.lora is None:
            return ""
        reserved = self.runner.adapters.reserved_bytes / GIB
        return f" ({reserved:.2f} GiB of them for adapters, as max_loras and max_lora_rank say)"

    def least_of_ranks(self, number: int) -> int:
        """The smallest number that one of the ranks gives, which all call this."""
        if self._communicator is None:
            return number
        mine = torch.tensor([number], device=self.runtime.device())
        numbers = mine.new_empty(self._communicator.size, 1)
        self._communicator.all_gather(mine, numbers)
        return int(numbers.min())

    def initialize(self, kv_cache: KVCacheConfig) -> None:
        """Allocate the pages, record the step and run it once.

        Raises:
            MemoryError: the device has no room for so many pages, because somebody else took it since it was measured.
        """
        begin = time.perf_counter()
        if self.runner.has_pages:  # another rank had no room for as many
            self.runner.free_pages()
        try:
            with STARTUP.phase("pages and first steps"):
                self._allocate(kv_cache)
        except torch.OutOfMemoryError as error:
            if self.runner.has_pages:
                self.runner.free_pages()
            raise MemoryError(str(error).splitlines()[0]) from None
        self._kv_cache = kv_cache
        self.runtime.started()
        self._timings["initialize_s"] = time.perf_counter() - begin

    def _allocate(self, kv_cache: KVCacheConfig) -> None:
        with self.sleep_pool.allocating("pages"):
            self.runner.allocate(kv_cache)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | PendingStep:
        """Run one step, or submit it to a device that works beside the host."""
        if self._shared is None:
            return self._execute(step)
        self._shared.begin(Turn.COMPUTES, num_tokens=step.total_num_tokens)
        result = self._execute(step)
        self._shared.finish(is_computed=True)
        return result

    def take_part(self, turn: int, num_calls: int) -> bool:
        """Take a step together with other copies, which share experts, and without requests of its own; see `SharedSteps`.
        Whether this copy may leave them behind it."""
        assert self._shared is not None
        is_computed, may_leave = self._shared.begin(Turn(turn), num_calls)
        if self._balancing is not None and is_computed:
            self._balancing.begin_step()
        self._shared.finish(is_computed)
        return may_leave

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput | PendingStep:
        if self._balancing is not None:
            self._balancing.begin_step()
        if self._profiler is None:
            return self.runner.execute(step)
        with self._profiler.step(step):
            return self.runner.execute(step)

    def start_profile(self, prefix: str = "", overrides: dict[str, int] | None = None) -> str | None:
        """Profile from the next step on; `overrides` replaces fields of the configuration.

        Returns why that is not possible; None where it is.
        """
        config = self.config.observability.profiler
        if config is None:
            return "profiles are off: set profiler_config"
        if self._profiler is not None:
            return "a profile is being taken already: stop it first"
        from quire.worker.profiling import StepProfiler

        rank = 0 if self._communicator is None else self._communicator.rank
        name = f"{prefix or 'quire'}-rank{rank}-{time.time_ns() // 1_000_000}"
        self._profiler = StepProfiler(dataclasses.replace(config, **(overrides or {})), self.runtime, name)
        return None

    def stop_profile(self) -> dict[str, str | None]:
        """End the profile: `file` is the trace that was written, `problem` why there is none."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return {"file": None, "problem": "no profile is being taken: start one first"}
        return {"file": profiler.stop(), "problem": None}

    def adopt_thread(self) -> None:
        """The calling thread is going to wait for steps' results."""
        self.runtime.adopt_thread()

    def bandwidth(self) -> float:
        """Bytes a second of the device's own memory, measured now; 0 where the host measures its own."""
        return self.runtime.bandwidth() or 0.0

    def waited_seconds(self) -> float:
        """How long the host has waited for results of the device so far."""
        return self.runner.waited_seconds

    def is_prepared(self, params: SamplingParams) -> bool:
        """Whether a step may have such a request at once."""
        return self.runner.is_prepared(params)

    def prepare(self, params: SamplingParams) -> "concurrent.futures.Future[Any]":
        """Have what such a request needs compiled in other threads; ends when it is, well or not."""
        return _all_of(self.runner.prepare(params))

    def load_adapter(self, adapter: LoRARequest, slot: int) -> "concurrent.futures.Future[None]":
        """Have an adapter loaded in another thread into a place that no row has; the future's error says why it cannot be."""
        return self.runner.adapters.store.load(adapter, slot)

    def embeds_widths(self) -> dict[str, int]:
        """Columns of embeddings that may stand in a prompt, by modality."""
        return self.runner.embeds_widths

    def list_adapters(self) -> list[int]:
        """The numbers of adapters that are kept on the host."""
        return self.runner.adapters.store.kept_ids()

    def forget_adapter(self, lora_id: int) -> bool:
        """Keep no adapter of this number on the host; whether there was one."""
        return self.runner.adapters.store.forget(lora_id)

    def fetch_pages(self, request_id: str, names: list[bytes]) -> "concurrent.futures.Future[None]":
        """Have a request's pages brought to the host beside the steps, by the connector."""
        assert self._connector is not None
        return self._connector.fetch(request_id, names)

    def encodes_beside(self) -> bool:
        """Whether `encode_media` computes beside the steps, and plans may depend on when it ends."""
        is_launched = self.config.parallel.distributed_executor_backend == "external_launcher"
        return self.runner.encodes_beside and not is_launched

    def encode_media(self, items: list[MediaItem]) -> "concurrent.futures.Future[None]":
        """Have embeddings computed beside the steps; ends when they are, or when only the step that needs them can."""
        return self.runner.encode_media(items)

    def write_random_adapter(
        self, folder: str, rank: int, seed: int = 0, targets: list[str] | None = None, scale: float = 0.1
    ) -> int:
        """Write an adapter of random numbers for this model, as PEFT would save it; how many matrices it changes."""
        return self.runner.adapters.write_random(folder, rank, seed, targets or [], scale)

    def prepare_to_serve(self, wait: bool = False) -> None:
        """Begin, in other threads, what the first request of a kind would wait for; or wait until it is done."""
        if self._runner is not None:
            self._runner.prepare_to_serve(wait)

    def idle(self) -> bool:
        """No step is in flight: prepare something for later; whether there is more to prepare."""
        return self._runner is not None and self._runner.idle()

    def sleep(self, level: int = 1) -> None:
        """Give memory back. Level 0 drops the pages; level 1 also moves weights that a device has in memory of its own to the
        host; level 2 drops them. Requests must have ended before."""
        if level not in (0, 1, 2):
            raise ValueError(
                f"sleep level={level} must be 0 (drop the KV cache), 1 (and park the weights) or 2 (and drop them)"
            )
        pool = self.sleep_pool
        self.runner.drop_adapters()
        self.runner.free_pages()
        if level == 2:
            self._runner = None
        elif level == 1:
            pool.park(self.runner.weights)
        gc.collect()  # rows, buffers and graphs refer to one another
        pool.discard("pages")
        if level == 2:
            pool.discard("weights")
        if self._communicator is not None:
            self._communicator.suspend()
        self.runtime.release_unused()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`; `tags` may name only `weights` or `kv_cache`, to wake in two steps."""
        unknown = set(tags or ()) - {"weights", "kv_cache"}
        if unknown:
            raise ValueError(f"wake_up tags {sorted(unknown)} are unknown: use 'weights' and 'kv_cache'")
        if self._communicator is not None:
            self._communicator.resume()
        if tags is None or "weights" in tags:
            if self._runner is None:
                self.load_model()
            else:
                self.sleep_pool.restore()
        if (tags is None or "kv_cache" in tags) and self._kv_cache is not None and not self.runner.has_pages:
            self._allocate(self._kv_cache)

    # New weights: the core calls these, and sees to it that no step is computed meanwhile.

    @property
    def _updates(self) -> "WeightUpdates":
        if self._weight_updates is None:
            from quire.worker.weight_update import WeightUpdates

            self._weight_updates = WeightUpdates(self.config, self.platform, self.runtime.device())
        return self._weight_updates

    def connect_trainer(self, info: dict[str, Any] | None) -> None:
        """Join a trainer's group (`InitInfo`); None: leave it."""
        if info is None:
            self._updates.close()
        else:
            self._updates.connect(info)

    def begin_update(self) -> None:
        """Tensors of a trainer are going to come."""
        self._updates.begin(self.runner)

    def check_tensors(self, info: dict[str, Any]) -> None:
        """Whether these (`UpdateInfo`) could be taken; nothing changes."""
        self._updates.check(info)

    def take_tensors(self, info: dict[str, Any]) -> None:
        """Take tensors that were checked."""
        self._updates.take(self.runner, info)

    def finish_update(self) -> None:
        """All have come."""
        self._updates.finish(self.runner)
        self.runner.drop_adapters(is_base_new=True)

    def check_folder(self, path: str | None) -> None:
        """Whether the weights of a folder (None: the model's own) fit; nothing changes."""
        self._updates.check_reload(self.runner, path)

    def read_folder(self, path: str | None) -> None:
        """Read all weights from it."""
        self.config = self._updates.reload(self.runner, path)
        self.runner.drop_adapters(is_base_new=True)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> list[str]:
        """Write this rank's finished weights (`model_loader/sharded_state.py`); returns the files' names."""
        parallel = self.config.parallel
        if parallel.eplb is not None or parallel.sharing is not None:
            what = "enable_eplb" if parallel.eplb is not None else "copies that share experts"
            raise RequestError(
                f"with {what} a rank's experts are not those of a checkpoint: leave it out", param="path"
            )
        from quire.model_loader.loader import save_sharded_state

        return save_sharded_state(self.runner.model, self.config, path, pattern, max_size)

    def explain(self) -> dict[str, Any]:
        """What was chosen and why."""
        report: dict[str, Any] = {
            "platform": self.platform.name,
            "device_name": self.platform.device_name(),
            "device": str(self.runtime.device()),
            "kernels": ops.explain(),
            "memory": {"free_at_start": self._free_at_start, **self.runtime.memory_stats()},
            "timings": dict(self._timings),
        }
        if self._runner is not None:
            report |= self._runner.explain()
        return report

    def shutdown(self) -> None:
        """Release everything; may be called twice."""
        if self._connector is not None:
            self._connector.shutdown()
        if self._weight_updates is not None:
            self._weight_updates.close()
        if self._runner is not None:
            self._runner.stop()
        self.runtime.close()
        if self._runner is not None:
            self._runner.join()
        self._runner = None
        if self._link is not None:
            self._link.shutdown()
        if self._communicator is not None:
            for group in (self._communicator.copies, self._communicator.prompts, self._communicator):
                if group is not None:
                    group.shutdown()


def _all_of(futures: "list[concurrent.futures.Future[Any]]") -> "concurrent.futures.Future[Any]":
    """Ends when all of them have, however they end."""
    together: concurrent.futures.Future[Any] = concurrent.futures.Future()
    left = itertools.count(len(futures) - 1, -1)  # one call to it is done as a whole, whichever thread makes it
    for future in futures:
        future.add_done_callback(lambda _: next(left) or together.set_result(None))
    if not futures:
        together.set_result(None)
    return together
