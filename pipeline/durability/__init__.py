"""State that outlives a process: the journal, and the folder of a run."""
