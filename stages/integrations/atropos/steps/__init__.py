"""An Atropos environment as a step-wise one: its coroutines on one side, reset and step on the other."""
