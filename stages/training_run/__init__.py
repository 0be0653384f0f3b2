"""Training runs that a configuration describes: its values, the stages it stands for, and the run itself."""
