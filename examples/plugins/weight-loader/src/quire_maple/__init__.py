"""Adds the load format `maple` (`--load-format maple`): who reads the files of a checkpoint."""

from quire.config.load_formats import register_load_format


def register() -> None:
    """Quire calls this in each of its processes. The reader is named by its path: importing it imports torch."""
    register_load_format("maple", "quire_maple.reader:MapleReader")
