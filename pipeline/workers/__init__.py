"""Processes that run a stage: started here, on Ray, or joined from elsewhere; watched, counted and stopped."""
