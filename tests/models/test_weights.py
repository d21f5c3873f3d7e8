"""Which tensors a checkpoint must hold, which slice each rank takes, and how they are put together."""

import json

import pytest
import torch
from safetensors.torch import load_file

from quire.config import HFConfig
from quire.errors import ConfigError
from quire.layers.assembly import Assembler, NormWeight
from quire.layers.decoder_layer import modules_of
from quire.layers.linear import UnquantizedLinear
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import canonical_name, check_names, sources_of
from quire.models.registry import ModelRegistry

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM", "OPTForCausalLM")


def assemble(path, plan=ParallelPlan()):  # noqa: B008 (frozen)
    """Every module's weight and bias as plain tensors, for one rank."""
    hf = HFConfig(json.loads((path / "config.json").read_bytes()))
    spec = ModelRegistry.resolve(hf.architectures).make_spec(hf)
    modules = modules_of(spec)
    sources = sources_of(modules, spec, plan)
    assembler = Assembler(sources, plan, torch.float32, torch.device("cpu"), UnquantizedLinear())
    finished = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        canonical = canonical_name(name, sources, spec)
        if canonical in sources and (done := assembler.add(canonical, tensor)):
            weight = done[1]
            if isinstance(weight, NormWeight):
                finished[done[0].name] = (weight.weight, weight.bias)
            elif isinstance(weight, torch.Tensor):
                finished[done[0].name] = (weight, None)
            else:
                finished[done[0].name] = (weight.data, weight.bias)
    assert not assembler.missing()
    return spec, {module.name: module for module in modules}, finished


@pytest.fixture(autouse=True)
def _kernels(reference_kernels):
    """Plain weights, which can be looked into."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_have_all_of_every_weight_between_them(architecture, tiny):
    path = tiny(architecture)
    _, modules, whole = assemble(path)
    ranks = [assemble(path, ParallelPlan(2, rank))[2] for rank in range(2)]
    for name, module in modules.items():
        (full, bias), pieces = whole[name], [rank[name] for rank in ranks]
        if module.shard == "none":
            assert all(torch.equal(piece, full) for piece, _ in pieces)
        elif module.shard == "columns":
            assert torch.equal(torch.cat([piece for piece, _ in pieces], dim=1), full)
            assert pieces[1][1] is None
            assert bias is None or torch.equal(pieces[0][1], bias)
        else:
            starts = torch.tensor([0, *[part.rows for part in module.parts]]).cumsum(0)
            for i in range(len(module.parts)):
                expected = full[starts[i] : starts[i + 1]]
                rows = expected.shape[0] // 2
                got = torch.cat([piece[i_start(module, i) : i_start(module, i) + rows] for piece, _ in pieces])
                assert torch.equal(got, expected)
            if bias is not None:
                assert sum(piece_bias.shape[0] for _, piece_bias in pieces) == bias.shape[0]


def i_start(module, part: int) -> int:
    """Where a part starts in the rows of one of two ranks."""
    return sum(p.rows for p in module.parts[:part]) // 2


def test_two_ranks_together_compute_what_one_computes(tiny):
    """Column-parallel, then row-parallel, then a sum: the plan of every tensor-parallel half layer."""
    path = tiny("LlamaForCausalLM", mlp_bias=True, attention_bias=True)
    _, _, whole = assemble(path)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def mlp(weights):
        (wide, wide_bias), (down, down_bias) = weights["layers.1.gate_up"], weights["layers.1.down"]
        gate, up = torch.nn.functional.linear(x, wide, wide_bias).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down, down_bias)

    summed = sum(mlp(assemble(path, ParallelPlan(2, rank))[2]) for rank in range(2))
    torch.testing.assert_close(summed, mlp(whole))


def test_a_kv_head_is_shared_where_there_are_fewer_than_ranks(tiny):
    path = tiny("LlamaForCausalLM", num_key_value_heads=1)
    _, _, whole = assemble(path)
    qkv, _ = whole["layers.0.qkv"]
    for rank in range(2):
        mine, _ = assemble(path, ParallelPlan(2, rank))[2]["layers.0.qkv"]
        assert torch.equal(mine[:32], qkv[rank * 32 : rank * 32 + 32])
        assert torch.equal(mine[32:], qkv[64:])


def test_query_heads_are_not_shared(tiny):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8 does not fit layers\.0\.out: it has 4 parts"):
        assemble(tiny("LlamaForCausalLM", num_key_value_heads=4), ParallelPlan(8, 0))


def test_a_size_that_does_not_divide_the_heads_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 does not fit layers\.0\.qkv: 4"):
        assemble(tiny("LlamaForCausalLM"), ParallelPlan(3, 0))


def test_an_odd_vocabulary_leaves_the_last_rank_fewer_tokens():
    slices = [ParallelPlan(4, rank).vocabulary(10) for rank in range(4)]
    assert [list(range(10))[piece] for piece in slices] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


class Watched:
    """A tensor that remembers what was read of it."""

    def __init__(self, tensor):
        self.tensor, self.values_read = tensor, 0

    def __getitem__(self, index):
        piece = self.tensor[index]
        self.values_read += piece.numel()
        return piece


def test_a_rank_reads_only_its_slice(tiny):
    path = tiny("LlamaForCausalLM")
    hf = HFConfig(json.loads((path / "config.json").read_bytes()))
    spec = ModelRegistry.resolve(hf.architectures).make_spec(hf)
    plan = ParallelPlan(2, 1)
    sources = sources_of(modules_of(spec), spec, plan)
    assembler = Assembler(sources, plan, torch.float32, torch.device("cpu"), UnquantizedLinear())
    for name, tensor in load_file(path / "model.safetensors").items():
        watched = Watched(tensor)
        assembler.add(name, watched)
        is_split = tensor.dim() == 2 and "embed_tokens" not in name
        assert watched.values_read == tensor.numel() // (2 if is_split else 1)


def test_names_are_found_under_every_prefix(tiny):
    spec, *_ = assemble(tiny("LlamaForCausalLM"))
    sources = sources_of(modules_of(spec), spec, ParallelPlan())
    for name in ("model.embed_tokens.weight", "embed_tokens.weight"):
        assert canonical_name(name, sources, spec) == "model.embed_tokens.weight"
    for name in ("lm_head.weight", "model.lm_head.weight"):
        assert canonical_name(name, sources, spec) == "lm_head.weight"
    assert canonical_name("model.tail.weight", sources, spec) == "model.tail.weight"


def test_missing_and_unexpected_names_are_both_listed(tiny):
    spec, *_ = assemble(tiny("LlamaForCausalLM"))
    sources = sources_of(modules_of(spec), spec, ParallelPlan())
    names = set(sources) - {"model.norm.weight", "lm_head.weight"} | {
        "model.norm.scale",
        "model.layers.0.rotary_emb.inv_freq",
    }
    with pytest.raises(ConfigError) as caught:
        check_names(sources, spec, names)
    message = str(caught.value)
    assert "Missing (2): lm_head.weight, model.norm.weight." in message
    assert message.endswith("Unexpected (1): model.norm.scale")


def test_a_tied_checkpoint_may_hold_a_head_all_the_same(tiny):
    spec, *_ = assemble(tiny("LlamaForCausalLM", tie_word_embeddings=True))
    sources = sources_of(modules_of(spec), spec, ParallelPlan())
    check_names(sources, spec, {*sources, "lm_head.weight"})
