"""The kinds of plugins: what each adds, the entry-point group through which it is found, and what its entry point names.

`quire plugins new` writes a package of a kind, and `examples/plugins` has one of each; docs/plugins.md has the same table.
"""

import dataclasses

from quire.plugins.discovery import (
    ENDPOINTS_GROUP,
    GENERAL_GROUP,
    IO_PROCESSORS_GROUP,
    LOGITS_PROCESSORS_GROUP,
    PLATFORM_GROUP,
    STAT_LOGGERS_GROUP,
)

EVERY, FRONTEND, WORKER = "every process", "frontend", "worker"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of plugin.

    Attributes:
        target: what the entry point names, within the package.
        adds: what such a plugin adds, for people.
        process: where it loads.
        example: the name of the example.
        door: where it registers what it adds, or the base of what it is.
    """

    name: str
    group: str
    target: str
    adds: str
    process: str
    example: str
    door: str


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "platform", PLATFORM_GROUP, "find", "a kind of device", EVERY, "oak", "quire.platforms.interface.Platform"
        ),
        Kind(
            "general",
            GENERAL_GROUP,
            "register",
            "environment variables, log fields, reports, metrics, defaults of settings",
            EVERY,
            "birch",
            "quire.plugins.vendor",
        ),
        Kind("model", GENERAL_GROUP, "register", "an architecture, as a table", EVERY, "acorn", "quire.ModelRegistry"),
        Kind(
            "model-class",
            GENERAL_GROUP,
            "register",
            "an architecture with modules of its own",
            EVERY,
            "beech",
            "quire.ModelRegistry",
        ),
        Kind(
            "quantization",
            GENERAL_GROUP,
            "register",
            "a number format of weights",
            EVERY,
            "cedar",
            "quire.quantization.registry.register_linear_method",
        ),
        Kind(
            "attention-backend",
            GENERAL_GROUP,
            "register",
            "attention over pages",
            EVERY,
            "elm",
            "quire.attention.selector.register_attention_backend",
        ),
        Kind(
            "kernel",
            GENERAL_GROUP,
            "register",
            "an operation's implementation",
            EVERY,
            "fir",
            "quire.kernels.registry.kernel",
        ),
        Kind(
            "weight-loader",
            GENERAL_GROUP,
            "register",
            "a format of checkpoint files",
            EVERY,
            "maple",
            "quire.config.load_formats.register_load_format",
        ),
        Kind(
            "tool-parser",
            GENERAL_GROUP,
            "register",
            "a format of tool calls",
            EVERY,
            "larch",
            "quire.parsers.plugin.register_tool_format",
        ),
        Kind(
            "reasoning-parser",
            GENERAL_GROUP,
            "register",
            "a format of reasoning",
            EVERY,
            "lime",
            "quire.parsers.plugin.register_reasoning_format",
        ),
        Kind(
            "lora-resolver",
            GENERAL_GROUP,
            "register",
            "a place where adapters are found by name",
            EVERY,
            "hazel",
            "quire.lora.resolver.LoRAResolverRegistry",
        ),
        Kind(
            "scheduler-policy",
            GENERAL_GROUP,
            "register",
            "an order of requests",
            EVERY,
            "willow",
            "quire.core.policies.POLICIES",
        ),
        Kind(
            "kv-connector",
            GENERAL_GROUP,
            "register",
            "a place for computed pages beside the device's cache",
            EVERY,
            "alder",
            "quire.config.kv_transfer.KV_CONNECTORS",
        ),
        Kind(
            "stat-logger",
            STAT_LOGGERS_GROUP,
            "Logger",
            "a listener to steps and requests",
            FRONTEND,
            "pine",
            "quire.engine.stat_loggers.StatLogger",
        ),
        Kind(
            "logits-processor",
            LOGITS_PROCESSORS_GROUP,
            "Processor",
            "edits of logits before sampling",
            WORKER,
            "rowan",
            "quire.sample.logits_processor.LogitsProcessor",
        ),
        Kind(
            "endpoint",
            ENDPOINTS_GROUP,
            "endpoints",
            "routes of the server",
            FRONTEND,
            "spruce",
            "quire.entrypoints.http.route_tools.Endpoint",
        ),
        Kind(
            "io-processor",
            IO_PROCESSORS_GROUP,
            "Processor",
            "an application's data in, its answers out",
            FRONTEND,
            "yew",
            "quire.engine.io_processor.IOProcessor",
        ),
    )
}
