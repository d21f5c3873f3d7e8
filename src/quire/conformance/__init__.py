"""The contract of a platform as named checks, which a vendor runs against a plugin: `quire conformance --platform NAME`.

`contract.py` says what a check is and what it may find; `suite.py` runs checks in processes of their own; `report.py` tells. The
checks are in `device_checks.py` and the files named like it; `cases/` draws what kernels are compared on. Needs nothing that
Quire itself does not need.
"""
