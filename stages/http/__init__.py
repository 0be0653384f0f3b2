"""Requests to servers of others: retries, bounded answers, streams of completions. A server in the running loop."""
