"""Benchmarks: `quire bench NAME` runs the module NAME, which has `add_arguments` and `run_command`. The others serve them:

- all: `common`
- serve: `datasets` (what is asked), `arrivals` (when), `load` and `http_load` (sending), `serve_metrics`, `own_server`;
  throughput shares the `datasets`
- sweep, plot, compare_results: `results`

Benchmarks for developers of Quire are in the checkout's `bench/`.
"""
