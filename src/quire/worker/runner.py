"""What every model runner is: the model, the rows, the pages and the sampler of one device, and what a step changes about them.

A platform says which runner it takes (`Platform.runner_class`): `model_runner` computes a step when it is asked to,
`device_runner` submits it to a device that works beside the host. Knows nothing of why a step was planned so.
"""

import abc
import concurrent.futures
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import torch

from quire.attention.interface import AttentionBackend
from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind
from quire.config.pooling import PAIRED
from quire.core.drafting import MOST_KEPT
from quire.core.kv_connector import EXTRA
from quire.core.output import IntArray, ModelRunnerOutput, SchedulerOutput
from quire.distributed.communicator import Communicator, SingleRank
from quire.distributed.stage_link import StageLink
from quire.errors import EngineError
from quire.kernels.step import allocate_columns
from quire.layers.decoder import Decoder
from quire.layers.encoder.cross_decoder import CrossDecoder
from quire.layers.interface import CausalLM, MediaInputs, StepInputs
from quire.layers.transformers_backend import TransformersModel
from quire.logger import init_logger
from quire.media import EMBEDS, MADE_BEFORE, MediaItem
from quire.model_loader import load_model
from quire.platforms.interface import DeviceMemory, DeviceRuntime, Platform
from quire.sample.grammar_masks import GrammarMasks
from quire.sample.logits_processor import load_logits_processors, load_plugin_processors
from quire.sample.sampling_rows import RANDOM
from quire.sampling_params import SamplingParams
from quire.spec_decode.rejection import Rejection
from quire.spec_decode.verification import Acceptance, Draws, Verified
from quire.worker.adapter_steps import AdapterSteps
from quire.worker.axis_positions import AxisPositions
from quire.worker.components import resolve_components
from quire.worker.cross_steps import CrossSteps
from quire.worker.drafter import make_drafter
from quire.worker.drawn_image import check_drawn_image
from quire.worker.grammar_source import WorkerGrammars
from quire.worker.input_prep import InputPreparation, PreparedBatch
from quire.worker.kept_states import KeptStates
from quire.worker.media_steps import MediaSteps, check_takes_embeds
from quire.worker.page_connector import KVConnectorWorker
from quire.worker.page_store import PageStore
from quire.worker.pooling import make_pooler
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.prompt_split import PromptSplit
from quire.worker.step_diff import apply_diff

logger = init_logger(__name__)


class PendingStep(Protocol):
    """A step that was submitted to a device and may still run there."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it; the same again when asked again."""
        ...


def lost_output(step_id: int, error: torch.OutOfMemoryError) -> ModelRunnerOutput:
    """What is told of a step for which the device had no memory."""
    logger.warning("step %d found no memory on the device, its requests are computed again: %s", step_id, error)
    nothing = np.zeros(0, dtype=np.int32)
    return ModelRunnerOutput(step_id, nothing, nothing, lost=f"out of device memory: {str(error).splitlines()[0]}")


class Runner(abc.ABC):
    """Turns scheduler steps into tokens on one device. Making one builds the model and reads its weights.

    Args:
        max_tokens: tokens that a step may have.
        jumps: whether grammars tell of tokens that can only follow.
        round_up: how many rows of logits are computed where so many are wanted.

    Attributes:
        acceptance: says which drafts are right.
        rejection: accepts drafts by what they were drawn from, if that is asked for.
        is_last_stage: whether it gives tokens; the stages of a pipeline before the last one hand their states on.
        link: to the stages beside its own; None where there is one.
        connector: through which pages come from elsewhere and go there.
        waited_seconds: how long the host has waited for results so far; 0 where steps run when they are executed.
    """

    waited_seconds: float = 0.0
    link: StageLink | None = None
    connector: KVConnectorWorker | None = None
    groups_adapters: bool = False
    """Whether products with adapters take rows of one adapter together."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        runtime: DeviceRuntime,
        communicator: Communicator | None,
        *,
        max_tokens: int,
        jumps: bool,
        round_up: Callable[[int], int] = lambda count: count,
    ) -> None:
        model, self._max_rows, self._max_draws = config.model, config.scheduler.max_num_seqs, config.max_logits
        self._config, self.is_last_stage = config, config.parallel.is_last_stage
        self._runtime = runtime
        self._device = runtime.device()
        self._capabilities = platform.capabilities()
        self._parts = resolve_components(platform.runner_components(config))
        self._max_tokens = max_tokens
        free, _ = runtime.memory_info()
        max_logits = self._max_draws if model.pooling is None else 1
        self._loaded = load_model(config, platform, self._device, max_tokens, max_logits, free, communicator)
        self._model = self._loaded.model
        self._split: PromptSplit | None = None
        if communicator is not None and communicator.prompts is not None:
            self._split = PromptSplit(cast(Decoder, self._model), communicator.prompts)
        self._pooler = make_pooler(config, self._model, self._device, max_tokens)
        self._backend: AttentionBackend = self._loaded.backend
        can_pin = self._capabilities.pinning.value
        processors = load_logits_processors(model.logits_processors, config, self._device, can_pin)
        processors += load_plugin_processors(config, self._device, can_pin)
        self._grammars = WorkerGrammars(config, jumps=jumps)
        self._sampler = self._parts.sampler(
            self._max_rows, model.vocab_size, runtime, model.logprobs_mode, processors, self._grammars
        )
        self.acceptance = Acceptance(config.speculative)
        self.rejection = Rejection()
        if config.speculative is not None and config.speculative.is_probabilistic:
            self._sampler.redraw = self.rejection
        self._columns = allocate_columns(self._max_draws, torch.device("cpu"))
        self._out_S = torch.zeros(self._max_draws, dtype=torch.int32, device=self._device)
        self._pages: PageStore | None = None
        self._drafter = make_drafter(config, platform, runtime, self._model, max_tokens)
        if self._drafter is not None:
            self.rejection.probabilities = self._drafter.drawing.probabilities
        self._transfers: Any = None
        self._adapters: AdapterSteps | None = None
        if config.lora is not None:
            self._adapters = AdapterSteps(
                config,
                self._model,
                runtime,
                self._max_rows,
                max_tokens,
                is_grouped=self.groups_adapters,
                head=None if self._pooler is None else self._pooler.head,
            )
            if self._pooler is not None:
                self._pooler.own_head = self._adapters.head
        tell = [] if self._adapters is None else [self._adapters.tell_samples, self._adapters.limit]
        self._prompt_logprobs = PromptLogprobs(self._model, self._sampler, self._max_rows, round_up, *tell)

        self._axes = AxisPositions(self._max_rows, max_tokens) if self._model.num_axes else None
        self._media: MediaSteps | None = None
        self._cross: CrossSteps | None = None
        media = config.multimodal
        if media is not None and media.prompt_embeds:
            check_takes_embeds(self._model)
        if media is not None and isinstance(self._model, CrossDecoder):
            slots = getattr(torch, self._capabilities.slot_dtype.value)
            self._cross = CrossSteps(self._model, media.encoder_budget, slots)
        elif media is not None and isinstance(self._model, Decoder | TransformersModel):
            check_drawn_image(self._model, config)
            divides = (
                media.mm_encoder_tp_mode == "data" and not self._pools_alone
            )  # whose vectors have widths of their own
            ranks = communicator if divides and communicator is not None else SingleRank()
            is_beside = self._capabilities.async_output.value
            self._media = MediaSteps(self._model, max_tokens, media.encoder_budget, runtime, ranks, is_beside=is_beside)
        kept = (self._adapters, self._axes, self._media, self._cross)
        self._kept_by_row = [each for each in kept if each is not None]

    def _images(self, plan: SchedulerOutput, query_start_B: IntArray) -> dict[int, torch.Tensor]:
        """Vectors of the rows of a pooling step that are images."""
        if self._media is None or not self._pools_alone:
            return {}
        return self._media.vectors(plan, query_start_B, self._state)

    def _see_media(self, plan: SchedulerOutput, query_start_B: IntArray) -> MediaInputs | None:
        """What stands in the place of the step's tokens; None where all are text, or images are whole prompts."""
        if self._media is None or self._pools_alone:
            return None
        return self._media.prepare(plan, query_start_B, self._state)

    @property
    def encodes_beside(self) -> bool:
        """Whether items can be computed beside the steps."""
        return self._media is not None and self._media.encoder.is_beside

    def encode_media(self, items: list[MediaItem]) -> "concurrent.futures.Future[None]":
        """Have items computed beside the steps, where `encodes_beside`; the future has no error."""
        assert self._media is not None
        return self._media.encoder.begin(items)

    @property
    def _pools_alone(self) -> bool:
        """Whether an image is a whole prompt, whose vector is the answer."""
        pooling = self._config.model.pooling
        return pooling is not None and pooling.family in PAIRED

    @property
    def embeds_widths(self) -> dict[str, int]:
        """Columns of embeddings that may stand in a prompt, by modality: of a token's and of an item's."""
        if self._media is None:
            return {}
        return {EMBEDS: self._media.width, **dict.fromkeys(MADE_BEFORE.values(), self._media.inputs.rows_TE.shape[1])}

    @property
    def memory(self) -> DeviceMemory:
        """Where results for the host arrive."""
        return self._runtime

    @property
    def model(self) -> CausalLM:
        """The loaded model."""
        return self._model

    @property
    def weights(self) -> list[CausalLM]:
        """All that has weights: the model, and the drafter's if there is one."""
        return [self._model] if self._drafter is None else [self._model, self._drafter.model]

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One a layer; those of a drafter are the last."""
        return [spec for model in self.weights for spec in model.kv_cache_specs()]

    def untouched_bytes(self) -> int:
        """Device memory that steps will take and that is not taken yet: workspaces, logits again for sampling, adapters, and kept
        states."""
        logits = 0 if self._pooler is not None else self._max_draws * self._config.model.vocab_size * 4
        adapters = 0 if self._adapters is None else self._adapters.reserved_bytes
        kept = 0
        if self._config.speculative is not None:
            states = sum(spec.page_bytes for spec in self.kv_cache_specs() if spec.kind is KVKind.RECURRENT)
            kept = states * min(MOST_KEPT, self._max_rows)
        return self._workspace_bytes() + logits + adapters + kept

    @abc.abstractmethod
    def _workspace_bytes(self) -> int:
        """Device memory of buffers and libraries that only steps will take."""

    def is_prepared(self, params: SamplingParams) -> bool:
        """Whether a step may have such a request at once: what it needs is compiled."""
        return params.structured_outputs is None or self._grammars.is_compiled(params)

    def prepare(self, params: SamplingParams) -> "list[concurrent.futures.Future[Any]]":
        """Have it compiled in other threads."""
        return [] if params.structured_outputs is None else [self._grammars.compile(params)]

    @property
    def adapters(self) -> AdapterSteps:
        """Adapters of its steps. Raises EngineError: they are off."""
        if self._adapters is None:
            raise EngineError("adapters are off: start the engine with enable_lora")
        return self._adapters

    def _forward(self, step: StepInputs, *, is_split: bool) -> StepInputs:
        """Run the layers; returns the step of which logits are computed. `is_split`: ranks that share prompts may share it."""
        if self._split is not None and is_split and self._split.takes(step):
            return self._split.forward(step)
        self._model.begin_step(step)
        self._model.forward(step)
        return step

    def _limit_tokens(self, logits_SV: torch.Tensor) -> None:
        """Leave to each row the tokens that it may have: there may be some of adapters alone."""
        if self._adapters is not None:
            self._adapters.limit(logits_SV)

    def drop_adapters(self, *, is_base_new: bool = False) -> None:
        """Give back what adapters have on the device. No step is in flight, and rows keep no request.

        Args:
            is_base_new: what was made of the base's weights is not kept on the host either.
        """
        if self._adapters is not None:
            self._adapters.store.clear(is_base_new=is_base_new)

    @property
    def has_pages(self) -> bool:
        """Whether the cache is allocated."""
        return self._pages is not None

    def allocate(self, kv_cache: KVCacheConfig) -> None:
        """Allocate and bind the pages, and warm up."""
        self._pages = self._parts.page_store(kv_cache, self._backend, self._device)
        pages, groups = self._pages.by_layer()
        own = len(self._model.kv_cache_specs())
        self._model.bind_kv_cache(pages[:own], groups[:own])
        if self.connector is not None:
            self.connector.register_kv_caches(self._pages)
        max_len = self._config.model.max_model_len
        self._state = self._parts.batch_state(self._max_rows, max_len, kv_cache.block_size, len(kv_cache.groups))
        self._states = KeptStates(kv_cache, self._runtime)
        if self._cross is not None:
            self._cross.allocate(kv_cache, self._max_rows)
        if self._drafter is not None:
            sizes = (kv_cache.num_blocks, kv_cache.block_size)
            self._drafter.bind(pages[own:], groups[own:], self._state, *sizes)
        slots = np.dtype(self._capabilities.slot_dtype.value)
        sizes = (self._max_tokens, kv_cache.block_size, slots, self._max_draws)
        inputs = self._parts.input_preparation(self._state, *sizes)
        inputs.axes = self._axes
        self._warm_up(inputs, kv_cache.block_size)

    @abc.abstractmethod
    def _warm_up(self, inputs: InputPreparation, block_size: int) -> None:
        """Steps are going to be prepared in these inputs: pay for first calls; a page has `block_size` tokens."""

    def free_pages(self) -> None:
        """Give the cache back; rows are forgotten with it."""
        self._pages = None
        for kept in (self._media, self._cross):
            if kept is not None:
                kept.clear()
        for model in self.weights:
            num_layers = len(model.kv_cache_specs())
            model.bind_kv_cache([torch.empty(0)] * num_layers, [0] * num_layers)

    @abc.abstractmethod
    def forget_recorded(self) -> None:
        """Weights are going to change: recorded steps have the old ones. No step may come before `record_again`."""

    @abc.abstractmethod
    def record_again(self) -> None:
        """Weights have changed. Rows keep no request."""

    @abc.abstractmethod
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | PendingStep:
        """Run or submit one step; at most two are in flight."""

    def _apply_diff(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Change the rows as a step says. A step that computes nothing has its result at once."""
        if self._drafter is not None:
            self._drafter.rows.settle()
        self._transfers = plan.extras.get(EXTRA)
        apply_diff(plan, self._state, self._sampler, self._prompt_logprobs, self._pages)
        if self._drafter is not None:
            self._drafter.rows.apply_diff(plan)
        if plan.drafts and self._pages is not None:
            self._states.keep(plan.drafts, self._state, self._pages)
        if self._pooler is not None:
            self._pooler.apply_diff(plan, self._state.num_computed_R[plan.rows])
        for kept in self._kept_by_row:
            kept.apply_diff(plan)
        nothing = plan.rows[:0]
        return None if plan.total_num_tokens else ModelRunnerOutput(plan.step_id, rows=nothing, token_ids=nothing)

    def _before_layers(self, num_tokens: int) -> None:
        """Take in what a step's layers need from elsewhere: pages, what stands beside prompts, and the states of its tokens
        from the stage before."""
        if self._cross is not None:
            self._cross.prepare()
        if self._transfers is not None and self.connector is not None:
            self.connector.bind_connector_metadata(self._transfers)
            self.connector.start_load_kv()
        if self.link is not None and self._config.parallel.stage > 0:
            self.link.receive(self._model.payload(num_tokens))

    def _behind_layers(self, num_tokens: int) -> None:
        """Give away what a step's layers have computed: the states of its tokens to the next stage, and pages."""
        if self.link is not None and not self.is_last_stage:
            self.link.send(self._model.payload(num_tokens))
        if self._transfers is not None and self.connector is not None:
            self.connector.wait_for_save()

    def with_news(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """A step's result, with what the connector tells."""
        news = None if self.connector is None else self.connector.get_finished(output.step_id)
        if news is not None:
            output.extras = {**output.extras, EXTRA: news}
        return output

    def _without_forbidden(self, plan: SchedulerOutput) -> SchedulerOutput:
        """A step without those drafts that a row's grammar forbids, and without those behind them. The plan stays as it is: for
        the scheduler they were wrong. With layers that have states, a row goes back behind a wrong draft, so it stays in."""
        if not plan.drafts or self._states.has_groups:
            return plan
        kept = {row: drafts[: self._sampler.room(row, drafts)] for row, drafts in plan.drafts.items()}
        num_cut = sum(map(len, plan.drafts.values())) - sum(map(len, kept.values()))
        if not num_cut:
            return plan
        counts = plan.num_scheduled_tokens.copy()
        for index, row in enumerate(plan.rows.tolist()):
            counts[index] -= len(plan.drafts.get(row, ())) - len(kept.get(row, ()))
        drafts = {row: guesses for row, guesses in kept.items() if guesses}
        total = plan.total_num_tokens - num_cut
        return msgspec.structs.replace(plan, num_scheduled_tokens=counts, total_num_tokens=total, drafts=drafts)

    def learn_tokens(self, rows_S: IntArray, positions_S: IntArray, tokens_S: IntArray) -> None:
        """A step's tokens have arrived. A row with states may go back to before them, where the device has only its last one."""
        if self._states.has_groups:
            self._state.token_ids_RL[rows_S, positions_S] = tokens_S

    def _draw_now(
        self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray, masks: GrammarMasks | None
    ) -> Draws:
        """The tokens of rows at these positions, waited for: each row once, or several times if it needs nothing but logits."""
        sampler, columns, out_S = self._sampler, self._columns, self._out_S[: len(rows_S)]
        wanted = sampler.wanted(rows_S, positions_S)
        if wanted:
            sampler.table.pack(rows_S, positions_S, columns)
            columns = columns if self._runtime.is_host else columns.on(self._device)
        if masks is not None and sampler.is_masked_alone(wanted, rows_S):
            sampled = sampler.upload_masks(masks, rows_S)
            sampler.compute_masked(logits_SV, columns, out_S)
        else:
            sampled = sampler.sample(logits_SV, columns, rows_S, positions_S, wanted, out_S, masks)
        token_ids_S: IntArray = out_S.cpu().numpy().copy()
        if wanted <= RANDOM:
            return Draws(token_ids_S)
        logprobs = sampler.finish(sampled, {name: tensor.cpu() for name, tensor in sampled.tensors.items()})
        return Draws(token_ids_S, logprobs, sampled.errors, sampler.append_tokens(rows_S, token_ids_S, positions_S))

    def _verify_in_rounds(
        self, logits_SV: torch.Tensor, batch: PreparedBatch, drafts: dict[int, list[int]]
    ) -> Verified:
        """Draw one token a row at a time, and wait for each: no other step is in flight."""

        def draw(logits_NV: torch.Tensor, rows_N: IntArray, positions_N: IntArray) -> Draws:
            return self._draw_now(logits_NV, rows_N, positions_N, self._sampler.begin_masks(rows_N, positions_N))

        assert batch.first_B is not None
        return self.acceptance.in_rounds(logits_SV, batch.rows_S, batch.positions_S, batch.first_B, drafts, draw)

    def _begin_verifying(self, plan: SchedulerOutput, batch: PreparedBatch) -> None:
        """The step's draws are of rows with drafts, or of rows without."""
        if self._sampler.redraw is None:
            return
        first_B = batch.first_B if batch.first_B is not None else slice(0, 0)
        firsts = zip(batch.rows_S[first_B].tolist(), batch.positions_S[first_B].tolist(), strict=True)
        self.rejection.begin(plan.drafts, dict(firsts))

    def take_verified(self, plan: SchedulerOutput, verified: Verified) -> ModelRunnerOutput:
        """Set rows to what was verified of a step with drafts."""
        first, accepted = verified.first, verified.accepted
        for row, position, token_id in zip(
            verified.rows.tolist(), verified.positions.tolist(), first.token_ids.tolist(), strict=True
        ):
            self._state.settle_drafts(row, position, [token_id, *accepted.get(row, ())])
        wrong = {row for row, drafts in plan.drafts.items() if len(accepted.get(row, ())) < len(drafts)}
        if self._pages is not None:
            self._states.put_back(wrong, self._state, self._pages)
        return ModelRunnerOutput(
            plan.step_id,
            verified.rows,
            first.token_ids,
            logprobs=first.logprobs,
            accepted=accepted,
            forced=first.forced,
            row_errors=first.errors,
        )

    def prepare_to_serve(self, wait: bool = False) -> None:
        """Begin, in another thread, to read the vocabulary for grammars; or wait until it is read."""
        if self._config.model.pooling is None:
            self._grammars.prepare(wait)

    def stop(self) -> None:
        """The engine ends: begin nothing beside the steps any more."""
        if self._media is not None:
            self._media.encoder.stop()

    def join(self) -> None:
        """Wait for what runs beside the steps, after `stop`."""
        if self._media is not None:
            self._media.encoder.join()

    def idle(self) -> bool:
        """No step is in flight: prepare something for later; whether there is more to prepare."""
        return False

    def explain(self) -> dict[str, Any]:
        """What was chosen and why."""
        return {
            "attention_backend": {"chosen": self._backend.name, **self._loaded.explain()},
            **self._explain_steps(),
            **({} if self._drafter is None else {"drafter": self._drafter.explain()}),
            "kv_cache_bytes": self._pages.num_bytes() if self._pages is not None else 0,
            **({} if self._adapters is None else {"adapters": self._adapters.explain()}),
            "max_tokens": self._max_tokens,
            "max_rows": self._max_rows,
        }

    @abc.abstractmethod
    def _explain_steps(self) -> dict[str, Any]:
        """Whether steps are replayed."""
