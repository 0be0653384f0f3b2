"""A reward for the test of a configured run."""


def words(completions: list[str], **_columns: object) -> list[float]:
    """Return the number of different words of each completion."""
    return [float(len(set(text.split()))) for text in completions]
