"""Messages over a store, in one process: torch's HashStore, with a sender and a receiver."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from smp_lite.comm.transports.mailbox import PART_BYTES, Mailbox


@pytest.mark.parametrize("size", [1, 2 * PART_BYTES], ids=["one part", "parts"])
def test_messages_keep_their_order_whichever_is_polled_first(size: int) -> None:
    store = dist.HashStore()
    sender, receiver = (Mailbox(store, rank, "here") for rank in range(2))
    messages = [bytes([i]) * size for i in range(3)]
    posted = [sender.post(message, 1, 0, until_taken=False) for message in messages]
    found: list[bytes] = []
    for _ in range(20):
        for pending in reversed(posted):
            pending.done()
        if (message := receiver.take(0, 0)) is not None:
            found.append(message)
    assert found == messages
    assert all(pending.done() for pending in posted)
