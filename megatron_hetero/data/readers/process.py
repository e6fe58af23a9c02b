"""A process that reads for a rank: `python -m megatron_hetero.data.readers.process DESCRIPTOR`, started by
`processes`. It ends with its rank, however that ends, since the socket between them closes.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from typing import Any

from megatron_hetero.data.readers.messages import Answer, receive, send
from megatron_hetero.errors import UserError


def main(descriptor: int) -> None:
    """Receive a reader, then calls of its methods (name, argument) until the rank ends, and answer each."""
    with socket.socket(fileno=descriptor) as rank:
        try:
            reader = receive(rank)
            while True:
                send(rank, _answer(reader, *receive(rank)))
        except (EOFError, ConnectionError):  # It has.
            return


def _answer(reader: Any, method: str, argument: Any) -> Answer:
    try:
        return Answer(getattr(reader, method)(argument))
    except UserError as error:
        return Answer(refusal=str(error))
    except Exception:
        return Answer(trace=traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # There is nothing to save, and taking the libraries down may take a second.
