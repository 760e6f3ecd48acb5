"""Commands about one captured layer: what it would hold, and whether it is right."""
