"""A real vLLM loads what it would compute later, and computes what would come later."""

from __future__ import annotations

import itertools

import pytest

from lmtier.client.client import Client
from tests.redis_process import Proxy, running
from tests.server.process import until
from tests.vllm.conftest import CacheServer, prompts_of, transfer
from tests.vllm.engine import Engine

RECOVERY = 120.0
CRAWL = 100e3  # bytes a second: a prompt takes forty


@pytest.mark.parametrize("where", ["lmtier_integrations.vllm", "tests.vllm.simulated"], ids=["cpu", "gpu"])
def test_a_crawling_tier_makes_it_compute_until_it_recovers(models, tmp_path, where):
    prompts = prompts_of(*[1100] * 8)
    with running(tmp_path / "redis") as redis, Proxy(redis.address) as link:
        tiers = ("cpu://?capacity=8MiB&policy=lru", f"redis://127.0.0.1:{link.port}?deadline=60s")
        server = CacheServer(tmp_path, *tiers, worth="auto")
        try:
            connector = transfer(server=str(server.path))
            connector["kv_connector_module_path"] = where
            with Engine(
                tmp_path, models / "qwen2", transfer=connector, enable_prefix_caching=False
            ) as engine:

                def ask(prompt):
                    (answer,) = engine.generate([prompt])
                    return answer

                cold = [ask(each) for each in prompts]
                assert not any(each.cached for each in cold)
                with Client(str(server.path)) as client:
                    assert client.flush()
                warm = [ask(each) for each in prompts]
                assert any(each.cached for each in warm)

                link.rate = CRAWL
                assert engine.seconds(prompts[0]) < client.config.load_deadline
                crawling = [ask(each) for each in prompts[1:]]
                assert not any(each.cached for each in crawling)

                link.rate = float("inf")
                found = []
                turns = itertools.cycle(prompts)

                def loads():
                    found.append(ask(next(turns)))
                    return found[-1].cached > 0

                until(loads, RECOVERY)
                again = [cold[number % len(cold)] for number in range(len(found))]
                for answers, wanted in ((warm, cold), (crawling, cold[1:]), (found, again)):
                    assert [each.tokens for each in answers] == [each.tokens for each in wanted]
                told = engine.metrics()
                assert told["lmtier:prefill_seconds_total"] > 0
                expected = told["lmtier:prefill_expected_seconds_total"]
                assert 1 / 3 < expected / told["lmtier:prefill_seconds_total"] < 3
        finally:
            server.close()
