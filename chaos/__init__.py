"""Random kills, stops and disconnections of pipelines, channels and journals; `python -m chaos` is the program."""
