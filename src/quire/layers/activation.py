"""From the names that checkpoints use for activations to the kinds that kernels know."""

from quire.errors import ConfigError

KERNEL_KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "relu_squared": "relu2",
    "xielu": "xielu",
    **{
        name: name
        for name in (
            "quick_gelu",
            "gelu_10",
            "relu6",
            "leaky_relu",
            "sigmoid",
            "tanh",
            "mish",
            "hardswish",
            "linear",
            "laplace",
            "sqrtsoftplus",
        )
    },
}


def kernel_activation(name: str) -> str:
    """The kernel's kind for a checkpoint's activation.

    Raises:
        ConfigError: unknown; lists the known ones.
    """
    kind = KERNEL_KINDS.get(name)
    if kind is None:
        raise ConfigError(
            f"activation {name!r} of config.json is not known; known: {', '.join(KERNEL_KINDS)}", setting="model"
        )
    return kind
