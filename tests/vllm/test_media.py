"""Images: a real vLLM with the connector answers as one without it, however vLLM or the user names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from lmtier_integrations.vllm.media import Media, preparation_of
from tests.vllm.conftest import TWO, prompts_of, tiers_of
from tests.vllm.engine import Engine

BLOCK = 32
IMAGE = 32  # tokens, before those of the prompt
(PROMPT,) = prompts_of(200)
(TEXT,) = prompts_of(300, seed=2)
COUNTED: dict[str, Any] = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
"""Then vLLM does not hash images: it counts them, from 1 in each process."""
CHUNKS = (IMAGE + len(PROMPT) - 1) // BLOCK * BLOCK


EVERYWHERE = pytest.mark.parametrize(
    ("below", "ranks"),
    [("own tiers", {}), ("server", {}), ("server", TWO)],
    indirect=["below"],
    ids=["own tiers", "server", "two ranks"],
)


@pytest.fixture
def below(request, tmp_path):
    tiers = tiers_of(request.param, tmp_path, chunk_tokens=BLOCK)
    yield tiers
    tiers.close()


def seeing(folder: Path, model: Path, how: dict[str, Any] | None = None, **options: Any) -> Engine:
    return Engine(folder, model, transfer=how, **{"skip_tokenizer_init": False, **options})


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory):
    """An engine without a connector, whose own caches are emptied by whoever asks it."""
    with seeing(tmp_path_factory.mktemp("plain"), models / "blip2", **COUNTED) as engine:
        yield engine


def answers(outputs):
    return [each.tokens for each in outputs]


@pytest.fixture(scope="module")
def expected(plain):
    """What images 1 to 4 are answered under the same text, and the text alone."""
    found = answers(plain.see([PROMPT] * 4, [1, 2, 3, 4]))
    assert len({tuple(each) for each in found}) == 4  # it sees what it is shown
    return found, answers(plain.see([TEXT], [None]))


@EVERYWHERE
def test_images_that_vllm_counts_are_told_apart(models, tmp_path, below, expected, ranks):
    """By an engine that comes later, or by one that runs beside the first."""
    images, text = expected
    how = below.transfer()
    with seeing(tmp_path, models / "blip2", how, **COUNTED, **ranks) as engine:
        assert answers(engine.see([PROMPT] * 2 + [TEXT], [1, 2, None])) == images[:2] + text
        below.hand_on(engine)
        with seeing(tmp_path, models / "blip2", how, **COUNTED) as other:
            # The first image of this process has the name of the first of the other.
            others = other.see([PROMPT] * 2, [3, 4])
            assert answers(others) == images[2:]
            assert not any(each.cached for each in others)
            # Nor do the options of a request, with which vLLM hashes that name, make a content of it.
            hashed = other.see([PROMPT] * 2, [4, 3], processor={"do_convert_rgb": True})
            assert answers(hashed) == images[:1:-1]
            again = other.see([PROMPT, TEXT], [1, None])
            assert answers(again) == images[:1] + text
            assert [each.cached for each in again] == [CHUNKS, len(TEXT) // BLOCK * BLOCK]


@EVERYWHERE
def test_an_image_is_named_by_its_content_not_by_its_user(models, tmp_path, below, expected, ranks):
    images, _ = expected
    how = below.transfer()
    with seeing(tmp_path, models / "blip2", how, **ranks) as engine:
        assert answers(engine.see([PROMPT] * 2, [1, 2], ids=["a", "b"])) == images[:2]
        below.hand_on(engine)
        with seeing(tmp_path, models / "blip2", how, mm_processor_cache_gb=0) as other:
            swapped = other.see([PROMPT] * 2, [2, 3], ids=["a", "b"])
            assert answers(swapped) == images[1:3]
            assert [each.cached for each in swapped] == [CHUNKS, 0]
            # vLLM itself takes one name for one content, and answers what it had under that name.
            assert answers(other.see([PROMPT], [4], ids=["b"])) == images[2:3]
            other.forget()
            honest = other.see([PROMPT] * 3, [1, 3, 4])
            assert answers(honest) == [images[0], *images[2:]]
            assert [each.cached for each in honest] == [CHUNKS, CHUNKS, 0]


@EVERYWHERE
def test_preparation_of_images_is_part_of_their_names(models, tmp_path, below, ranks):
    """Set by a request, by the command line, and by a file; text keeps its names."""
    how = below.transfer(model="blip2")
    grey = {"image_mean": [0.1, 0.1, 0.1]}
    other = tmp_path / "other"
    shutil.copytree(models / "blip2", other)
    file = other / "processor_config.json"
    facts = json.loads(file.read_text())
    facts["image_processor"] |= grey
    file.write_text(json.dumps(facts))
    with seeing(tmp_path, models / "blip2", how, **ranks) as engine:
        as_it_is, text = answers(engine.see([PROMPT, TEXT], [1, None]))
        (in_grey,) = answers(engine.see([PROMPT], [1], processor=grey))
        assert in_grey != as_it_is
        below.hand_on(engine)
        for model, options in ((models / "blip2", {"mm_processor_kwargs": grey}), (other, {})):
            with seeing(tmp_path, model, how, **options) as later:
                found = later.see([PROMPT, TEXT], [1, None])
                assert answers(found) == [in_grey, text]
                assert found[1].cached == len(TEXT) // BLOCK * BLOCK


# ---- names, without an engine


@pytest.fixture(scope="module")
def configured(models):
    """vLLM's configuration of an engine that sees."""
    from vllm.engine.arg_utils import EngineArgs

    def configured(model: Path = models / "blip2", **options: Any) -> VllmConfig:
        return EngineArgs(model=str(model), **options).create_engine_config()

    return configured


def item(*, is_on_cpu: bool = False, **tensors: Any) -> MultiModalKwargsItem:
    fields = {"image_grid_thw": MultiModalBatchedField(keep_on_cpu=True)}
    other = MultiModalBatchedField(keep_on_cpu=is_on_cpu)
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data, fields.get(name, other)) for name, data in tensors.items()}
    )


def asked(data: MultiModalKwargsItem | None, name: str = "x", **place: Any) -> Any:
    """A request with one image, as far as names go."""
    where = PlaceholderRange(**{"offset": 0, "length": 2, **place})
    feature = MultiModalFeatureSpec(data=data, modality="image", identifier=name, mm_position=where)
    return SimpleNamespace(mm_features=[feature])


def named(media: Media, *given: Any, **place: Any) -> str | None:
    found = media.of(asked(*given, **place))
    return found[0].identity if found else None


PIXELS = torch.arange(24, dtype=torch.float32).reshape(3, 2, 4)


def test_other_contents_have_other_names(configured):
    config = configured()
    differing = [
        item(pixels=PIXELS),
        item(pixels=PIXELS + 1),
        item(pixels=PIXELS.to(torch.bfloat16)),
        item(pixels=PIXELS.reshape(24)),
        item(pixels=PIXELS.double()),
        item(pixels=[PIXELS[0], PIXELS[1:]]),
        item(pixels=[PIXELS[:2], PIXELS[2:]]),
        item(embeds=PIXELS),
        item(pixels=PIXELS, scale=torch.tensor(1.0)),
        item(pixels=PIXELS, scale=torch.tensor(2.0)),
        item(pixels=PIXELS, image_grid_thw=torch.tensor([1, 2, 2])),
        item(pixels=PIXELS, what="a"),
        item(pixels=PIXELS, what=["a"]),
        item(pixels=PIXELS.numpy(), what=None),
    ]
    names = [named(Media(config), each) for each in differing]
    assert len(set(names)) == len(differing)
    assert names == [named(Media(config), each, f"name {n}") for n, each in enumerate(differing)]
    masks = [None, torch.tensor([True, False]), torch.tensor([False, True])]
    assert len({named(Media(config), differing[0], is_embed=mask) for mask in masks}) == 3


def test_what_is_not_there_is_named_for_this_run_only(configured):
    sizes = torch.tensor([1, 2, 2])
    unseen = [
        None,
        item(image_grid_thw=sizes),  # its embeddings are left out: the engine gets KV from others
        item(sizes=sizes, seconds=torch.tensor([0.5])),
        item(pixels=PIXELS, is_on_cpu=True),
        item(pixels=PIXELS.to("meta")),
        item(pixels=object()),
    ]
    for each in unseen:
        one, other = Media(configured()), Media(configured())
        assert named(one, each, "x") == named(one, each, "x")
        assert len({named(one, each, "x"), named(one, each, "y"), named(other, each, "x")}) == 3
        trusting = [Media(configured(), trusts_ids=True) for _ in range(2)]
        assert len({named(media, each, "x") for media in trusting}) == 1


def test_counts_are_not_trusted(configured):
    counting = configured(**COUNTED)
    first, second = item(pixels=PIXELS), item(pixels=PIXELS + 1)
    hashing = Media(configured(), trusts_ids=True)
    assert named(hashing, first, "renderer0-mm-1-image-0") == named(hashing, second, "renderer0-mm-1-image-0")
    one, other = (Media(counting, trusts_ids=True) for _ in range(2))
    assert named(one, first, "renderer0-mm-1-image-0") != named(other, second, "renderer0-mm-1-image-0")
    assert named(one, None, "hash") != named(other, None, "hash")


def test_a_name_that_had_two_contents_is_none_from_then_on(configured):
    media, first, second = Media(configured()), item(pixels=PIXELS), item(pixels=PIXELS + 1)
    assert named(media, first, "x") != named(media, second, "y")
    assert named(media, second, "x") is None
    assert named(media, first, "x") is None
    assert named(media, item(pixels=PIXELS.clone()), "z") == named(Media(configured()), first, "x")


@pytest.mark.parametrize("trusts_ids", [False, True])
def test_an_item_read_by_an_earlier_adapter_is_not_stored(configured, trusts_ids):
    """vLLM keeps it under the adapter's name, and computes with it when another adapter has this name."""
    towers = configured(enable_lora=True, enable_tower_connector_lora=True)
    request = asked(item(pixels=PIXELS), "adapter:x")
    media = Media(towers, trusts_ids=trusts_ids)
    assert media.of(request, "one") == Media(towers, trusts_ids=trusts_ids).of(request, "one") != []
    assert media.of(request, "another") is None
    assert media.of(request, "one") is None
    plain = Media(configured(enable_lora=True), trusts_ids=trusts_ids)
    assert plain.of(request, "one") == plain.of(request, "another") == plain.of(request)


def test_text_needs_no_name(configured):
    assert Media(configured()).of(SimpleNamespace(mm_features=[])) == []


def test_all_that_prepares_images_is_in_their_names(configured, models, tmp_path):
    def preparation(**options: Any) -> str:
        return preparation_of(configured(folder, **options).model_config)

    folder = tmp_path / "model"
    shutil.copytree(models / "blip2", folder)
    as_it_is = preparation()
    found = {
        as_it_is,
        preparation(mm_processor_kwargs={"do_convert_rgb": True}),
        preparation(media_io_kwargs={"video": {"num_frames": 4}}),
        preparation(video_pruning_rate=0.5),
    }
    for name in (
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "processing_own.py",
    ):
        before = (folder / name).read_text() if (folder / name).exists() else "{}"
        (folder / name).write_text(before + "\n")
        found.add(preparation())
    assert len(found) == 8
    last = preparation()
    for name in ("chat_template.json", "generation_config.json", "model.safetensors.index.json"):
        (folder / name).write_text("{}")
    assert preparation() == last
    (tmp_path / "elsewhere").mkdir()
    shutil.move(folder, tmp_path / "elsewhere" / "model")
    folder = tmp_path / "elsewhere" / "model"
    assert preparation() == last
