"""What a chunk costs the index: to be evicted, added and used, at a million chunks.

    python bench/evicting.py auto 1000000

`lru` and `arc` are there to compare with. To compare with another tree of lmtier, run it once with PYTHONPATH
set to that tree, in turns.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: PYTHONPATH may name another tree

import lmtier
from bench import rivals
from lmtier.core.index import Index
from lmtier.core.match import Entry, EntryState
from lmtier.format.layout import form_of
from lmtier.rules.policy import make_policy
from lmtier.testing import opaque_layout
from lmtier.tools.terminal import say

RUN = 20  # chunks of a prompt
PAGE = 4096
PROMPTS = 10_000


def main(policy: str, chunks: int) -> None:
    rivals.add()
    layout = opaque_layout(PAGE)
    form = form_of(layout, [layout.whole])
    index = Index(chunks * PAGE, make_policy(policy))

    def ask(prompt: int) -> None:
        run: list[Entry] = []
        for key in keys[prompt]:
            run.append(index.add(key, form, PAGE, EntryState.READY, run[-1] if run else None))
        if prompt % 3 == 0:
            index.touch(run)

    dice = random.Random(1)
    keys = [[dice.randbytes(32) for _ in range(RUN)] for _ in range(chunks // RUN + PROMPTS)]
    gc.disable()
    for prompt in range(chunks // RUN):
        ask(prompt)
    began = time.process_time()
    for prompt in range(chunks // RUN, chunks // RUN + PROMPTS):
        index.evict(RUN * PAGE)
        ask(prompt)
    each = (time.process_time() - began) / PROMPTS / RUN
    say(f"{lmtier.__path__[0]}: {policy}, {chunks:,} chunks: {1e6 * each:.2f} µs a chunk")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
