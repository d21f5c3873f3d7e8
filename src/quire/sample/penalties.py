"""The tokens that presence, frequency and repetition penalties look at.

Penalties cost the distinct tokens that a row has seen, not the vocabulary: `ops.penalize` applies them and
`ops.count_tokens` counts new ones. Repetition divides positive logits and multiplies negative ones (Keskar et al., CTRL);
frequency subtracts its value for each time a token was generated, presence once.

Legend: N seen tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]


def are_penalized(params: SamplingParams) -> bool:
    """Whether a request has penalties."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def count_seen(
    params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """The distinct tokens of a request's prompt and output [N], and how often each was generated [N]."""
    # Only the repetition penalty looks at the prompt.
    counts = dict.fromkeys(prompt_token_ids if params.repetition_penalty != 1.0 else (), 0)
    for token in output_token_ids:
        counts[token] = counts.get(token, 0) + 1
    return np.fromiter(counts, np.int32, len(counts)), np.fromiter(counts.values(), np.int32, len(counts))
