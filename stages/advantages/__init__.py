"""From rewards to advantages: pure functions over packed columns; no stage, no model."""
