"""A worker's grammars: `quire.structured_output` with this model's tokenizer, which is read when the first request asks."""

import contextlib
import threading
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.structured_output.grammars import Filling, RowGrammar, shared_grammars
from quire.structured_output.vocabulary import Vocabulary, read_vocabulary
from quire.tokenizers.loader import get_tokenizer


class WorkerGrammars:
    """What a sampler takes as `GrammarSource`."""

    def __init__(self, config: EngineConfig) -> None:
        self._model = config.model
        self._grammars = shared_grammars(
            config.model.tokenizer_path,
            config.model.tokenizer_mode,
            config.model.vocab_size,
            config.structured_outputs,
        )
        self._is_warm = False
        self._enable_in_reasoning = config.structured_outputs.enable_in_reasoning

    def start(self, params: SamplingParams) -> RowGrammar:
        """A new row's grammar, being compiled if it was not seen before."""
        assert params.structured_outputs is not None
        constraint, ends = params.structured_outputs, params.eos_token_ids
        thinking = None if self._enable_in_reasoning else params.thinking
        return self._grammars.start(constraint, ends, self._load_vocabulary, thinking)

    def begin_fill(
        self,
        rows: Sequence[tuple[RowGrammar, Sequence[int]]],
        masks_NW: npt.NDArray[np.int32],
        alone: Collection[int] | None = None,
    ) -> Filling:
        """As `Grammars.begin_fill`."""
        return self._grammars.begin_fill(rows, masks_NW, alone)

    def warm(self) -> None:
        """Have the vocabulary read in a thread of its own, once, before a request needs it: that takes seconds."""
        if not self._is_warm and self._model.tokenizer_path:
            self._is_warm = True
            threading.Thread(target=self._read_ahead, name="grammar-vocabulary", daemon=True).start()

    def _read_ahead(self) -> None:
        with contextlib.suppress(Exception):  # whatever is wrong is told to the first request that needs it
            own = get_tokenizer(self._model.tokenizer_path, self._model.tokenizer_mode).eos_token_id
            ends = list(self._model.eos_token_ids)
            ends += [own] if own is not None and own not in ends and own < self._model.vocab_size else []
            self._grammars.check(StructuredOutputsParams(choice=["a"]), ends, self._load_vocabulary)

    def _load_vocabulary(self) -> Vocabulary:
        tokenizer = get_tokenizer(self._model.tokenizer_path, self._model.tokenizer_mode)
        return read_vocabulary(tokenizer, self._model.vocab_size)
