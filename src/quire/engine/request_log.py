"""Lines in the log about single requests: one when it comes, one when a sequence of it has ended.

Texts are left out unless the operator asks for them (`log_prompts`): a log is read by more people than an answer is. In the
JSON format each figure is a field of its own. Knows requests' records; costs nothing while tokens come.
"""

from typing import Any

from quire.config import ObservabilityConfig
from quire.engine.request_state import RequestRecord, SequenceState
from quire.logger import init_logger
from quire.metrics.engine_metrics import FinishedRequest

logger = init_logger(__name__)

_SHOWN = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "ignore_eos", "logprobs", "prompt_logprobs",
)  # fmt: skip
"""Parameters that hold numbers, and nothing that a user wrote."""


class RequestLog:
    """Writes the lines that the configuration asks for."""

    def __init__(self, config: ObservabilityConfig) -> None:
        self._shows_texts = config.log_prompts
        self._limit = config.max_log_len
        self._logs_requests = config.enable_log_requests
        self._logs_outputs = config.enable_log_outputs

    @staticmethod
    def of(config: ObservabilityConfig) -> "RequestLog | None":
        """A log, where any line is wanted."""
        return RequestLog(config) if config.enable_log_requests or config.enable_log_outputs else None

    def received(self, record: RequestRecord) -> None:
        if not self._logs_requests:
            return
        fields: dict[str, Any] = {"prompt_tokens": len(record.prompt_token_ids)}
        defaults = type(record.params)()
        for name in _SHOWN:
            value = getattr(record.params, name)
            if value != getattr(defaults, name):
                fields[name] = value
        salt, priority = record.engine_requests[0].cache_salt, record.engine_requests[0].priority
        if salt is not None:
            fields["has_cache_salt"] = True
        if priority:
            fields["priority"] = priority
        self._write("received", record, fields, "prompt", record.prompt, record.prompt_token_ids)

    def ended(self, record: RequestRecord, sequence: SequenceState, finished: FinishedRequest) -> None:
        if not self._logs_outputs:
            return
        fields: dict[str, Any] = {"index": sequence.index} if len(record.sequences) > 1 else {}
        fields |= {"output_tokens": finished.num_generation_tokens, "finish_reason": finished.finish_reason}
        if finished.time_to_first_token is not None:
            fields["first_token_s"] = round(finished.time_to_first_token, 4)
        if finished.end_to_end is not None:
            fields["total_s"] = round(finished.end_to_end, 4)
        text = None
        if self._shows_texts and record.tokenizer is not None:
            limit = (
                len(sequence.token_ids) if self._limit is None else self._limit + 1
            )  # a token has a character or more
            text = record.tokenizer.decode(sequence.token_ids[:limit], skip_special_tokens=True)
        self._write("ended", record, fields, "output", text, sequence.token_ids)

    def _write(
        self,
        event: str,
        record: RequestRecord,
        fields: dict[str, Any],
        kind: str,
        text: str | None,
        token_ids: list[int],
    ) -> None:
        if self._shows_texts:
            if text is None:
                fields[f"{kind}_token_ids"] = token_ids[: self._limit]
            else:
                fields[kind] = text[: self._limit]
                if len(fields[kind]) < len(text):
                    fields[f"{kind}_is_cut"] = True
        shown = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        extra = {"fields": {"event": f"request_{event}", "request_id": record.request_id, **fields}}
        logger.info("request %s %s: %s", record.request_id, event, shown, extra=extra)
