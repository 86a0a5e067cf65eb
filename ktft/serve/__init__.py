"""Serving: experts of a model that an inference engine runs."""
