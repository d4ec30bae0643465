"""Prefixes that outlive `generate`: Hugging Face models load the KV of known prompts, save that of new ones.

with PrefixCache(model, "cpu://?capacity=4GiB", "disk:///var/cache/lmtier?capacity=50GiB") as store:
    answer = store.generate(input_ids, max_new_tokens=64)

cache_for   looks the prompts up; what is stored of them is in the cache's layers before the model runs
update      saves the whole chunks of the prompts, layer by layer, as the model computes them
commit      with the last layer: a forward that does not come to its end leaves nothing behind

prefix_cache    what a user opens
stored_cache    the cache of one `generate`, and when it saves
buffer          what is loaded and saved goes through it
places          where the buffer lies: in CPU memory or on a GPU
states          what layers without KV keep: read, written, stored, loaded
prefill         computes prompts up to places where a state is stored
model           what kind of model this is, and whether it can be served
"""

from lmtier_integrations.transformers.prefix_cache import PrefixCache
from lmtier_integrations.transformers.stored_cache import StoredCache, StoredDynamicCache, StoredStaticCache

__all__ = ["PrefixCache", "StoredCache", "StoredDynamicCache", "StoredStaticCache"]
