"""Triton's penalties, edits and allowed tokens against their references, to the bit."""

import torch
from tests.oracles.operations import sampling as reference

from quire.kernels.triton.sampling import penalties

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # noqa: TID251
S, X, V = 6, 4, 2500


def slots() -> torch.Tensor:
    return torch.tensor([2, -1, 0, 3, -1, 1], dtype=torch.int32, device=DEVICE)


def seen_table() -> list[torch.Tensor]:
    ids_XC = torch.stack([torch.randperm(V)[:1300] for _ in range(X)]).int()
    counts_XC = torch.randint(0, 3, (X, 1300), dtype=torch.int32)
    sizes_X = torch.tensor([1234, 0, 5, 17], dtype=torch.int32)
    return [ids_XC.to(DEVICE), counts_XC.to(DEVICE), sizes_X.to(DEVICE)]


def test_penalties_equal_the_reference():
    logits_SV, table = torch.randn(S, V, device=DEVICE) * 3, seen_table()
    columns = [(torch.rand(S) + 0.5).to(DEVICE), torch.randn(S).to(DEVICE), torch.randn(S).to(DEVICE)]
    expected_SV = logits_SV.clone()
    before_SV = logits_SV.clone()
    penalties.penalize(logits_SV, slots(), *columns, *table, 1234)
    reference.penalize(expected_SV, slots(), *columns, *table, 1234)
    assert torch.equal(logits_SV, expected_SV)
    assert torch.equal(logits_SV[1], before_SV[1])
    assert (logits_SV[2] != before_SV[2]).sum() > 1000


def test_new_and_known_tokens_are_counted_where_they_belong():
    tables = [seen_table() for _ in range(2)]
    tables[1] = [part.clone() for part in tables[0]]
    last = int(tables[0][0][0, 1233])
    for token in (3, 3, last, 7, V - 1):
        token_ids_S = torch.full((S,), token, dtype=torch.int32, device=DEVICE)
        penalties.count_tokens(token_ids_S, slots(), *tables[0])
        reference.count_tokens(token_ids_S, slots(), *tables[1])
    assert tables[0][2].tolist() == tables[1][2].tolist()
    for slot, size in enumerate(tables[0][2].tolist()):
        for part in range(2):
            assert torch.equal(tables[0][part][slot, :size], tables[1][part][slot, :size])


def test_edits_equal_the_reference_before_and_after_their_position():
    ids_XE = torch.full((X, 600), -1, dtype=torch.int32, device=DEVICE)
    ids_XE[:, :520] = torch.randperm(V, device=DEVICE)[:520].int()
    values_XE = torch.randn(X, 600, device=DEVICE)
    until_XE = torch.tensor([0, 7, 5, 2**31 - 1], dtype=torch.int32, device=DEVICE).repeat(X, 150).contiguous()
    position_S = torch.arange(3, 3 + S, dtype=torch.int32, device=DEVICE)
    logits_SV = torch.randn(S, V, device=DEVICE)
    expected_SV = logits_SV.clone()
    penalties.edit_logits(logits_SV, slots(), position_S, ids_XE, values_XE, until_XE)
    reference.edit_logits(expected_SV, slots(), position_S, ids_XE, values_XE, until_XE)
    assert torch.equal(logits_SV, expected_SV)
    assert logits_SV.isinf().any()


def test_only_allowed_tokens_are_kept():
    allowed_XW = torch.randint(-(2**31), 2**31, (X, -(-V // 32))).int().to(DEVICE)
    logits_SV = torch.randn(S, V, device=DEVICE)
    expected_SV = logits_SV.clone()
    penalties.keep_allowed(logits_SV, slots(), allowed_XW)
    reference.keep_allowed(expected_SV, slots(), allowed_XW)
    assert torch.equal(logits_SV, expected_SV)
    assert 0 < logits_SV[0].isinf().sum() < V
