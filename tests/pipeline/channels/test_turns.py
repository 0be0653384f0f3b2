"""The messages that are handled in one turn are bounded in number and in bytes."""

from penstock._pipeline.channels.turns import Share, Turn, TurnOfEach


def test_a_turn_is_over_after_a_number_of_messages_of_all_connections() -> None:
    turn = Turn(Share(messages=2, nbytes=100))

    turn.spend(b"a", 1)
    assert not turn.over
    turn.spend(b"b", 1)
    assert turn.over


def test_a_turn_is_over_after_a_number_of_bytes() -> None:
    turn = Turn(Share(messages=10, nbytes=100))

    turn.spend(b"a", 1000)
    assert turn.over


def test_a_turn_of_each_is_over_when_one_connection_has_had_its_share_of_messages() -> None:
    turn = TurnOfEach(Share(messages=2, nbytes=100), refuse=lambda _: None)

    for identity in (b"a", b"b", b"c"):
        turn.spend(identity, 1)
    assert not turn.over
    turn.spend(b"b", 1)
    assert turn.over


def test_a_connection_that_sends_more_bytes_than_its_share_is_refused_and_the_others_go_on() -> None:
    refused: list[bytes] = []
    turn = TurnOfEach(Share(messages=10, nbytes=100), refused.append)

    turn.spend(b"a", 100)
    assert not refused
    turn.spend(b"a", 1)
    turn.spend(b"b", 1)
    assert refused == [b"a"]
    assert not turn.over
