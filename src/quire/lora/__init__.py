"""Adapters: many fine-tunes of one base model, computed in one batch. `docs/lora.md` is the guide."""
