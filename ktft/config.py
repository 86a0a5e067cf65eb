"""The only defaults, environment reads and validation."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
