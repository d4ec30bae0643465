"""What a server publishes is what vLLM's own types read, field by field; no engine is needed for that."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.keys import Identity, KeyChain, as_tokens, seed
from lmtier.format.layout import Layout, form_of
from lmtier.observe.journal import Journal
from lmtier.observe.prompts import Origin, Prompts
from lmtier.server.events import Publisher

C = 16
LAYOUT = Layout.uniform(
    layers=1, heads=1, head_dim=64, dtype="bf16", block_tokens=C, chunk_tokens=C, packing="token"
)
FORM = form_of(LAYOUT, (LAYOUT.whole,))
TOKENS = list(range(1000, 1000 + 3 * C))


def test_vllms_subscriber_reads_stores_and_removals(tmp_path: Path) -> None:
    keys = KeyChain(seed(Identity(model="m", weights="w"), C, lora="sql", salt="s"), C, TOKENS).keys
    hashes = [maybe_convert_block_hash(BlockHash(key)) for key in keys]
    cache = Cache(
        Config(tiers=("cpu://?capacity=1MiB", f"disk://{tmp_path}/kv?capacity=1MiB"), chunk_tokens=C)
    )
    prompts, journal = Prompts(C), Journal()
    cache.followers.add(journal)
    prompts.add(keys, as_tokens(TOKENS).tobytes(), Origin.of({}, "sql", "s"))
    places = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = Publisher(cache, journal, prompts, *places, "topic")
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger = 0
        replay.connect(f"ipc://{tmp_path}/replay")
        cache.commit(cache.reserve(keys, FORM))
        assert cache.flush()
        publisher.turn()
        cache.clear()
        publisher.turn()
        publisher.resend_all()
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        batches: list[KVEventBatch] = []
        until = time.monotonic() + 20
        while len(batches) < 3 and time.monotonic() < until:
            batches.clear()
            replay.send_multipart((b"", bytes(8)))
            while (frames := replay.recv_multipart())[2] != b"\xff" * 8 and len(frames) == 4:
                assert frames[1] == b"topic"
                assert int.from_bytes(frames[2], "big") == len(batches)
                batches.append(decoder.decode(frames[3]))
    publisher.close()
    cache.close()

    memory, *disk = batches[0].events  # chunks come to the disk in any order
    expected = BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=TOKENS,
        block_size=C,
        lora_id=None,
        medium="CPU",
        lora_name="sql",
        extra_keys=[("sql", "s"), ("sql",), ("sql",)],
        locality="LOCAL",
    )
    assert memory == expected
    assert {(each.medium, each.ownership, each.locality) for each in disk} == {("STORAGE", None, "LOCAL")}
    assert {key for each in disk for key in each.block_hashes} == {*hashes}
    assert batches[1].events[0] == BlockRemoved(block_hashes=hashes, medium="CPU", locality="LOCAL")
    assert batches[1].events[1].medium == "STORAGE"
    assert sorted(batches[1].events[1].block_hashes) == sorted(hashes)
    assert batches[2].events == [AllBlocksCleared()]
    assert abs(batches[0].ts - time.time()) < 60
