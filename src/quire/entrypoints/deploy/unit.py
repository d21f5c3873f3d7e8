"""A unit of systemd: a service that starts with the machine, with its own user, and drains before it ends."""

from quire.entrypoints import exit_codes
from quire.entrypoints.deploy.plan import Plan


def unit(plan: Plan, command: str, folder: str, key_file: str) -> str:
    """The unit's text.

    Args:
        command: the absolute path of `quire`.
        folder: in which the words' relative paths begin.
        key_file: used unless the words name another one.
    """
    keys = [] if any(word.startswith("--api-key-file") for word in plan.words) else ["--api-key-file", "%d/api-keys"]
    words = [_quoted(word) for word in (command, "serve", *plan.words)]
    lines = {
        "Unit": [
            f"Description=Quire, a server for large language models ({_plain(plan.name)})",
            "Wants=network-online.target",
            "After=network-online.target",
        ],
        "Service": [
            "Type=exec",
            f"ExecStart={' '.join([*words, *keys])}",
            f"WorkingDirectory={_plain(folder)}",
            *([f"LoadCredential=api-keys:{_plain(key_file)}"] if keys else []),
            "DynamicUser=yes",
            "CacheDirectory=quire",
            "Environment=HF_HOME=%C/quire/hub QUIRE_CACHE_ROOT=%C/quire",
            "Restart=on-failure",
            "RestartSec=2",
            f"RestartPreventExitStatus={exit_codes.WRONG_ARGUMENT}",
            "# Only the main process is told to end: its children end with it.",
            "KillMode=mixed",
            f"TimeoutStopSec={plan.stop_s}",
            "LimitNOFILE=65536",
            "LimitMEMLOCK=infinity",
            "NoNewPrivileges=yes",
            "PrivateTmp=yes",
            "ProtectSystem=strict",
            "ProtectHome=read-only",
        ],
        "Install": ["WantedBy=multi-user.target"],
    }
    return "\n\n".join("\n".join([f"[{section}]", *own]) for section, own in lines.items()) + "\n"


def _plain(text: str) -> str:
    """Text outside of a command, where `%` has a meaning."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of ExecStart: `%` and `$` are its own, quotes keep spaces."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if not word or any(char in word for char in " \t'\"\\;") else escaped
