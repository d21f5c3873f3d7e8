"""Reference of the filtered draw: thresholds from sorted rows in float64, then Gumbel-max over what is left.

The filters' meaning is that of `sample/filters.py`.
"""

import torch
from torch import Tensor

from quire.kernels.reference.sampling import gumbel_argmax
from quire.kernels.registry import kernel


def compute_thresholds(
    logits_SV: Tensor, inverse_temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor
) -> Tensor:
    """The smallest logit of each row that may be drawn, float32 [S]; minus infinity for greedy and unfiltered rows."""
    vocabulary = logits_SV.shape[1]
    sorted_SV = logits_SV.double().sort(-1, descending=True).values
    inverse_S1 = inverse_temperature_S.double()[:, None]
    largest_S1 = sorted_SV[:, :1]
    floor_S1 = largest_S1 + min_p_S.double()[:, None].log() / inverse_S1
    limit_S1 = torch.where((top_k_S > 0) & (top_k_S < vocabulary), top_k_S, vocabulary).long()[:, None]
    threshold_S1 = torch.maximum(floor_S1, sorted_SV.gather(1, limit_S1 - 1))
    threshold_S1 = torch.where(limit_S1 < vocabulary, threshold_S1, floor_S1)
    rank_V = torch.arange(vocabulary, device=logits_SV.device)
    weights_SV = torch.exp((sorted_SV - largest_S1) * inverse_S1)
    weights_SV = torch.where((rank_V < limit_S1) & (sorted_SV >= threshold_S1), weights_SV, 0.0)
    mass_SV = weights_SV.cumsum(-1)
    below_S1 = (mass_SV < top_p_S.double()[:, None] * mass_SV[:, -1:]).sum(-1, keepdim=True)
    cut_S1 = sorted_SV.gather(1, below_S1.clamp(max=vocabulary - 1))
    threshold_S1 = torch.where(top_p_S[:, None] < 1, torch.maximum(threshold_S1, cut_S1), threshold_S1)
    return torch.where(torch.isinf(inverse_S1), -torch.inf, threshold_S1)[:, 0].float()


@kernel("hide_below", platform="any")
def hide_below(logits_SV: Tensor, threshold_S: Tensor) -> None:
    logits_SV.masked_fill_(logits_SV < threshold_S[:, None], -torch.inf)


@kernel("filtered_gumbel_argmax", platform="any")
def filtered_gumbel_argmax(
    logits_SV, inverse_temperature_S, top_k_S, top_p_S, min_p_S, seed_S, position_S, threshold_S, out_S
) -> None:
    threshold_S.copy_(compute_thresholds(logits_SV, inverse_temperature_S, top_k_S, top_p_S, min_p_S))
    left_SV = logits_SV.clone()
    hide_below(left_SV, threshold_S)
    gumbel_argmax(left_SV, inverse_temperature_S, seed_S, position_S, out_S)
