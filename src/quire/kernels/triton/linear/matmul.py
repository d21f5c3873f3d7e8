"""Matrix products on an NVIDIA GPU: packs weights and sends each product to the kernel for its number of rows.

A few rows go to `gemv.py`, tens to `dot.py`, more to cuBLAS with norms, activations and sums of their own. With
`is_invariant` every row is multiplied in one way, whatever their number.
"""

import torch

from quire.kernels import ops
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import two_ways
from quire.kernels.triton.linear import configs as linear_configs
from quire.kernels.triton.linear.configs import Config, DotConfig, GemvConfig
from quire.kernels.triton.linear.dot import launch_dot, split_workspace
from quire.kernels.triton.linear.gemv import launch_gemv
from quire.kernels.triton.norm.activations import KINDS
from quire.kernels.types import LinearWeight

MANY_ROWS = 512
"""From here on zeros behind every row cost less than a kernel that reads them as they are."""


def _matrix(weight: LinearWeight) -> torch.Tensor:
    if weight.data is None:
        raise ValueError("this weight was packed by another kernel: choose `linear` and `pack_linear` together")
    return weight.data


@kernel("pack_linear", platform="cuda", priority=10)
def pack_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> LinearWeight:
    """As `ops.pack_linear`: the matrix stays as it is; `packed` is the bias in the matrix's type, for cuBLAS."""
    split_workspace(weight_NK.device)
    bias = None if bias_N is None else bias_N.float().contiguous()
    packed = None if bias is None else bias.to(weight_NK.dtype)
    return LinearWeight(*weight_NK.shape, weight_NK.dtype, weight_NK.contiguous(), packed, bias)


def _multiply(
    config: Config,
    x_TK: torch.Tensor,
    weight: LinearWeight,
    out_TN: torch.Tensor,
    *,
    norm_K: torch.Tensor | None = None,
    eps: float = 0.0,
    scratch_TK: torch.Tensor | None = None,
    kind: int = -1,
    add: bool = False,
) -> None:
    """Launch the kernel that the configuration is for.

    Raises:
        ValueError: rows that lie apart.
    """
    if not (x_TK.is_contiguous() and out_TN.is_contiguous()):
        raise ValueError(f"rows must lie together; strides are {x_TK.stride()} and {out_TN.stride()}")
    matrix = _matrix(weight)
    if norm_K is not None and scratch_TK is not None and isinstance(config, DotConfig) and config.norms_first:
        ops.rms_norm(x_TK, norm_K, eps, scratch_TK)
        x_TK, norm_K = scratch_TK, None
    if isinstance(config, GemvConfig):
        launch_gemv(
            x_TK,
            norm_K,
            eps,
            matrix,
            weight.bias,
            out_TN,
            kind=kind,
            add=add,
            block_n=config.block_n,
            block_k=config.block_k,
            num_warps=config.num_warps,
        )
    elif isinstance(config, DotConfig):
        launch_dot(
            x_TK,
            norm_K,
            eps,
            matrix,
            weight.bias,
            out_TN,
            kind=kind,
            add=add,
            block_t=config.block_t,
            block_n=config.block_n,
            block_k=config.block_k,
            split=config.split,
            stages=config.stages,
            num_warps=config.num_warps,
        )


def _choose(
    x_TK: torch.Tensor, weight: LinearWeight, is_invariant: bool, is_pair: bool = False, is_normed: bool = False
) -> Config:
    if is_invariant:
        return linear_configs.INVARIANT_FLOAT if weight.dtype == torch.float32 else linear_configs.INVARIANT
    n = weight.out_features // 2 if is_pair else weight.out_features
    item_size = weight.dtype.itemsize
    return linear_configs.choose(x_TK.shape[0], n, weight.in_features, is_pair, is_normed, item_size)


# With cuBLAS.


def _operands(x_TK: torch.Tensor, weight: LinearWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the matrix [K, N]; rows that are no multiple of 16 bytes, which cuBLAS's fast kernels need, get zeros behind."""
    matrix_NK, x_TK = _matrix(weight), x_TK.to(weight.dtype)
    if x_TK.shape[0] >= MANY_ROWS and (beyond := x_TK.shape[1] % (16 // x_TK.itemsize)):
        zeros = (0, 16 // x_TK.itemsize - beyond)
        x_TK, matrix_NK = torch.nn.functional.pad(x_TK, zeros), torch.nn.functional.pad(matrix_NK, zeros)
    return x_TK, matrix_NK.t()


def _library_linear(x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
    x_TK, matrix_KN = _operands(x_TK, weight)
    if out_TN.dtype == weight.dtype:
        if weight.packed is None:
            torch.mm(x_TK, matrix_KN, out=out_TN)
        else:
            torch.addmm(weight.packed, x_TK, matrix_KN, out=out_TN)
        return
    if out_TN.dtype == torch.float32 and out_TN.is_cuda:
        torch.mm(x_TK, matrix_KN, out_dtype=torch.float32, out=out_TN)
    else:
        out_TN.copy_(torch.mm(x_TK, matrix_KN))
    if weight.bias is not None:
        out_TN.add_(weight.bias)


def _library_add(x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor) -> None:
    x_TK, matrix_KN = _operands(x_TK, weight)
    is_same = residual_TN.dtype == weight.dtype
    bias = weight.packed if is_same else weight.bias
    if bias is not None:
        residual_TN.add_(bias)
    if is_same:
        residual_TN.addmm_(x_TK, matrix_KN)
    else:
        residual_TN.add_(torch.mm(x_TK, matrix_KN))


# Whichever is fastest for the number of rows, or one way for all.


@two_ways("linear")
def linear(x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor, *, is_invariant: bool = False) -> None:
    """As `ops.linear`."""
    if not x_TK.shape[0]:
        return
    config = _choose(x_TK, weight, is_invariant)
    if config is None:
        _library_linear(x_TK, weight, out_TN)
    else:
        _multiply(config, x_TK, weight, out_TN)


@two_ways("norm_linear")
def norm_linear(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: LinearWeight,
    out_TN: torch.Tensor,
    scratch_TD: torch.Tensor,
    *,
    is_invariant: bool = False,
) -> None:
    """As `ops.norm_linear`."""
    if not x_TD.shape[0]:
        return
    config = _choose(x_TD, weight, is_invariant, is_normed=True)
    if config is None:
        ops.rms_norm(x_TD, norm_D, eps, scratch_TD)
        _library_linear(scratch_TD, weight, out_TN)
    else:
        _multiply(config, x_TD, weight, out_TN, norm_K=norm_D, eps=eps, scratch_TK=scratch_TD)


@two_ways("norm_linear_gated")
def norm_linear_gated(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight: LinearWeight,
    kind: str,
    out_TI: torch.Tensor,
    scratch_TD: torch.Tensor,
    scratch_T2I: torch.Tensor,
    *,
    is_invariant: bool = False,
) -> None:
    """As `ops.norm_linear_gated`."""
    if not x_TD.shape[0]:
        return
    config = _choose(x_TD, weight, is_invariant, is_pair=True, is_normed=True)
    if config is None:
        ops.rms_norm(x_TD, norm_D, eps, scratch_TD)
        _library_linear(scratch_TD, weight, scratch_T2I)
        ops.gated_activation(scratch_T2I, kind, out_TI)
    else:
        _multiply(config, x_TD, weight, out_TI, norm_K=norm_D, eps=eps, scratch_TK=scratch_TD, kind=KINDS.index(kind))


@two_ways("linear_add")
def linear_add(
    x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, *, is_invariant: bool = False
) -> None:
    """As `ops.linear_add`."""
    if not x_TK.shape[0]:
        return
    config = _choose(x_TK, weight, is_invariant)
    if config is None:
        _library_add(x_TK, weight, residual_TN)
    else:
        _multiply(config, x_TK, weight, residual_TN, add=True)
