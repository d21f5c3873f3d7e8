"""A worker's grammars: `quire.structured_output` with this model's tokenizer, which is read when the first request asks."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.logger import init_logger
from quire.sampling_params import SamplingParams
from quire.structured_output.grammars import Filling, RowGrammar, shared_grammars
from quire.structured_output.vocabulary import Vocabulary, read_vocabulary
from quire.tokenizers.loader import get_tokenizer

logger = init_logger(__name__)


class WorkerGrammars:
    """What a sampler takes as `GrammarSource`.

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
        self._enable_in_reasoning = config.structured_outputs.enable_in_reasoning
        self._parts = self._prepare()
        is_off = config.structured_outputs.disable_jump_forward
        self.jumps = jumps if is_off is None else not is_off

    def start(self, params: SamplingParams) -> RowGrammar:
        """A new row's grammar, being compiled if it was not seen before."""
        assert params.structured_outputs is not None
        constraint, ends = params.structured_outputs, params.eos_token_ids
        thinking = None if self._enable_in_reasoning else params.thinking
        return self._grammars.start(constraint, ends, self._load_vocabulary, thinking)

    def forced(self, rows: Sequence[tuple[RowGrammar, Sequence[int]]]) -> dict[int, list[int]]:
        """As `Grammars.forced`."""
        return self._grammars.forced(rows)

    def begin_fill(
        self,
        rows: Sequence[tuple[RowGrammar, Sequence[int]]],
        masks_NW: npt.NDArray[np.int32],
        alone: Collection[int] | None = None,
    ) -> Filling:
        """As `Grammars.begin_fill`."""
        return self._grammars.begin_fill(rows, masks_NW, alone)

    def prepare(self) -> bool:
        """While nothing else is to do, do a part of what the first request with a grammar would wait for; whether there is more
        of it."""
        return next(self._parts, False)

    def _prepare(self) -> Iterator[bool]:
        model = self._model
        try:
            tokenizer = get_tokenizer(model.tokenizer_path, model.tokenizer_mode)
            yield True
            own = tokenizer.eos_token_id
            ends = [*model.eos_token_ids, *([own] if own is not None and own < model.vocab_size else [])]
            for _ in self._grammars.prepare(list(dict.fromkeys(ends)), self._load_vocabulary):
                yield True
        except Exception as error:  # whoever asks for a grammar is told
            logger.debug("grammars cannot be prepared: %s", error)

    def _load_vocabulary(self) -> Vocabulary:
        tokenizer = get_tokenizer(self._model.tokenizer_path, self._model.tokenizer_mode)
        return read_vocabulary(tokenizer, self._model.vocab_size)
