"""The progress bar of one call of `LLM`."""

from collections.abc import Callable
from typing import Any

from quire.outputs import AnyOutput, RequestOutput

Tqdm = bool | Callable[..., Any]
"""Whether there is a bar, or a function to make it with."""


class Progress:
    """The progress bar, if one is wanted: finished requests, and tokens a second. tqdm is imported only then."""

    def __init__(self, total: int, wanted: Tqdm) -> None:
        self._bar: Any = None
        self._num_input = self._num_output = 0
        if wanted:
            from tqdm import tqdm

            make = wanted if callable(wanted) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)

    def advance(self, output: AnyOutput) -> None:
        if self._bar is None:
            return
        self._num_input += len(output.prompt_token_ids or ())
        if isinstance(output, RequestOutput):
            self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.format_dict["elapsed"] if hasattr(self._bar, "format_dict") else 0.0
        if elapsed:
            speed = f"in {self._num_input / elapsed:.1f} tok/s, out {self._num_output / elapsed:.1f} tok/s"
            self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
