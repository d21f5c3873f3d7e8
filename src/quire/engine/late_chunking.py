"""Which tokens and characters of a text are in each chunk, where the chunks are divided after the text was computed whole.

Knows tokenizers. Knows nothing of how the chunks' vectors are made (`worker/pooling.py`).
"""

from quire.engine.input_processor import TokenizedPrompt
from quire.engine.tokenizer_source import TokenizerSource
from quire.errors import RequestError
from quire.outputs import LateChunk, LateChunkingMetadata
from quire.pooling_params import PoolingParams
from quire.tokenizers.interface import Tokenizer

_FIELD = "late_chunking_params"


def divide(prompt: TokenizedPrompt, params: PoolingParams, source: TokenizerSource) -> LateChunkingMetadata | None:
    """The chunks of a prompt; None where it is not divided.

    Raises:
        RequestError: the vectors would not be those of a whole text, or the tokenizer does not say where its tokens are.
    """
    if params.late_chunking_params is None:
        return None
    if params.task != "token_embed":
        message = f"late chunking is for the task token_embed, and this is {params.task} (pooler_config.task chooses)"
        raise RequestError(message, param=_FIELD)
    if params.truncate_prompt_tokens is not None or params.step_tag_id is not None:
        name = "step_tag_id" if params.truncate_prompt_tokens is None else "truncate_prompt_tokens"
        raise RequestError(f"late chunking is of a whole text: leave {name} out", param=_FIELD)
    tokenizer = source.get()
    if not prompt.text or prompt.media or tokenizer is None:
        raise RequestError("late chunking needs a prompt of text (not of token ids, messages or media)", param=_FIELD)
    spans = _spans(prompt.text, prompt.token_ids, tokenizer)
    size, count = params.late_chunking_params.chunk_size, len(spans)
    chunks = [_chunk(spans, at, min(at + size, count)) for at in range(0, count, size)]
    return LateChunkingMetadata(size, count, chunks)


def _spans(text: str, token_ids: list[int], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    for special in (True, False):
        ids, spans = tokenizer.encode_spans(text, special)
        if ids == token_ids:
            return spans
    raise RequestError("late chunking: the model reads other tokens than the text's own", param=_FIELD)


def _chunk(spans: list[tuple[int, int]], start: int, end: int) -> LateChunk:
    written = [span for span in spans[start:end] if span[0] < span[1]]
    if not written:
        return LateChunk((start, end), None)
    return LateChunk((start, end), (min(first for first, _ in written), max(last for _, last in written)))
