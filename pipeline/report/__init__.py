"""A page and pictures of what runs have written into their folders."""
