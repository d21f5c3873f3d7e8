"""The demo model for training: a plain Llama whose parameters carry the names of Hugging Face checkpoints.

A batch is one stream of T tokens: documents end to end, attention within each (`starts` says where they begin).
Legend: T tokens, N query heads, K KV heads, H head size, D hidden, V vocabulary. Knows no data and no schedule.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoConfig:
    """Shape of the model; the defaults are the shipped one: 7.6 million parameters, 14.5 MiB in bfloat16."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 9
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 4096

    def to_hf(self) -> dict[str, object]:
        """The `config.json` of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rotate(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotary position embedding, halves convention, as in Llama's checkpoints."""
    first, second = x_TNH.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_TNH.float() * cos_TH[:, None] + turned * sin_TH[:, None]).to(x_TNH.dtype)


def document_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention within each document.

    Args:
        starts: (documents + 1,) int32 offsets of the documents in the stream, the last one T.
        longest: no document is longer than this.
    """
    if q_TNH.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        if "is_causal" in inspect.signature(varlen_attn).parameters:
            return varlen_attn(q_TNH, k_TNH, v_TNH, starts, starts, longest, longest, is_causal=True)
        return varlen_attn(q_TNH, k_TNH, v_TNH, starts, starts, longest, longest, window_size=(-1, 0))
    tokens = q_TNH.shape[0]
    place = torch.arange(tokens, device=q_TNH.device)
    document = torch.searchsorted(starts.to(torch.int64), place, right=True)
    visible_TT = (document[:, None] == document[None]) & (place[:, None] >= place[None])
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_TNH, v_TNH))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible_TT)[0].transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, longest: int) -> Tensor:
        tokens, head_dim = x_TD.shape[0], self.config.head_dim
        group = self.config.num_heads // self.config.num_kv_heads
        q_TNH = rotate(self.q_proj(x_TD).view(tokens, -1, head_dim), cos, sin)
        k_TKH = rotate(self.k_proj(x_TD).view(tokens, -1, head_dim), cos, sin)
        v_TKH = self.v_proj(x_TD).view(tokens, -1, head_dim)
        k_TNH, v_TNH = k_TKH.repeat_interleave(group, dim=1), v_TKH.repeat_interleave(group, dim=1)
        out_TNH = document_attention(q_TNH, k_TNH, v_TNH, starts, longest)
        return self.o_proj(out_TNH.reshape(tokens, -1))


class MLP(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, longest: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, starts, longest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class DemoModel(nn.Module):
    """The language model; `forward` gives the mean loss over the tokens that have a target."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        exponent = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(config.max_positions).float(), config.rope_theta**-exponent)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = (2 * config.num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor, starts: Tensor, longest: int) -> Tensor:
        cos, sin = self.cos[positions], self.sin[positions]
        x_TD = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x_TD = layer(x_TD, cos, sin, starts, longest)
        logits_TV = F.linear(self.model.norm(x_TD), self.model.embed_tokens.weight)
        return F.cross_entropy(logits_TV.float(), targets, ignore_index=-100)
