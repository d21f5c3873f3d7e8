"""Plugins: packages that add to Quire through entry points, and the registries that they add to.

Found by name, filtered by `QUIRE_PLUGINS`, loaded once. See docs/plugins.md.
"""

from quire.plugins.discovery import (
    ENDPOINTS_GROUP,
    GENERAL_GROUP,
    GROUPS,
    IO_PROCESSORS_GROUP,
    LOGITS_PROCESSORS_GROUP,
    PATCHES_GROUP,
    PLATFORM_GROUP,
    STAT_LOGGERS_GROUP,
    Plugin,
    discover,
    find_plugins,
    load,
    load_general_plugins,
    load_plugins,
)
from quire.plugins.registry import Registry, current_owner, registries

__all__ = [
    "ENDPOINTS_GROUP",
    "GENERAL_GROUP",
    "GROUPS",
    "IO_PROCESSORS_GROUP",
    "LOGITS_PROCESSORS_GROUP",
    "PATCHES_GROUP",
    "PLATFORM_GROUP",
    "STAT_LOGGERS_GROUP",
    "Plugin",
    "Registry",
    "current_owner",
    "discover",
    "find_plugins",
    "load",
    "load_general_plugins",
    "load_plugins",
    "registries",
]
