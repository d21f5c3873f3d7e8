"""A table of records, for the developers' benchmarks."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.benchmarks.common import print_columns


def print_records(title: str, columns: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> None:
    """Print results, from header to key; `step_us.median` is a key of a nested one."""

    def cell(record: Any, key: str) -> Any:
        for part in key.split("."):
            record = record[part]
        return record

    print_columns(title, tuple(columns), [[cell(record, key) for key in columns.values()] for record in records])
