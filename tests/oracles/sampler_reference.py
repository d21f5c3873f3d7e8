"""A slow sampler for one row in plain Python and float64: the oracle of `quire.sample`.

Follows the definitions, not the fast code: full sorts, whole-vocabulary probabilities, one token at a time.
"""

import math
from collections import Counter

import numpy as np

from quire.sampling_params import GREEDY_BELOW, SamplingParams


def edited_logits(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Logits after constraints and penalties."""
    logits = logits.astype(np.float64).copy()
    if params.allowed_token_ids:
        for token in range(len(logits)):
            if token not in params.allowed_token_ids:
                logits[token] = -math.inf
    for words in params.bad_words_token_ids:
        head, last = words[:-1], words[-1]
        if len(output) >= len(head) and output[len(output) - len(head) :] == head:
            logits[last] = -math.inf
    if len(output) < params.min_tokens:
        for token in [*params.eos_token_ids, *(params.stop_token_ids or [])]:
            logits[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for processor in params.logits_processors or []:
        logits = processor(output, logits)
    counts = Counter(output)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def probabilities(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """What the next token is drawn from. Greedy is a certainty. Ties at a cut are kept whole."""
    logits = edited_logits(logits, params, prompt, output)
    if params.temperature < GREEDY_BELOW:
        certain = np.zeros(len(logits))
        certain[int(logits.argmax())] = 1
        return certain
    scaled = logits / params.temperature
    weights = np.exp(scaled - scaled.max())
    kept = weights >= params.min_p * weights.max()
    if params.top_k > 0:
        kth = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        kept &= scaled >= kth
    order = [token for token in sorted(range(len(scaled)), key=lambda token: -scaled[token]) if kept[token]]
    if 0 < params.top_k < len(scaled):
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    mass = 0.0
    for token in order:
        mass += weights[token]
        if mass >= params.top_p * total * (1 - 1e-12):
            if params.top_p < 1:
                kept &= scaled >= scaled[token]
            break
    weights = weights * kept
    return weights / weights.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithm of the softmax."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - math.log(np.exp(shifted).sum())
