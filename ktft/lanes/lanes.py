"""What all layers of a model share to run their experts in several lanes."""
