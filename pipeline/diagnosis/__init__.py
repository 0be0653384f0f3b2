"""The diagnosis of a run: rules over its metrics, its samples and its configuration."""
