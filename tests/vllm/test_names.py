"""Names follow what is in memory: weights that are changed in place, and adapters that are overwritten."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmtier.client.client import Client
from lmtier_integrations.vllm.kv_naming import KVNaming
from lmtier_integrations.vllm.loaded_model import _beginning
from lmtier_integrations.vllm.settings import Settings
from tests.server.process import until
from tests.vllm.conftest import TWO, alone, cached, loadable, prompts_of, tiers_of, tokens
from tests.vllm.engine import Engine

PROMPTS = prompts_of(700, 900, 1100, 513)
LATER = prompts_of(800, 600, seed=5)
EXTENSION = "tests.vllm.trainer.Trainer"
EVERYWHERE = pytest.mark.parametrize(
    ("below", "ranks"),
    [("server", {}), ("server", TWO), ("own tiers", {})],
    indirect=["below"],
    ids=["one rank", "two ranks", "own tiers"],
)
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}


@pytest.fixture
def below(request, tmp_path):
    """A server that keeps all it is given on disk too; or the same tiers, of each engine its own."""
    tiers = tiers_of(getattr(request, "param", "server"), tmp_path)
    yield tiers
    tiers.close()


@pytest.fixture(scope="session")
def wanted(models, tmp_path_factory):
    """What engines without a connector say, by the name of the weights."""
    found = {}
    with Engine(tmp_path_factory.mktemp("plain"), models / "qwen2", worker_extension_cls=EXTENSION) as plain:
        found["qwen2"] = tokens(alone(plain, PROMPTS))
        found["later"] = tokens(alone(plain, LATER))
        plain.rpc("write", by=1.25)
        plain.forget()
        found["written"] = tokens(alone(plain, PROMPTS))
        plain.rpc("connect")
        plain.rpc("start_weight_update")
        plain.rpc("update_weights", update_info={"folder": str(models / "qwen2-trained")})
        plain.rpc("finish_weight_update")
        plain.forget()
        found["updated"] = tokens(alone(plain, PROMPTS))
        plain.rpc("reload_weights", weights_path=str(models / "qwen2-trained"))
        plain.forget()
        found["qwen2-trained"] = tokens(alone(plain, PROMPTS))
    assert len({str(each) for each in found.values()}) == len(found)
    return found


def finds(engine: Engine, prompts: list[list[int]], wanted: list[list[int]]) -> int:
    """How many tokens it was given, without its own prefix cache; its answers are right."""
    engine.forget()
    outputs = alone(engine, prompts)
    assert tokens(outputs) == wanted
    return int(cached(outputs))


def answers(engine: Engine, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    """The first time it finds nothing, and the second time all."""
    assert finds(engine, prompts, wanted) == 0
    assert finds(engine, prompts, wanted) == loadable(prompts)


@EVERYWHERE
def test_reloaded_weights_have_the_name_of_their_files(models, tmp_path, below, wanted, ranks):
    place, trained = tmp_path / "model", str(models / "qwen2-trained")
    shutil.copytree(models / "qwen2", place)
    with Engine(tmp_path, place, transfer=below.transfer(model="ours"), **ranks) as engine:
        answers(engine, PROMPTS, wanted["qwen2"])
        engine.sleep(1)  # keeps the weights, and so all names
        assert finds(engine, PROMPTS, wanted["qwen2"]) == loadable(PROMPTS)
        engine.rpc("reload_weights", weights_path=trained)
        answers(engine, PROMPTS, wanted["qwen2-trained"])
        if below.are_shared:
            with Engine(tmp_path, place, transfer=below.transfer(model="ours")) as beside:
                shutil.copyfile(Path(trained, "model.safetensors"), place / "model.safetensors")
                assert finds(beside, PROMPTS, wanted["qwen2"]) == loadable(PROMPTS)
                assert finds(engine, PROMPTS, wanted["qwen2-trained"]) == loadable(PROMPTS)
                beside.rpc("reload_weights")
                assert finds(beside, PROMPTS, wanted["qwen2-trained"]) == loadable(PROMPTS)
            shutil.copyfile(models / "qwen2" / "model.safetensors", place / "model.safetensors")
        assert not engine.metrics()["lmtier:load_failures_total"]
    below.restart()
    with Engine(tmp_path, place, transfer=below.transfer(model="ours")) as engine:
        assert finds(engine, PROMPTS, wanted["qwen2"]) == loadable(PROMPTS)
        shutil.copyfile(Path(trained, "model.safetensors"), place / "model.safetensors")
        engine.rpc("reload_weights")
        assert finds(engine, PROMPTS, wanted["qwen2-trained"]) == loadable(PROMPTS)
        assert not engine.metrics()["lmtier:load_failures_total"]


@EVERYWHERE
def test_weights_written_by_others_have_names_of_this_run(models, tmp_path, below, wanted, ranks):
    how: dict[str, Any] = {"transfer": below.transfer(model="ours"), "worker_extension_cls": EXTENSION}
    with Engine(tmp_path, models / "qwen2", **how, **ranks) as engine:
        answers(engine, PROMPTS, wanted["qwen2"])
        engine.rpc("write", by=1.25)
        answers(engine, PROMPTS, wanted["written"])
        engine.rpc("connect")
        engine.rpc("start_weight_update")
        engine.rpc("update_weights", update_info={"folder": str(models / "qwen2-trained")})
        engine.rpc("finish_weight_update")
        answers(engine, PROMPTS, wanted["updated"])
        if below.are_shared:
            with Engine(tmp_path, models / "qwen2", **how) as beside:
                assert finds(beside, PROMPTS, wanted["qwen2"]) == loadable(PROMPTS)
                beside.rpc("write", by=1.25)  # as the other one did, and nobody knows that
                answers(beside, PROMPTS, wanted["written"])
                assert finds(engine, PROMPTS, wanted["updated"]) == loadable(PROMPTS)
        assert not engine.metrics()["lmtier:load_failures_total"]
    below.restart()
    with Engine(tmp_path, models / "qwen2", transfer=below.transfer(model="ours")) as engine:
        assert finds(engine, PROMPTS, wanted["qwen2"]) == loadable(PROMPTS)


@pytest.mark.parametrize("below", ["own tiers"], indirect=True)
def test_an_engine_that_only_slept_keeps_all_names(models, tmp_path, below, wanted):
    """A reset beside the next step changes nothing."""
    with Engine(tmp_path, models / "qwen2", transfer=below.transfer()) as engine:
        answers(engine, PROMPTS, wanted["qwen2"])
        engine.sleep(1, resets=True)
        assert finds(engine, PROMPTS, wanted["qwen2"]) == loadable(PROMPTS)
        engine.sleep(1, resets=True)
        engine.write(1.25)
        answers(engine, PROMPTS, wanted["written"])


@pytest.mark.parametrize("below", ["own tiers"], indirect=True)
def test_a_rank_asleep_in_a_step_compares_weights_later(models, tmp_path, below, wanted):
    """Somebody asks while the engine sleeps, and hangs up. That makes a step, without tokens."""
    how = below.transfer(check_weights="0s")
    with Engine(tmp_path, models / "qwen2", transfer=how, worker_extension_cls=EXTENSION) as engine:
        answers(engine, PROMPTS, wanted["qwen2"])
        engine.sleep(1, aborts=True)
        assert finds(engine, PROMPTS, wanted["qwen2"]) == loadable(PROMPTS)
        engine.rpc("write", by=1.25)
        engine.sleep(1, aborts=True)
        assert tokens(alone(engine, PROMPTS)) == wanted["written"]  # no reset makes it compare once more


def test_reports_of_an_earlier_sleep_undo_no_reset(models):
    """With two steps under way a report may come after a reset that its step knows nothing of."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(models / "qwen2"), skip_tokenizer_init=True).create_engine_config()
    nobody: Any = None  # a server hears nothing before workers have said what they hold
    names = KVNaming(config, Settings.of({"tiers": ["cpu://?capacity=1MiB"]}, 32, 0), nobody)
    names._rename(of_files := "of files")
    names.reset(step=5)
    names.slept(1, step=6)
    assert names.compared()
    assert names._identity.weights == of_files
    names.reset(step=7)
    names.slept(1, step=7)
    assert not names.compared()
    assert names._identity.weights != of_files
    names._rename("")  # private to this run from the start
    names.reset(step=8)
    names.slept(1, step=9)
    assert names.compared()
    assert names._identity.weights == ""


def test_a_process_knows_when_it_began():
    """Else the weights' files could seem to be newer than it, or older."""
    before, (told, tells) = time.time(), os.pipe()
    if not (child := os.fork()):
        try:
            os.write(tells, repr(_beginning()).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert before - 0.02 <= float(os.read(told, 100)) <= time.time()
    for end in (told, tells):
        os.close(end)


def exchange(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def test_weights_are_named_by_the_files_that_were_loaded(models, tmp_path, below, wanted):
    """An old .pt, two checkpoints with an index, two files that are exchanged, a consolidated file."""
    place, trained = tmp_path / "model", models / "qwen2-trained" / "model.safetensors"
    shutil.copytree(models / "qwen2", place)
    torch.save(load_file(trained), place / "model.pt")
    one, two = place / "model.safetensors", place / "model-2.safetensors"

    def loads(name: str, *, is_new: bool = True, **options: Any) -> None:
        with Engine(tmp_path, place, transfer=below.transfer(model="ours"), **options) as engine:
            assert finds(engine, PROMPTS, wanted[name]) == (0 if is_new else loadable(PROMPTS))

    loads("qwen2")
    loads("qwen2-trained", load_format="pt")
    shutil.copyfile(trained, two)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"all": two.name}}))
    loads("qwen2-trained")
    exchange(one, two)
    loads("qwen2")
    shutil.copyfile(trained, place / "consolidated.safetensors")
    loads("qwen2-trained")
    loads("qwen2", load_format="safetensors", is_new=False)


def test_a_draft_counts_by_the_files_that_were_loaded_too(models, tmp_path, below, wanted):
    """Its layers are stored with the model's. It never changes an answer."""
    place, draft = tmp_path / "draft", {"method": "draft_model", "num_speculative_tokens": 2}
    shutil.copytree(models / "qwen2-trained", place)
    how: dict[str, Any] = {"speculative_config": {**draft, "model": str(place)}}
    with Engine(tmp_path, models / "qwen2", transfer=below.transfer(model="ours"), **how) as engine:
        answers(engine, LATER, wanted["later"])
    shutil.copyfile(models / "qwen2" / "model.safetensors", place / "consolidated.safetensors")
    with Engine(tmp_path, models / "qwen2", transfer=below.transfer(model="ours"), **how) as engine:
        assert finds(engine, LATER, wanted["later"]) == 0


def test_weights_read_elsewhere_lack_the_name_of_the_files(models, tmp_path, below, wanted):
    elsewhere: dict[str, Any] = {
        "load_format": "elsewhere",
        "model_loader_extra_config": {"folder": str(models / "qwen2-trained")},
        "worker_extension_cls": EXTENSION,
    }
    with Engine(tmp_path, models / "qwen2", transfer=below.transfer(model="ours"), **elsewhere) as engine:
        answers(engine, PROMPTS, wanted["qwen2-trained"])
        engine.rpc("reload_weights")
        answers(engine, PROMPTS, wanted["qwen2-trained"])
    with Engine(tmp_path, models / "qwen2", transfer=below.transfer(model="ours")) as engine:
        assert finds(engine, PROMPTS, wanted["qwen2"]) == 0


def test_weights_written_unseen_are_found_by_samples(models, tmp_path, below, wanted):
    """No call of vLLM's, and nobody resets anything: what was stored since the last look is deleted."""
    period = 2.0
    with Engine(
        tmp_path, models / "qwen2", transfer=below.transfer(model="ours", check_weights=f"{period}s")
    ) as engine:
        assert finds(engine, PROMPTS, wanted["qwen2"]) == 0
        time.sleep(period)
        alone(engine, prompts_of(300, seed=6))  # the next one that stores something looks, too
        engine.write(1.25)
        wrong = tokens(alone(engine, LATER))  # stored under names of before
        assert wrong != wanted["later"]
        time.sleep(period)
        engine.generate(prompts_of(300, seed=7))
        assert "the weights have changed without a call of vLLM" in engine.log.read_text()
        assert finds(engine, PROMPTS, wanted["written"]) == 0
        assert finds(engine, PROMPTS, wanted["written"]) == loadable(PROMPTS)
    below.restart()
    with Engine(tmp_path, models / "qwen2", transfer=below.transfer(model="ours")) as engine:
        assert finds(engine, LATER, wanted["later"]) == 0
        assert finds(engine, PROMPTS, wanted["qwen2"]) == loadable(PROMPTS)


def test_a_returning_server_deletes_kv_of_unseen_weights(models, tmp_path, below, wanted):
    def chunks() -> int:
        with Client(str(below.path)) as client:
            assert client.flush()
            return client.stats()["disk"]["chunks"]

    how = below.transfer(model="ours", check_weights="0s")
    with Engine(tmp_path, models / "qwen2", transfer=how) as engine:
        alone(engine, prompts_of(300, seed=6))
        engine.write(1.25)
        assert tokens(alone(engine, LATER)) != wanted["later"]  # stored under names of before
        before = chunks()
        below.kill()
        engine.rpc("check_health")  # a call that might have changed weights
        engine.generate(prompts_of(300, seed=7))
        assert "the weights have changed without a call of vLLM" in engine.log.read_text()
        below.start()

        def is_deleted() -> bool:
            engine.generate(prompts_of(300, seed=8))
            return chunks() < before

        until(is_deleted)
    with Engine(tmp_path, models / "qwen2", transfer=how) as engine:
        assert finds(engine, LATER, wanted["later"]) == 0


@pytest.mark.parametrize("below", ["own tiers"], indirect=True)
def test_unseen_writes_are_found_though_a_reload_follows(models, tmp_path, below, wanted):
    """They have their files' name before and after. What was stored in between has it too, and must go."""
    with Engine(tmp_path, models / "qwen2", transfer=below.transfer(model="ours")) as engine:
        assert finds(engine, PROMPTS, wanted["qwen2"]) == 0
        engine.write(1.25)
        assert tokens(alone(engine, LATER)) != wanted["later"]
        engine.rpc("reload_weights")
        answers(engine, LATER, wanted["later"])


def test_files_that_change_during_loading_give_no_name(models, tmp_path, below, wanted):
    """It may have loaded some of them before, and some after."""
    place = tmp_path / "model"
    shutil.copytree(models / "qwen2", place)
    how = below.transfer(model="ours")
    how["kv_connector_module_path"] = "tests.vllm.replacing"
    env = {"LMTIER_TEST_REPLACES": f"{models / 'qwen2-trained'}:{place}"}
    with Engine(tmp_path, place, transfer=how, processes=True, env=env) as engine:
        answers(engine, PROMPTS, wanted["qwen2"])
        assert "weights' files have changed" in engine.log.read_text()
    with Engine(tmp_path, place, transfer=below.transfer(model="ours")) as engine:
        assert finds(engine, PROMPTS, wanted["qwen2-trained"]) == 0


# ---- adapters


def overwrite(place: Path, adapter: Path) -> None:
    place.mkdir(exist_ok=True)
    for file in adapter.iterdir():
        shutil.copyfile(file, place / file.name)


@pytest.fixture(scope="session")
def adapters(models, tmp_path_factory):
    """Folders of adapters. The last has the first one's weights, and another number in its configuration."""
    last = tmp_path_factory.mktemp("adapters") / "scaled-adapter"
    overwrite(last, models / "first-adapter")
    facts = json.loads((last / "adapter_config.json").read_text())
    facts["lora_alpha"] *= 2
    (last / "adapter_config.json").write_text(json.dumps(facts))
    return [models / "first-adapter", models / "second-adapter", last]


@pytest.fixture(scope="session")
def adapted(models, adapters, tmp_path_factory):
    """What an engine without a connector says with each of them: to two prompts, and to two later ones."""
    with Engine(tmp_path_factory.mktemp("plain"), models / "qwen2", **LORA) as plain:
        found = [
            (tokens(alone(plain, PROMPTS[:2], lora=str(each))), tokens(alone(plain, LATER, lora=str(each))))
            for each in adapters
        ]
    assert len({str(each) for each in found}) == len(found)
    return found


@pytest.mark.parametrize(
    ("below", "ranks", "swaps"),
    [("server", {}, 50), ("server", TWO, 6), ("own tiers", {}, 6)],
    indirect=["below"],
    ids=["fifty times", "two ranks", "own tiers"],
)
def test_adapters_that_are_overwritten_under_load(models, tmp_path, below, adapters, adapted, ranks, swaps):
    places = [tmp_path / "one", tmp_path / "two"]
    holds = [0, 1]
    for place, number in zip(places, holds, strict=True):
        overwrite(place, adapters[number])
    options: dict[str, Any] = {
        **LORA,
        "transfer": below.transfer(model="ours"),
        "enable_prefix_caching": False,
    }
    going_on = prompts_of(700, seed=8)
    with Engine(tmp_path, models / "qwen2", **options, **ranks) as engine:
        for swap in range(swaps):
            turn = swap % 2
            engine.start(going_on, 20, lora=str(places[turn]))
            engine.beside([(LATER[1], str(places[1 - turn]))], 2)
            holds[turn] = (holds[turn] + 1 + swap % 3 // 2) % 3
            overwrite(places[turn], adapters[holds[turn]])
            if not (in_place := swap % 4 > 1):
                engine.remove_lora(str(places[turn]))
            engine.add_lora(str(places[turn]), in_place=in_place)
            asked = [(prompt, str(place)) for place in places for prompt in PROMPTS[:2]]
            found = tokens(engine.beside(asked))
            assert found == adapted[holds[0]][0] + adapted[holds[1]][0]
        counted = engine.metrics()
        assert counted["lmtier:loaded_tokens_total"] > swaps * loadable(PROMPTS[:2])
        assert not counted["lmtier:load_failures_total"]
        below.hand_on(engine)
        with Engine(tmp_path, models / "qwen2", **options) as other:
            one, first = str(places[0]), holds[0]
            outputs = alone(other, PROMPTS[:2], lora=one)
            assert tokens(outputs) == adapted[first][0]
            assert cached(outputs) == loadable(PROMPTS[:2])
            second = (first + 2) % 3
            overwrite(places[0], adapters[second])  # the old one stays in memory
            if below.are_shared:  # of this one, not of that beside it
                engine.add_lora(one, in_place=True)
                outputs = engine.beside([(prompt, one) for prompt in LATER])
                assert tokens(outputs) == adapted[second][1]
            for _ in range(2):
                outputs = alone(other, LATER, lora=one)
                assert tokens(outputs) == adapted[first][1]
            assert cached(outputs) == loadable(LATER)
            for each in adapters[:2]:  # there is room for two
                alone(other, LATER, lora=str(each))
            outputs = alone(other, LATER, lora=one)
            assert tokens(outputs) == adapted[second][1]
            if below.are_shared:
                assert cached(outputs) == loadable(LATER)
            assert not other.metrics()["lmtier:load_failures_total"]
    below.restart()
    with Engine(tmp_path, models / "qwen2", **options, **ranks) as engine:
        outputs = alone(engine, [*PROMPTS[:2], *LATER], lora=one)
        assert tokens(outputs) == adapted[second][0] + adapted[second][1]
        assert cached(outputs) == loadable([*PROMPTS[:2], *LATER])
