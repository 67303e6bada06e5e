"""Messages of rank 0 to the other ranks."""

import json

import pytest

from penstock.runtime.errors import RanksError
from penstock.training.rank0 import Begin, End, Forward, Give, Refer, Train, receive, send


class Wire:
    """Ranks with one message in transit, as JSON."""

    text = ""

    def tell(self, message=None):
        if message is not None:
            self.text = json.dumps(message)
        return json.loads(self.text)


@pytest.mark.parametrize("message", [Begin(None), Train(3, 2, 1e-5), Forward(4, 64), Refer("a/b"), Give("w", "master"), End()])
def test_a_message_arrives_as_it_was_sent(message):
    wire = Wire()
    send(wire, message)
    assert receive(wire) == message


@pytest.mark.parametrize("text", ['{"do": "train"}', '{"message": "Leave"}', '{"message": "Train", "n": 1}', '{"message": []}'])
def test_an_unknown_message_is_rejected(text):
    wire = Wire()
    wire.text = text
    with pytest.raises(RanksError, match="unknown message"):
        receive(wire)
