"""The scripts behind every number that README and docs quote."""
