"""A sealed disk tier beside an unsealed one: what encryption takes of the speed of a disk.

Two caches with the same settings but for the seal, each with its own directory on the same disk, take turns.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from lmtier.config import Config
from lmtier.core.cache import Cache
from lmtier.format.compression import MissingLibrary
from lmtier.format.layout import form_of, stored_size
from lmtier.format.sealing import library
from lmtier_bench import Samples, Scale
from lmtier_bench.copies import CHUNK_TOKENS, large_layout, paired
from lmtier_bench.disk import PATIENCE, READERS, SETS, WRITERS, ChunkSets

_KEY = "KV_BENCH_KEY"  # not of our prefix, which is for settings


def store_and_load(scale: Scale) -> Samples:
    try:
        library()
    except MissingLibrary:
        return
    os.environ[_KEY] = os.urandom(32).hex()
    layout = large_layout(scale.large_layers)
    form = form_of(layout, [layout.whole])
    chunks, room = scale.disk_chunks // 2, form.slab_bytes  # there are two of everything
    nbytes = chunks * room
    with ExitStack() as stack:

        def opened(name: str, seal: str) -> ChunkSets:
            tiers = (
                f"cpu://?capacity={2 * nbytes}&policy=lru",
                f"disk://{scale.directory}/{name}?capacity={SETS * chunks * stored_size(room)}"
                f"&policy=lru&readers={READERS}&writers={WRITERS}{seal}",
            )
            config = Config(chunk_tokens=CHUNK_TOKENS, tiers=tiers, prefault=False, load_deadline=PATIENCE)
            cache = stack.enter_context(Cache(config))
            cache.slab.prefault()
            return ChunkSets(cache, form, chunks)

        plain = opened("plain", "")
        sealed = opened("sealed", f"&seal=aes-256-gcm&key=env:{_KEY}")
        for _ in range(SETS + 3):  # the slabs and the disks are full, and every file is there
            plain.store()
            sealed.store()
        for number in range(2 * scale.disk_rounds):
            for path, ours, limit in (
                ("sealed store to disk, against unsealed", sealed.store, plain.store),
                ("sealed load from disk, against unsealed", sealed.load, plain.load),
            ):
                yield paired(path, nbytes, number, ours, limit)
