"""Foreign frameworks, a module each; each needs the packages that its page names."""
