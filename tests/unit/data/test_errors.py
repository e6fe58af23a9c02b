"""The message of a user error."""

from __future__ import annotations

import pickle

from megatron_hetero.errors import UserError


def test_the_message_tells_the_whole_story_and_survives_pickling() -> None:
    error = UserError.at("train.jsonl:3", found="a", expected="b", because="c", fix="do d")
    assert str(error) == "train.jsonl:3: found a, expected b, because c. Do d."
    assert str(UserError.at("x", found="a", expected="b", fix="is it d?")) == "x: found a, expected b. Is it d?"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, ValueError)
