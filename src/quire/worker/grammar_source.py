"""A worker's grammars: `quire.structured_output` with this model's tokenizer, which is read when the first request asks."""

import concurrent.futures

from quire.config import EngineConfig
from quire.sampling_params import SamplingParams
from quire.structured_output.grammars import RowGrammar, shared_grammars
from quire.structured_output.states import States
from quire.structured_output.vocabulary import Vocabulary, read_vocabulary
from quire.tokenizers.loader import get_tokenizer, has_tokenizer


class WorkerGrammars:
    """What a sampler takes as `GrammarSource`; `forced`, `room` and `begin_fill` are those of `Grammars`.

    Args:
        jumps: whether tokens that are certain are to be asked for, unless the operator has decided it.
    """

    def __init__(self, config: EngineConfig, *, jumps: bool) -> None:
        self._model = config.model
        self._grammars = shared_grammars(
            config.model.tokenizer_path,
            config.model.tokenizer_mode,
            config.model.vocab_size,
            config.structured_outputs,
        )
        self.forced, self.room, self.begin_fill = self._grammars.forced, self._grammars.room, self._grammars.begin_fill
        self._enable_in_reasoning = config.structured_outputs.enable_in_reasoning
        self._reading: concurrent.futures.Future[None] | None = None
        is_off = config.structured_outputs.disable_jump_forward
        self.jumps = jumps if is_off is None else not is_off

    def is_compiled(self, params: SamplingParams) -> bool:
        """Whether a form's grammar is."""
        assert params.structured_outputs is not None
        return self._grammars.is_compiled(params.structured_outputs, params.eos_token_ids)

    def compile(self, params: SamplingParams) -> concurrent.futures.Future[States]:
        """Have it compiled in another thread; what is wrong with it is told by `start`'s row."""
        assert params.structured_outputs is not None
        return self._grammars.compile(params.structured_outputs, params.eos_token_ids, self._load_vocabulary)

    def start(self, params: SamplingParams) -> RowGrammar:
        """A new row's grammar. One that is not compiled, or not any more, is waited for when it is needed."""
        assert params.structured_outputs is not None
        constraint, ends = params.structured_outputs, params.eos_token_ids
        thinking = None if self._enable_in_reasoning else params.thinking
        return self._grammars.start(constraint, ends, self._load_vocabulary, thinking)

    def prepare(self, wait: bool = False) -> None:
        """Have another thread do what the first request with a grammar would wait for, unless there is no tokenizer; or wait
        for its end."""
        model = self._model
        is_there = not model.skip_tokenizer_init and model.tokenizer_path and has_tokenizer(model.tokenizer_path)
        if is_there and self._reading is None:
            self._reading = self._grammars.read_ahead(self._load_ends, self._load_vocabulary)
        if wait and self._reading is not None:
            self._reading.result()

    def _load_ends(self) -> list[int]:
        model = self._model
        own = get_tokenizer(model.tokenizer_path, model.tokenizer_mode).eos_token_id
        ends = [*model.eos_token_ids, *([own] if own is not None and own < model.vocab_size else [])]
        return list(dict.fromkeys(ends))

    def _load_vocabulary(self) -> Vocabulary:
        tokenizer = get_tokenizer(self._model.tokenizer_path, self._model.tokenizer_mode)
        return read_vocabulary(tokenizer, self._model.vocab_size)
