"""Benchmarks: `quire bench NAME` runs the module NAME, which has `add_arguments` and `run_command`. The others serve them:

- all: `common`
- serve: `datasets` (what is asked), `arrivals` (when), `load` and `http_load` (sending), `serve_metrics`, `own_server`;
  throughput shares the `datasets`, client has a server that computes nothing, `sse_source`
- sweep, plot, compare_results: `results`
- frontend: `frontend_server`; with host a model that is not there, `stand_in`
- compare: `compare_child`

`quire models` checks architectures: `model_table`, over the checkpoints of `tiny_models` and `tiny_mixtures`.
"""
