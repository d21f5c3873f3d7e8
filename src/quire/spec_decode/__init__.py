"""Speculation on the device: verifying drafts, and models that make them. Plans are `core/drafting.py`'s."""
