"""A federation of real machines over Flower: its folder, its keys, its gate, its commands."""
