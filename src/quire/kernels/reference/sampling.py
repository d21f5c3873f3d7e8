"""Reference sampling: Gumbel-max with counter-based noise, so that a token depends on (seed, position) and logits only.

Knows nothing of top-k, penalties or requests: it gets logits that are ready to be drawn from.

The noise is defined to the bit, so that every device draws the same number for the same (seed, position, vocabulary index):

1. Philox4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"): key = (low, high 32 bits of seed),
   counter = (index // 4, 0, low, high 32 bits of position); the word is output number index % 4.
2. u = (2 * (word >> 9) + 1) * 2**-24: exact in float32, in the open interval (0, 1), 24 significant bits.
3. noise = -log(-log(u)), where log is `log_float32` below: float32, every multiplication and addition rounded by itself
   (no fused multiply-add), so that hardware and libraries cannot differ.
4. score = logits * inverse_temperature + noise, again two roundings; the first largest score wins.
"""

import torch

from quire.kernels.reference.penalties import keep_allowed
from quire.kernels.registry import kernel

_MASK = 0xFFFFFFFF
_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1): f - f^2 / 2 + f^3 * P(f); minimax coefficients of Moshier's Cephes.
LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LOG_2_HIGH, LOG_2_LOW = 0.693359375, -2.12194440e-4
_SQRT_HALF_BITS = 0x3F3504F3


def philox(seed_S: torch.Tensor, position_S: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` 32-bit words of each (seed, position), as int64 [S, count]."""
    blocks = torch.arange((count + 3) // 4, device=seed_S.device, dtype=torch.int64)
    seed, position = seed_S.long()[:, None], position_S.long()[:, None]
    c0 = blocks[None, :].expand(seed.shape[0], -1)
    c1 = torch.zeros_like(c0)
    c2, c3 = (position & _MASK).expand_as(c0), ((position >> 32) & _MASK).expand_as(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        # The 64-bit products wrap into the sign bit; the mask after the shift takes the same bits either way.
        product0, product1 = c0 * _ROUND_MULTIPLIERS[0], c2 * _ROUND_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :count]


def log_float32(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float32 numbers, with a defined rounding at every operation."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    exponent = exponent.float()
    square = f * f
    p = torch.full_like(f, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        p = p * f
        p = p + coefficient
    p = p * f
    p = p * square
    p = p + exponent * LOG_2_LOW
    p = p - square * 0.5
    result = f + p
    return result + exponent * LOG_2_HIGH


def gumbel_noise(seed_S: torch.Tensor, position_S: torch.Tensor, count: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 [S, count], as the module's docstring defines it."""
    words = philox(seed_S, position_S, count)
    u = ((words >> 9) * 2 + 1).float() * 2.0**-24
    return -log_float32(-log_float32(u))


@kernel("allowed_gumbel_argmax", platform="any")
def allowed_gumbel_argmax(logits_SV, slots_S, allowed_XW, inverse_temperature_S, seed_S, position_S, out_S) -> None:
    keep_allowed(logits_SV, slots_S, allowed_XW)
    gumbel_argmax(logits_SV, inverse_temperature_S, seed_S, position_S, out_S)


@kernel("gumbel_argmax", platform="any")
def gumbel_argmax(logits_SV, inverse_temperature_S, seed_S, position_S, out_S) -> None:
    logits = logits_SV.float()
    greedy = torch.isinf(inverse_temperature_S)
    inverse = torch.where(greedy, torch.ones_like(inverse_temperature_S), inverse_temperature_S).float()
    scores = logits * inverse[:, None]
    scores = scores + gumbel_noise(seed_S, position_S, logits.shape[1])
    out_S.copy_(torch.where(greedy[:, None], logits, scores).argmax(-1))
