"""Random kills, stops and cuts over pipelines, channels and journals; `python -m chaos` is the program."""
