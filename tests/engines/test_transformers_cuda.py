"""Prefixes of transformers models whose KV is moved as on a GPU: the answers of the model alone.

The models compute on this machine, at once; a simulated device, whose streams run late, in any order and at
any speed, copies between their buffer and the tiers. An edge that is left out is seen in the answers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmtier.config import Config
from lmtier.copy.cuda.mover import CudaMover
from lmtier.copy.cuda.page_lock import PageLock
from lmtier.copy.mover import Mover
from lmtier.core.cache import Cache
from lmtier.errors import CanaryError, ConfigError, DeviceError, MisuseError
from lmtier_integrations.transformers import PrefixCache, buffer, places, prefix_cache
from tests.cuda_device import SimulatedDevice, SimulatedStream
from tests.engines.models import answer, model_of, prompt_of
from tests.server.process import served, until

C = 16
LENGTHS = (C, C + 1, 3 * C + 5, 9 * C + 3)  # beyond the first buffer, twice
PACE = (*[0] * 19, 10)  # it falls behind what is enqueued, until something waits for it
LAZY = (0,)  # nothing is done but what is waited for


class Device(SimulatedDevice):
    """With a driver that pins memory, and GPU memory that ends at `room` bytes."""

    def __init__(self, seed: int = 0, *, pace: Sequence[int] = PACE, room: int = 1 << 40, **how: Any) -> None:
        super().__init__(seed, host_computes=True, is_recorded=False, pace=pace, **how)
        self.room = room
        self.pinned: dict[int, int] = {}

    def lock_pages(self, memory: memoryview) -> PageLock:
        pinning = PageLock(memory, self.pinned.__setitem__, self._unpin, step=1 << 20)
        pinning.start()
        return pinning

    def _unpin(self, address: int) -> None:
        assert all(each.finished == len(each.deeds) for each in self.streams)
        del self.pinned[address]


class Place(places.InGpuMemory):
    """A buffer in memory of the simulated device, which is this machine's."""

    def __init__(self, cache: Any, copies: Device) -> None:
        super().__init__(cache, copies, torch.device("cpu"))
        self._machine = copies

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._machine.room:
            raise torch.cuda.OutOfMemoryError
        self._machine.room -= nbytes
        memory = np.zeros(nbytes, np.uint8)
        self._machine.keep(memory)
        return torch.from_numpy(memory).view(dtype).reshape(*shape)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens one store after the other on the same folder, each with a device of its own."""
    stores: list[tuple[PrefixCache, Device]] = []

    def close():
        while stores:
            store, device = stores.pop()
            store.close()
            if isinstance(store.cache, Cache):
                store.cache.check()
            assert not device.pinned

    def opened(model, *tiers, device=None, server="", **settings):
        close()
        device = device or Device()
        monkeypatch.setattr(buffer, "place_for", lambda cache, _: Place(cache, device))
        if not server:
            tiers = tiers or ("cpu://?capacity=16MiB", f"disk://{tmp_path}/kv?capacity=64MiB")
            settings = {"chunk_tokens": C, "load_deadline": 10, "prefault": False, **settings}
        stores.append((PrefixCache(model, *tiers, server=server, **settings), device))
        return stores[-1][0]

    yield opened
    close()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """A second thread costs more than it computes, with models of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def found(store, prompt, *args, **options):
    """How many tokens of each row would be loaded."""
    return [row.total() for row in store.cache_for(prompt, *args, **options).loaded]


def forwards(store, prompt, *ends):
    """Compute a prompt in several forwards, with one cache."""
    cache, start = store.cache_for(prompt), 0
    with torch.no_grad():
        for end in ends:
            store.model(prompt[:, start:end], past_key_values=cache)
            start = end


# ---- the answers


@pytest.mark.parametrize(
    ("kind", "verify"),
    [
        ("llama", "off"),
        ("llama", "always"),
        ("llama in bf16", "always"),
        ("gemma2", "off"),
        ("deepseek-v2", "always"),
    ],
)
def test_answers_are_those_of_the_model_alone(opened, kind, verify):
    model = model_of(kind.removesuffix(" in bf16"), torch.bfloat16 if "bf16" in kind else torch.float32)
    prompts = {tokens: prompt_of(tokens, seed=tokens) for tokens in LENGTHS}
    alone = {tokens: answer(model.generate, prompt) for tokens, prompt in prompts.items()}
    store = opened(model, verify=verify)
    for tier in ("", "cpu", "disk"):
        if tier == "disk":
            store = opened(model, verify=verify)
        for tokens, prompt in prompts.items():
            cache, whole = store.cache_for(prompt), (tokens - 1) // C * C
            assert cache.loaded == [{tier: whole} if tier and whole else {}]
            assert answer(model.generate, prompt, past_key_values=cache) == alone[tokens], (tier, tokens)


def test_a_chunk_of_many_bytes_is_copied_as_one_piece(opened):
    model, prompt = model_of("gpt2"), prompt_of(600)
    alone = answer(model.generate, prompt)
    device = Device()
    store = opened(model, device=device, chunk_tokens=512, verify="off")
    for kept in (0, 512):
        assert found(store, prompt) == [kept]
        assert answer(store.generate, prompt) == alone
    chunk = 3 * 512 * 4 * 2 * 16 * 4
    for stream in (each for each in device.streams if "copies" in each.name):
        last = [deed.reads for deed in stream.deeds if deed.reads][-1]
        assert [end - begin for begin, end in last] == [chunk]


def test_rows_of_a_batch_are_in_the_buffer_at_one_time(opened):
    model = model_of("llama")
    ids = torch.cat([prompt_of(53, seed=seed) for seed in (1, 2, 3)])
    mask = torch.ones_like(ids)
    ids[1, :10] = mask[1, :10] = 0
    alone = answer(model.generate, ids, attention_mask=mask)
    store = opened(model, device=Device(pace=LAZY), verify="off")
    for kept in ([0, 0, 0], [42, 32, 42]):
        assert found(store, ids, mask) == kept
        assert answer(store.generate, ids, mask) == alone
    for row in (0, 2):
        prompt = ids[row : row + 1]
        assert found(store, prompt) == [48]
        assert answer(store.generate, prompt) == [alone[row]]


def test_a_restarted_server_has_another_slab_to_pin(opened, tmp_path):
    model, prompt, device = model_of("llama"), prompt_of(53), Device()
    alone = answer(model.generate, prompt)
    tiers = "cpu://?capacity=4MiB", f"disk://{tmp_path}/served?capacity=64MiB"
    with served(tmp_path, *tiers, config={"chunk_tokens": C}, unix=str(tmp_path / "socket")) as server:
        store = opened(model, device=device, server=server.where["unix"])
        assert answer(store.generate, prompt) == alone
        assert store.flush()
        assert store.wait_until_pinned()
        pinned = set(device.pinned)
        server.stop()
        server.start()
        until(lambda: found(store, prompt) == [48], 30)
        assert answer(store.generate, prompt) == alone
        assert store.wait_until_pinned()
        assert not pinned & set(device.pinned)
        assert len(pinned) == len(device.pinned) == 4
        opened(model)  # closes the one before while its server lives


# ---- what goes on while the model computes


def test_a_save_is_under_way_until_the_next_call(opened):
    model, prompt = model_of("llama"), prompt_of(53)
    store = opened(model, device=Device(pace=LAZY))
    store.generate(prompt, max_new_tokens=1)
    assert store._buffer.mover.under_way == 1, "nothing has waited for it"
    assert store.flush()
    assert store._buffer.mover.under_way == 0
    store.generate(prompt_of(53, seed=2), max_new_tokens=1)
    store.close()
    assert found(opened(model), prompt_of(53, seed=2)) == [48], "closing waits for it too"


def test_chunks_come_and_go_in_a_small_tier(opened):
    model, prompts = model_of("llama"), [prompt_of(60 + 70 * seed, seed=seed) for seed in range(5)]
    alone = [answer(model.generate, prompt, tokens=2) for prompt in prompts]
    layers, chunk = 3, 2 * C * 2 * 16 * 4
    store = opened(model, f"cpu://?capacity={layers * chunk * 20}", verify="off")  # of 57
    for number in (*range(5), 4, 0, 3, 3, 1, 2, 4, 0, 1, 0, 2, 2):
        assert answer(store.generate, prompts[number], tokens=2) == alone[number]
    assert 0 < sum(found(store, prompt)[0] for prompt in prompts) <= 20 * C


def test_a_forward_that_fails_leaves_nothing_behind(opened):
    model, prompt = model_of("llama"), prompt_of(53)
    store = opened(model)

    def fail(*_):
        raise ZeroDivisionError

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        store.generate(prompt, max_new_tokens=1)
    hook.remove()
    assert found(store, prompt) == [0]
    assert store.cache.stats()["cpu"]["used"] == 0
    assert answer(store.generate, prompt) == answer(model.generate, prompt)


def test_kv_that_changes_in_memory_is_computed_again(opened):
    model, prompt = model_of("llama"), prompt_of(53)
    alone = answer(model.generate, prompt)
    store = opened(model, "cpu://?capacity=16MiB", verify="always")
    assert answer(store.generate, prompt) == alone
    store.flush()
    for entry in list(store.cache.index.entries()):
        if entry.parent is not None and entry.parent.parent is None:  # the second chunk
            store.cache.slab.view(entry.offsets[0], entry.nbytes)[3::4] = bytes(entry.nbytes // 4)
    assert found(store, prompt) == [C]
    assert answer(store.generate, prompt) == alone
    assert found(store, prompt) == [48], "stored again"


def test_prompts_that_the_gpu_has_no_room_for_are_computed(opened, caplog):
    model, short, long = model_of("llama"), prompt_of(53), prompt_of(300)
    layers, chunk = 3, 2 * C * 2 * 16 * 4
    alone = answer(model.generate, long)
    store = opened(model, device=Device(room=layers * chunk * (3 + 8)))
    assert answer(store.generate, long) == alone
    assert "no room to save 288 tokens" in caplog.text
    assert found(store, long) == [0]
    for kept in (0, 48):
        assert found(store, short) == [kept]
        assert answer(store.generate, short) == answer(model.generate, short)
    store = opened(model)
    assert answer(store.generate, long) == alone
    store = opened(model, device=Device(room=layers * chunk * (3 + 8)))
    caplog.clear()
    assert answer(store.generate, long) == alone
    assert "no room to load 288 tokens" in caplog.text


# ---- what fails on the way


def refuse(*_):
    raise DeviceError("a copy: invalid argument (1)")


@pytest.fixture
def refusing(monkeypatch):
    """From here on the driver refuses whatever is enqueued; `undo` ends that."""

    def refusing():
        for name in ("copy", "copy_rows", "launch"):
            monkeypatch.setattr(SimulatedStream, name, refuse)

    refusing.undo = monkeypatch.undo  # type: ignore[attr-defined]
    return refusing


def with_other_weights(model):
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1)


def none(*_):
    raise torch.cuda.OutOfMemoryError


def differs(*_, **__):
    raise CanaryError("canary")


@pytest.mark.parametrize(
    ("of", "name", "failure"),
    [
        (prefix_cache, "digest_of", none),
        (Mover, "prove", differs),
        (SimulatedStream, "copy", refuse),
        (Place, "empty", none),
        (Mover, "drain", none),
    ],
)
def test_a_failed_weight_change_never_serves_old_kv(opened, monkeypatch, of, name, failure):
    model, prompt = copy.deepcopy(model_of("llama")), prompt_of(53)
    before = answer(model.generate, prompt)
    store = opened(model, "cpu://?capacity=16MiB")
    assert answer(store.generate, prompt) == before
    store.flush()
    with_other_weights(model)
    alone = answer(model.generate, prompt)
    assert alone != before
    with monkeypatch.context() as patch:
        patch.setattr(CudaMover if of is Mover else of, name, failure)
        try:
            store.generate(prompt, max_new_tokens=1)
        except (torch.cuda.OutOfMemoryError, CanaryError):
            assert name in ("digest_of", "drain"), "the buffer stays, so that nothing is taken or proven"
    for _ in range(2):
        assert answer(store.generate, prompt) == alone
    assert found(store, prompt) == [48]
    with_other_weights(model)
    assert found(store, prompt) == [48], "what was stored of the old ones is still theirs"
    assert answer(store.generate, prompt) == before


@pytest.mark.parametrize("near", [[], ["gpu://?capacity=1MiB", "cpu://?capacity=16MiB"]], ids=["", "near"])
def test_a_replaced_buffer_gives_its_gpu_memory_back(opened, monkeypatch, near):
    model, device = copy.deepcopy(model_of("llama")), Device()
    held: dict[int, int] = {}

    def taking(take):
        def taken(self, what):
            address = take(self, what)
            at = address if isinstance(address, int) else address.ctypes.data
            held[at] = what if isinstance(what, int) else what.nbytes
            return address

        return taken

    give_back = Device.release

    def release(self, addresses):
        addresses = list(addresses)
        assert all(each.finished == len(each.deeds) for each in self.streams), "it is in use"
        give_back(self, addresses)
        for address in addresses:
            del held[address]

    for name in ("memory", "upload", "host_memory"):
        monkeypatch.setattr(Device, name, taking(getattr(Device, name)))
    monkeypatch.setattr(Device, "release", release)
    store = opened(model, *near, device=device)
    first = sum(held.values())
    for tokens in (60, 120, 480):
        store.generate(prompt_of(tokens, seed=tokens), max_new_tokens=1)
        assert sum(held.values()) == first
    with_other_weights(model)
    store.generate(prompt_of(60), max_new_tokens=1)
    assert sum(held.values()) == first

    def spoilt(*_):
        raise CanaryError("canary")

    with monkeypatch.context() as patch:
        patch.setattr(CudaMover, "prove", spoilt)
        with pytest.raises(CanaryError):
            store.generate(prompt_of(2000), max_new_tokens=1)
    assert sum(held.values()) == first
    store.close()
    assert not held
    monkeypatch.undo()


def test_prompts_the_driver_refuses_to_load_are_computed(opened, refusing, caplog):
    model, prompt, other = model_of("llama"), prompt_of(53), prompt_of(53, seed=2)
    alone, batch = answer(model.generate, prompt), torch.cat([prompt, other])
    both = answer(model.generate, batch)
    store = opened(model)
    assert answer(store.generate, prompt) == alone
    assert answer(store.generate, batch) == both
    store.flush()
    refusing()
    assert found(store, prompt) == [0]
    assert answer(store.generate, prompt) == alone
    assert "the GPU fails (a copy: invalid argument (1)) to load 48 tokens: they are computed" in caplog.text
    assert answer(store.generate, batch) == both
    refusing.undo()
    assert found(store, batch) == [48, 48], "it is still stored"
    assert answer(store.generate, batch) == both


def test_prompts_the_driver_refuses_to_save_are_not_stored(opened, refusing, caplog):
    model, prompt = model_of("llama"), prompt_of(53)
    alone = answer(model.generate, prompt)
    store = opened(model)
    refusing()
    assert answer(store.generate, prompt) == alone
    assert "to save 48 tokens: they are not stored" in caplog.text
    store.flush()
    assert store.cache.stats()["cpu"]["used"] == 0
    refusing.undo()
    for kept in (0, 48):
        assert found(store, prompt) == [kept]
        assert answer(store.generate, prompt) == alone


def test_nothing_after_a_refused_chunk_is_stored(opened, refusing):
    model, prompt = model_of("llama"), prompt_of(80)
    store = opened(model)
    cache = store.cache_for(prompt)
    with torch.no_grad():
        refusing()
        model(prompt[:, :32], past_key_values=cache)
        refusing.undo()
        model(prompt[:, 32:], past_key_values=cache)
    store.flush()
    assert found(store, prompt) == [0]
    assert store.cache.stats()["cpu"]["used"] == 0


def test_a_refused_buffer_leaves_the_earlier_one(opened, refusing, caplog):
    model, short, long = model_of("llama"), prompt_of(53), prompt_of(300)
    alone = answer(model.generate, long)
    store = opened(model)
    refusing()
    assert answer(store.generate, long) == alone
    assert "to save 288 tokens: they are not stored" in caplog.text
    refusing.undo()
    for kept in (0, 48):
        assert found(store, short) == [kept]
        assert answer(store.generate, short) == answer(model.generate, short)
    assert answer(store.generate, long) == alone
    store = opened(model)
    refusing()
    caplog.clear()
    assert answer(store.generate, long) == alone
    assert "to load 288 tokens: they are computed" in caplog.text


def test_a_driver_that_always_refuses_leaves_a_cpu_buffer(opened, refusing, caplog):
    model, prompt = model_of("llama"), prompt_of(53)
    refusing()
    store = opened(model)
    assert "a buffer in CPU memory, which is slower (a copy: invalid argument (1))" in caplog.text
    for kept in (0, 48):
        assert found(store, prompt) == [kept]
        assert answer(store.generate, prompt) == answer(model.generate, prompt)


class CompileError(Exception):
    """cupy's is not a RuntimeError."""


@pytest.mark.parametrize(
    "failure", [ImportError, OSError, RuntimeError, DeviceError, CompileError, None], ids=str
)
def test_an_unusable_gpu_leaves_a_buffer_in_cpu_memory(monkeypatch, caplog, failure):
    opened = []

    def device_of(index):
        if failure is not None:
            raise failure("no kernels")
        opened.append(index)

    monkeypatch.setattr(places, "import_module", lambda _: SimpleNamespace(CudaDevice=device_of))
    cache: Any = SimpleNamespace(config=Config())
    place = places.place_for(cache, {torch.device("cuda", 3)})  # which need not be the current one
    if failure is None:
        assert isinstance(place, places.InGpuMemory)
        assert opened == [3]
        return
    assert isinstance(place, places.InCpuMemory)
    assert "KV goes from cuda:3 to the tiers through a buffer in CPU memory" in caplog.text
    assert "(no kernels)" in caplog.text


# ---- what is left out is seen


@pytest.mark.parametrize("fault", ["", "compute waits for load"])
def test_a_load_that_is_not_awaited_gives_a_wrong_prefix(opened, fault):
    model, prompt = model_of("llama"), prompt_of(53)
    alone = answer(model.generate, prompt)
    device = Device(pace=LAZY, without=fault)
    store = opened(model, device=device, verify="off")
    assert answer(store.generate, prompt) == alone
    store.generate(prompt_of(53, seed=2), max_new_tokens=1)  # so that the buffer holds something else
    cache = store.cache_for(prompt)
    assert cache.loaded == [{"cpu": 48}]
    assert (answer(model.generate, prompt, past_key_values=cache) == alone) is not bool(fault)
    assert "compute waits for load" in device.edges


@pytest.mark.parametrize("fault", ["", "compute waits for store"])
def test_a_buffer_reused_too_early_spoils_the_save(opened, fault):
    model, prompt = model_of("llama"), prompt_of(80)
    alone = answer(model.generate, prompt)
    device = Device(pace=LAZY, without=fault)
    store = opened(model, device=device, verify="off")
    forwards(store, prompt, 32, 64, 80)
    assert found(store, prompt) == [64]
    assert "compute waits for store" in device.edges
    assert (answer(store.generate, prompt) == alone) is not bool(fault)


def test_a_growing_buffer_first_ends_its_transfers(opened):
    model, prompt = model_of("llama"), prompt_of(170)
    store = opened(model, device=Device(pace=LAZY), verify="off")
    forwards(store, prompt, 32, 160, 170)
    assert found(store, prompt) == [160]
    assert answer(store.generate, prompt) == answer(model.generate, prompt)


@pytest.mark.parametrize("is_impatient", [False, True])
def test_a_match_served_before_it_arrives_is_wrong(opened, is_impatient):
    model, prompt = model_of("llama"), prompt_of(53)
    alone = answer(model.generate, prompt)
    device = Device(pace=LAZY, is_impatient=is_impatient)
    store = opened(model, device=device, verify="off")
    store.generate(prompt, max_new_tokens=1)
    assert found(store, prompt) == [48]
    assert (answer(store.generate, prompt) == alone) is not is_impatient
    device.check()  # all that is left comes to its end


# ---- copies in GPU memory


@pytest.mark.parametrize("verify", ["off", "always"])
def test_a_second_load_of_a_prompt_comes_from_gpu_memory(opened, verify):
    """Also through another buffer: a longer prompt needs a larger one."""
    model, short, long = model_of("llama"), prompt_of(53), prompt_of(9 * C + 3, seed=2)
    alone = {prompt: answer(model.generate, prompt) for prompt in (short, long)}
    device = Device()
    store = opened(model, "gpu://?capacity=1MiB", "cpu://?capacity=4MiB", device=device, verify=verify)
    whole = 53 // C * C
    for tier in ("", "cpu", "gpu"):
        cache = store.cache_for(short)
        assert cache.loaded == [{tier: whole} if tier else {}]
        assert answer(model.generate, short, past_key_values=cache) == alone[short]
    for tier in ("", "cpu", "gpu"):
        cache = store.cache_for(long)
        assert cache.loaded == [{tier: 9 * C} if tier else {}]
        assert answer(model.generate, long, past_key_values=cache) == alone[long]
    np.frombuffer(store.cache.slab.view(0, store.cache.slab.capacity), np.uint8)[:] = 0
    assert answer(store.generate, short) == alone[short], "nothing came from the slab"
    assert store.cache.metrics.value("lmtier_verify_failures_total") == 0


def test_other_weights_never_find_the_copies_of_old_ones(opened):
    model, prompt = model_of("llama"), prompt_of(53)
    store = opened(model, "gpu://?capacity=1MiB", "cpu://?capacity=4MiB")
    for _ in range(3):
        answer(store.generate, prompt)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert found(store, prompt) == [0]
    alone = answer(model.generate, prompt)
    for _ in range(3):
        assert answer(store.generate, prompt) == alone


# ---- what is declined


def test_copies_in_gpu_memory_need_a_gpu():
    tiers = "gpu://?capacity=1MiB", "cpu://?capacity=4MiB"
    with pytest.raises(MisuseError, match=r"gpu://.*leave that tier out"):
        PrefixCache(model_of("llama"), *tiers, chunk_tokens=C, prefault=False)


def test_a_gpu_without_room_for_copies_is_one_sentence(opened, monkeypatch):
    def memory(nbytes):
        raise torch.cuda.OutOfMemoryError

    device = Device()
    monkeypatch.setattr(device, "memory", memory)
    with pytest.raises(ConfigError, match=r"gpu://.*no room"):
        opened(model_of("llama"), "gpu://?capacity=1MiB", "cpu://?capacity=4MiB", device=device)
