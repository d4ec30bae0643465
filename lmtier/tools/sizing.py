"""The KV size of a model, and how much of it a tier holds, from a Hugging Face `config.json`.

It counts the KV that lmtier stores: every token of every attention layer, also with sliding windows, because
the next prompt may share any prefix. An engine stores less for a running request if layers have windows.
Layers without attention (Mamba, linear attention) have a state: no bytes per token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtier.config import read_text, suggest
from lmtier.errors import ConfigError, excerpt
from lmtier.format.layout import DTYPE_BYTES, OTHER_NAMES, ChunkForm, LayerShape, Layout, form_of
from lmtier.rules.money import GIB, HOUR, GpuSavings
from lmtier.tools.terminal import number_text, size_text, table

_DTYPE_NAMES = {"fp8": "fp8_e4m3"}
_PACKED_MLA = "fp8_ds_mla"
_PACKED_MLA_BYTES = 512 + 4 * 4 + 64 * 2  # a token and layer: fp8 latent, its scales, bf16 rope part
_FULL = ("full_attention", "attention", "global", "*")
_WINDOWED = ("sliding_attention", "chunked_attention", "local_sliding")
_BLOCK_TOKENS = 16
_MOST_LAYERS = 10_000
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}  # every n-th layer is full, if the file lacks it


@dataclass(frozen=True, slots=True)
class Model:
    """The properties of a model that decide the size of its KV."""

    name: str
    full_layers: int
    """Layers that attend to all tokens."""
    windowed_layers: int
    """Layers that attend to the last `window` ones."""
    window: int
    layers_without_kv: int
    """Layers without KV: they have a state, or share another layer's KV."""
    shape: LayerShape
    is_latent: bool
    """MLA: one head for all ranks."""
    dtype: str
    longest: int | None
    """The longest prompt in tokens that its positions allow."""

    @property
    def layers(self) -> int:
        return self.full_layers + self.windowed_layers

    def layer_bytes(self) -> int:
        """Bytes per token and layer."""
        if self.dtype == _PACKED_MLA:
            return _PACKED_MLA_BYTES
        return self.shape.heads * (self.shape.k + self.shape.v) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.layer_bytes()

    def engine_bytes(self, tokens: int) -> int:
        """The bytes of an engine for a request of `tokens` tokens, if it drops blocks outside the windows."""
        return (
            self.full_layers * tokens + self.windowed_layers * min(tokens, self.window or tokens)
        ) * self.layer_bytes()

    def form(self, chunk_tokens: int, ranks: int) -> ChunkForm:
        """How a chunk is cut: one shard per rank. Ranks that hold the same share one."""
        shape, packing, dtype, block = self.shape, "token", self.dtype, min(_BLOCK_TOKENS, chunk_tokens)
        if self.is_latent:
            packing = "latent"
        if dtype == _PACKED_MLA:
            shape, packing, dtype = LayerShape(1, _PACKED_MLA_BYTES * block, 0), _PACKED_MLA, "u8"
        layout = Layout((shape,) * self.layers, dtype, block, chunk_tokens, packing)
        shards = [
            layout.shard(rank=rank, ranks=ranks)
            for rank in range(ranks)
            if layout.writes(rank=rank, ranks=ranks)
        ]
        return form_of(layout, shards)


def read(path: Path, kv_dtype: str = "auto") -> Model:
    """The model of a `config.json`, or of the folder that it is in."""
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(read_text(f"model {file}", file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model {file}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"model {file}: not a model's configuration")
    try:
        return model_of(fields, kv_dtype, name=str(fields.get("_name_or_path") or file.parent.name))
    except KeyError as error:
        raise ConfigError(
            f"model {file}: not a configuration of a language model: it has no {error}"
        ) from None
    except (LookupError, TypeError, ArithmeticError, ValueError) as error:
        raise ConfigError(f"model {file}: not a configuration of a language model: {error}") from None


def model_of(outer: Mapping[str, Any], kv_dtype: str = "auto", *, name: str = "") -> Model:
    """The model of a configuration. The fields of a multimodal model are one level deeper."""
    names = ("text_config", "llm_config", "language_config")
    nested: Mapping[str, Any] = next((outer[key] for key in names if key in outer), {})
    config = {**outer, **nested}
    heads = config.get("n_head") or config["num_attention_heads"]
    latent = config.get("kv_lora_rank")
    if latent:
        shape = LayerShape(1, latent + config["qk_rope_head_dim"], 0)
    else:
        dim = config.get("head_dim") or (config.get("n_embd") or config["hidden_size"]) // heads
        shape = LayerShape(_kv_heads(config, heads), dim, dim)
    full, windowed, kvless = _layers(config)
    if not full + windowed:
        raise ConfigError(f"model {name}: it has no attention layers, so there is no KV to keep")
    return Model(
        name=name or str(config.get("model_type", "model")),
        full_layers=full,
        windowed_layers=windowed,
        window=_window(config) if windowed else 0,
        layers_without_kv=kvless,
        shape=shape,
        is_latent=bool(latent),
        dtype=_dtype(config, kv_dtype, bool(latent)),
        longest=config.get("max_position_embeddings") or config.get("n_positions"),
    )


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return int(config.get("num_key_value_heads") or config.get("num_kv_heads") or heads)


def _window(config: Mapping[str, Any]) -> int:
    chunked = "chunked_attention" in (config.get("layer_types") or ())
    window = config.get("attention_chunk_size") if chunked else config.get("sliding_window")
    return int(window or 0)


def _layers(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """The numbers of layers with full attention, with a window, and without attention."""
    count = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    if count > _MOST_LAYERS:
        raise ValueError(f"{excerpt(count)} layers")
    kinds = _kinds(config, count)
    kinds = kinds[: len(kinds) - int(config.get("num_kv_shared_layers") or 0)]
    full = sum(kind in _FULL for kind in kinds)
    windowed = sum(kind in _WINDOWED for kind in kinds)
    return full, windowed, max(count, len(kinds)) - full - windowed


def _kinds(config: Mapping[str, Any], count: int) -> Sequence[str]:
    for field in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if config.get(field):
            return list(config[field])
    if pattern := config.get("block_types"):  # RecurrentGemma repeats it
        return [pattern[i % len(pattern)] for i in range(count)]
    full_indexes = config.get("attn_layer_indices")  # Bamba
    if config.get("linear_attn_config"):  # Kimi Linear counts from 1
        full_indexes = [number - 1 for number in config["linear_attn_config"]["full_attn_layers"]]
    if config.get("attn_type_list"):  # MiniMax
        full_indexes = [number for number, is_full in enumerate(config["attn_type_list"]) if is_full]
    if full_indexes:
        return ["attention" if i in full_indexes else "state" for i in range(count)]
    if period := config.get("attn_layer_period"):
        offset = config.get("attn_layer_offset", 0)
        return ["attention" if i % period == offset else "mamba" for i in range(count)]
    if interval := config.get("full_attention_interval"):
        return ["attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["attention"] * count
    model_type = str(config.get("model_type", ""))
    if every := config.get("sliding_window_pattern") or _PATTERNS.get(model_type):
        return ["attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]
    first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else 0
    return ["attention" if i < first else "sliding_attention" for i in range(count)]


def _dtype(config: Mapping[str, Any], asked: str, is_latent: bool) -> str:
    if asked == "auto":
        return OTHER_NAMES.get(str(config.get("torch_dtype") or config.get("dtype")), "bf16")
    dtype = _DTYPE_NAMES.get(asked, asked)
    if dtype not in DTYPE_BYTES and not (dtype == _PACKED_MLA and is_latent):
        raise ConfigError(f"--kv-dtype {asked}: unknown{suggest(asked, {*DTYPE_BYTES, 'auto', 'fp8'})}")
    return dtype


# ---- what it means for tiers


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """The capacity of one tier for a model's KV."""

    tier: str
    capacity: int
    chunk_bytes: int
    """The bytes of a chunk in this tier."""
    chunk_tokens: int

    @property
    def tokens(self) -> int:
        return self.capacity // self.chunk_bytes * self.chunk_tokens

    def requests(self, length: int) -> int:
        """The number of prompts of this length that fit, if they share nothing.

        Only whole chunks are stored.
        """
        return self.capacity // self.chunk_bytes // max(1, length // self.chunk_tokens)

    def longest(self, model: Model) -> int:
        return min(self.tokens, model.longest or self.tokens)


def tier_capacities(capacities: Mapping[str, int], form: ChunkForm, chunk_tokens: int) -> list[TierCapacity]:
    return [
        TierCapacity(tier, capacity, form.slab_bytes if tier == "cpu" else form.stored_bytes, chunk_tokens)
        for tier, capacity in capacities.items()
    ]


def break_even(model: Model, prefill: float) -> float:
    """The bytes per second below which loading takes longer than computing `prefill` tokens per second."""
    return model.bytes_per_token * prefill


def report(
    model: Model,
    capacities: Sequence[TierCapacity],
    form: ChunkForm,
    *,
    lengths: Sequence[int],
    prefills: Sequence[float],
) -> str:
    what = f"{model.full_layers} layers of full attention" if model.full_layers else ""
    if model.windowed_layers:
        what += f"{', ' if what else ''}{model.windowed_layers} with a window of {model.window:,} tokens"
    if model.layers_without_kv:
        what += f", {model.layers_without_kv} without KV of their own"
    per = f"{model.shape.k} elements" if model.is_latent else f"{model.shape.heads} heads of {model.shape.k}"
    assert form.layout is not None
    chunk_tokens = form.layout.chunk_tokens
    lines = [f"{model.name}: {what}; {per}, {model.dtype}", ""]
    rows = [
        ("a token", size_text(model.bytes_per_token)),
        (f"a chunk of {chunk_tokens} tokens, in memory", size_text(form.slab_bytes)),
        ("a chunk on disk or beyond, headers included", size_text(form.stored_bytes)),
        (f"a shard of a chunk, of {len(form.shards)}", size_text(form.sizes[0])),
    ]
    if model.windowed_layers:
        rows += [
            (f"in the engine, of a request of {length:,} tokens", size_text(model.engine_bytes(length)))
            for length in lengths
        ]
    lines += [table(("KV of", "bytes"), rows), ""]
    if capacities:
        headers = ["tier", "capacity", "tokens", *(f"requests of {n:,}" for n in lengths), "longest prompt"]
        tier_rows = [
            [capacity.tier, size_text(capacity.capacity), f"{capacity.tokens:,}"]
            + [f"{capacity.requests(length):,}" for length in lengths]
            + [f"{capacity.longest(model):,}"]
            for capacity in capacities
        ]
        lines += [table(headers, tier_rows), ""]
    even = [(f"{rate:,.0f}", f"{number_text(break_even(model, rate) / 1e9)} GB/s") for rate in prefills]
    lines += [table(("tokens/s computed", "break-even: a slower tier is worth nothing"), even)]
    if model.windowed_layers and model.window < chunk_tokens:
        lines += [
            "",
            f"A chunk is no longer than the smallest window: set chunk_tokens to {model.window} or less.",
        ]
    if model.layers_without_kv:
        lines += ["", "The states of layers without attention are not counted."]
    return "\n".join(lines)


def savings_table(capacities: Sequence[TierCapacity], prefills: Sequence[float], price: float) -> str:
    """What each tier saves whenever all that it holds is used once more, and what a GiB of it does."""
    rows = [
        (each.tier, f"{rate:,.0f}", number_text(once.gpu_hours), f"{once.money:,.2f}", f"{of_gib.money:,.4f}")
        for each in capacities
        for rate in prefills
        for once, of_gib in [_savings_of(each, rate, price)]
    ]
    headers = ("used once more", "tokens/s computed", "GPU-hours", f"at {price:g} an hour", "a GiB of it")
    return table(headers, rows)


def _savings_of(each: TierCapacity, rate: float, price: float) -> tuple[GpuSavings, GpuSavings]:
    hours = each.tokens / rate / HOUR
    return GpuSavings(hours, price), GpuSavings(hours * GIB / each.capacity, price)


def savings_as_json(
    capacities: Sequence[TierCapacity], prefills: Sequence[float], price: float
) -> list[dict[str, Any]]:
    return [
        {
            "tier": capacity.tier,
            "prefill": rate,
            "gpu_hours": tier_savings.gpu_hours,
            "money": tier_savings.money,
            "money_per_gib": gib_savings.money,
        }
        for capacity in capacities
        for rate in prefills
        for tier_savings, gib_savings in [_savings_of(capacity, rate, price)]
    ]


def as_json(
    model: Model,
    capacities: Sequence[TierCapacity],
    form: ChunkForm,
    *,
    lengths: Sequence[int],
    prefills: Sequence[float],
) -> dict[str, Any]:
    return {
        "model": model.name,
        "dtype": model.dtype,
        "layers": {
            "full": model.full_layers,
            "windowed": model.windowed_layers,
            "window": model.window,
            "without": model.layers_without_kv,
        },
        "bytes_per_token": model.bytes_per_token,
        "chunk_bytes": {"cpu": form.slab_bytes, "disk": form.stored_bytes},
        "shard_bytes": list(form.sizes),
        "tiers": [
            {
                "tier": capacity.tier,
                "capacity": capacity.capacity,
                "tokens": capacity.tokens,
                "requests": {str(length): capacity.requests(length) for length in lengths},
                "longest_prompt": capacity.longest(model),
            }
            for capacity in capacities
        ],
        "break_even_bytes_per_second": {f"{rate:g}": break_even(model, rate) for rate in prefills},
    }
