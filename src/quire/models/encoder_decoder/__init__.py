"""Specs of models with an encoder beside their decoder."""
