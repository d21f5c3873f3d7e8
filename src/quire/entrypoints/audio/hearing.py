"""One request to `/v1/audio/…`, from its sound to tokens: decoded and cut beside the event loop, its parts heard side by side.

A sound that is longer than the model hears at once is cut where it is quiet. The language of the first part is that of all.
"""

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.engine.caller import RequestOptions
from quire.engine.prompt_halves import PromptHalves
from quire.entrypoints.audio.transcripts import SAMPLING, HeardPart, TranscriptionRequest
from quire.entrypoints.audio.whisper_tokens import WhisperTokens
from quire.entrypoints.http.errors import bad_field, bad_request, error_of_finished
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.generation import all_of
from quire.entrypoints.openai.prompts import require_tokenizer
from quire.errors import RequestError
from quire.media import AUDIO
from quire.multimodal.audio import Samples, split_sound
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

_DECODERS = ThreadPoolExecutor(2, "quire-sound")
DEFAULT_CHUNK_S = 30.0
WITH_TIMES = ("verbose_json", "srt", "vtt")
SUPPRESSED = -100.0


@dataclasses.dataclass
class Hearing:
    """A checked request, ready to run.

    Attributes:
        parts: the second at which each begins, and its samples.
        language: of the whole; None for a model that knows one alone.
        no_speech: how likely nobody speaks, of each part; 0 where it was not asked for.
    """

    state: ServerState
    request: TranscriptionRequest
    task: str
    model: str
    public_id: str
    tokens: WhisperTokens
    parts: list[tuple[float, Samples]]
    rate: int
    language: str | None = None
    no_speech: list[float] = dataclasses.field(default_factory=list[float])

    @property
    def duration(self) -> float:
        """Seconds of the whole sound."""
        start, samples = self.parts[-1]
        return start + len(samples) / self.rate

    @property
    def has_times(self) -> bool:
        """Whether the answer has timestamps."""
        return self.request.response_format in WITH_TIMES

    async def listen(self) -> None:
        """Find the language, where the request names none, and how likely nobody speaks, where the answer tells it. Raises
        HTTPError or RequestError."""
        tokens, wanted = self.tokens, self.request.to_language or self.request.language
        self.no_speech = [0.0] * len(self.parts)
        asked = range(len(self.parts)) if self.request.response_format == "verbose_json" else range(1)
        if wanted is not None and tokens.languages:
            tokens.language_id(wanted, "to_language" if self.request.to_language else "language")
            self.language = wanted.lower()
        is_known = self.language is not None or not tokens.languages
        if is_known and self.request.response_format != "verbose_json":
            return
        first = await all_of([self._first_token(self.parts[index][1]) for index in asked])
        for index, (token_id, no_speech) in zip(asked, first, strict=True):
            self.no_speech[index] = no_speech
            if index == 0 and self.language is None and tokens.languages:
                names = {token: name for name, token in tokens.languages.items()}
                self.language = names[token_id]

    async def _first_token(self, samples: Samples) -> tuple[int, float]:
        """What the model writes first behind the start: a language; and how likely "no speech" would be."""
        tokens = self.tokens
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
        if tokens.languages:
            params.allowed_token_ids = list(tokens.languages.values())
        if tokens.no_speech is not None:
            params.logprob_token_ids = [tokens.no_speech]
        output = await self._finish(samples, [tokens.start], params, "language")
        completion, no_speech = output.outputs[0], 0.0
        if completion.logprobs and tokens.no_speech is not None:
            found: Any = completion.logprobs[0].get(tokens.no_speech)
            no_speech = 0.0 if found is None else math.exp(found.logprob)
        return completion.token_ids[0], no_speech

    async def finish(self) -> list[HeardPart]:
        """What is written of all parts."""
        return await all_of([self._hear(index) for index in range(len(self.parts))])

    async def _hear(self, index: int) -> HeardPart:
        start, samples = self.parts[index]
        params = self._params()
        if self.has_times:
            params.logprobs = 0
        completion = (await self._finish(samples, self._prompt(), params, str(index))).outputs[0]
        logprobs = [
            next(iter(each.values())).logprob if token_id not in each else each[token_id].logprob
            for token_id, each in zip(completion.token_ids, completion.logprobs or (), strict=False)
        ]
        end = start + len(samples) / self.rate
        return HeardPart(start, end, list(completion.token_ids), logprobs, self.no_speech[index])

    async def stream(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """New tokens of the parts, in order; all are heard side by side."""
        engine, params = self.state.engine, self._params()
        params.output_kind = RequestOutputKind.DELTA
        streams: list[Any] = []
        try:
            for index, (_, samples) in enumerate(self.parts):
                request_id = self.state.engine_request_id(f"{self.public_id}-{index}")
                given = self._given(samples, self._prompt())
                streams.append(await engine.open_stream(given, params.clone(), request_id, **self._options()))
            for index, opened in enumerate(streams):
                async for output in opened.outputs():
                    self._check(output)
                    yield index, output
        finally:
            for opened in streams:
                await opened.outputs().aclose()

    async def _finish(self, samples: Samples, prompt: list[int], params: SamplingParams, name: str) -> RequestOutput:
        final: RequestOutput | None = None
        request_id = self.state.engine_request_id(f"{self.public_id}-{name}")
        given = self._given(samples, prompt)
        async for output in self.state.engine.generate(given, params, request_id, **self._options()):
            self._check(output)
            final = output
        if final is None:
            raise error_of_finished(None, self.public_id)
        return final

    def _check(self, output: RequestOutput) -> None:
        if output.error is not None or any(choice.finish_reason == "error" for choice in output.outputs):
            raise error_of_finished(output.error, self.public_id)

    def _options(self) -> RequestOptions:
        return RequestOptions(priority=self.request.priority)

    def _prompt(self) -> list[int]:
        return self.tokens.prompt(self.language, self.task, self.request.prompt, has_times=self.has_times)

    def _given(self, samples: Samples, prompt: list[int]) -> Any:
        given: dict[str, Any] = {"prompt_token_ids": prompt, "multi_modal_data": {AUDIO: (samples, self.rate)}}
        return given if self.request.cache_salt is None else {**given, "cache_salt": self.request.cache_salt}

    def _params(self) -> SamplingParams:
        request, config = self.request, self.state.engine.config.model
        given = {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
        room = config.max_model_len - len(self._prompt())
        if room < 1:
            raise bad_field(
                "prompt", f"it leaves no room for an answer: the model writes {config.max_model_len} tokens."
            )
        most = room if request.max_completion_tokens is None else min(room, request.max_completion_tokens)
        suppressed: list[int] = config.hf_config.get("suppress_tokens") or []
        bias = {int(token): SUPPRESSED for token in suppressed if 0 <= token < config.vocab_size}
        return SamplingParams(
            temperature=request.temperature, max_tokens=most, detokenize=False, logit_bias=bias or None, **given
        )


class NewText:
    """What is new of the text of parts that are written token by token.

    A character may be several tokens: text is told once the tokens so far make whole characters.
    """

    def __init__(self, tokens: WhisperTokens) -> None:
        self._tokens, self._index = tokens, -1
        self._ids, self._told = list[int](), 0

    def take(self, index: int, completion: CompletionOutput) -> str:
        """The new text of a part, whose number is `index`."""
        if index != self._index:
            self._index, self._ids, self._told = index, [], 0
        self._ids += completion.token_ids
        text = self._tokens.text(self._ids)
        if completion.finish_reason is None and text.endswith("\ufffd"):
            return ""
        new, self._told = text[self._told :], len(text)
        return new


async def prepare_hearing(
    state: ServerState, read: Callable[[int], Samples], request: TranscriptionRequest, task: str, public_id: str
) -> Hearing:
    """Check a request and decode its sound, which `read` gives at a rate. Raises what the client must be told."""
    model = state.resolve_model(request.model)
    halves = state.engine.input_processor.halves
    if halves is None or halves.half.modality != AUDIO:
        raise bad_request(f"The model {model!r} does not transcribe.", param="model", code="not_supported")
    tokens = WhisperTokens(require_tokenizer(state.engine.get_tokenizer(), "file"))
    _check(request)
    loop = asyncio.get_running_loop()
    rate, parts = await loop.run_in_executor(_DECODERS, _decode, halves, read)
    return Hearing(state, request, task, model, public_id, tokens, parts, rate)


def _check(request: TranscriptionRequest) -> None:
    if "word" in request.timestamp_granularities:
        raise bad_field("timestamp_granularities", "'word' is not supported; allowed: 'segment'.", "not_supported")
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise bad_field("timestamp_granularities", "response_format must be 'verbose_json' for it.")
    if request.stream and request.response_format not in ("json", "text"):
        raise bad_field("stream", f"response_format {request.response_format!r} is not streamed; use 'json'.")
    if request.max_completion_tokens is not None and request.max_completion_tokens < 1:
        raise bad_field("max_completion_tokens", f"{request.max_completion_tokens} is less than 1.")


def _decode(halves: PromptHalves, read: Callable[[int], Samples]) -> tuple[int, list[tuple[float, Samples]]]:
    extractor = halves.half.extractor
    rate = int(extractor.sampling_rate)
    longest = float(getattr(extractor, "chunk_length", DEFAULT_CHUNK_S))
    return rate, split_sound(read(rate), rate, longest)


def as_file_error(error: RequestError) -> RequestError:
    """Sounds of this route come from its file."""
    if error.param == "multi_modal_data":
        error.param = "file"
    return error
