"""Triton's logprobs, ranks and alternatives against sorted rows."""

import pytest
import torch
from tests.oracles.operations import sampling as reference

from quire.kernels.triton.sampling import logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251


def run(module, logits_SV, index_N, token_ids_N, normalize, count):
    number = len(index_N)
    values_NK = torch.empty(number, count + 1, device=DEVICE)
    ids_NK = torch.empty(number, count + 1, dtype=torch.int32, device=DEVICE)
    ranks_N = torch.empty(number, dtype=torch.int32, device=DEVICE)
    module.token_logprobs(logits_SV, index_N, token_ids_N, normalize, values_NK, ids_NK, ranks_N)
    return values_NK, ids_NK, ranks_N


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("vocabulary", "count"), [(5, 5), (97, 0), (97, 64), (1500, 20), (9000, 7), (9000, 64)])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_logprobs_equal_the_reference(vocabulary, count, normalize, is_coarse):
    generator = torch.Generator().manual_seed(count)
    logits_SV = (torch.randn(4, vocabulary, generator=generator) * 3).to(DEVICE)
    if is_coarse:
        logits_SV = logits_SV.round() + 0.0
    index_N = torch.tensor([3, 0, 3], dtype=torch.int32, device=DEVICE)
    token_ids_N = torch.tensor([1, 4, vocabulary - 1], dtype=torch.int32, device=DEVICE)
    seen = run(logprobs, logits_SV, index_N, token_ids_N, normalize, count)
    expected = run(reference, logits_SV, index_N, token_ids_N, normalize, count)
    torch.testing.assert_close(seen[0], expected[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(seen[1], expected[1])
    assert torch.equal(seen[2], expected[2])


def test_hidden_tokens_have_minus_infinity():
    logits_SV = torch.full((1, 300), -float("inf"), device=DEVICE)
    logits_SV[0, 200] = 1.0
    index_N, token_ids_N = (
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        torch.full_like(logits_SV[0, :1], 200).int(),
    )
    values_NK, ids_NK, ranks_N = run(logprobs, logits_SV, index_N, token_ids_N, True, 2)
    assert values_NK[0].tolist() == [0.0, 0.0, -float("inf")]
    assert ids_NK[0, :2].tolist() == [200, 200]
    assert ranks_N.tolist() == [1]
