"""Puts any value into one field of a real request, within a real engine: what its process does with it."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

_numbers = count()
_UNCOMPUTED = ("lora", "item", "prompt_token_ids")
"""Fields without which this model computes nothing, or dies of it without lmtier too."""


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def add_odd(llm: Any, prompt: list[int], how: Any, cases: list[tuple[str, str]]) -> list[list[int] | str]:
    """The answer of each request, or why nothing can compute it. The values are expressions."""
    core = llm.llm_engine.engine_core.engine_core
    found: list[Request | str] = []
    for field, value in cases:
        odd = eval(value, {"deep": deep, "prompt": prompt})
        if field.startswith(_UNCOMPUTED):
            found.append("this model computes no such request")
        else:
            try:
                found.append(_request(prompt, how, field, odd, core.request_block_hasher))
            except (RecursionError, TypeError, ValueError) as error:
                found.append(f"vLLM cannot hash it: {error!r:.80}")
        if isinstance(each := found[-1], Request):
            core.add_request(each)
        else:
            _show(core.scheduler.connector, _request(prompt, how, field, odd, None))
    while core.scheduler.has_unfinished_requests():
        llm.llm_engine.step()
    return [each if isinstance(each, str) else list(each.output_token_ids) for each in found]


def _show(connector: Any, request: Request) -> None:
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0)[0] in (0, None)
    connector.request_finished(request, [])


def _request(prompt: list[int], how: Any, field: str, odd: Any, hasher: Any) -> Request:
    how, number = copy.deepcopy(how), next(_numbers)
    given: dict[str, Any] = {
        "request_id": f"odd {number}",
        "prompt_token_ids": prompt,
        "sampling_params": how,
        "pooling_params": None,
        "block_hasher": hasher,
    }
    head, _, name = field.partition(".")
    if head == "kv_transfer_params":
        how.extra_args = {head: {name: odd} if name else odd}
    elif head == "trace_headers":
        given[head] = {"traceparent": "00-1-2-01", name: odd} if name else odd
    elif head == "lora":
        values = {"lora_name": f"a{number}", "lora_int_id": number + 1, "lora_path": "/nowhere"}
        lora = given["lora_request"] = LoRARequest(**values)
        setattr(lora, name, odd)
    elif head == "item":
        place = {"offset": 1, "length": 4}
        identifier = odd if name == "identifier" else f"item {number}"
        at = PlaceholderRange(**(place if name == "identifier" else {**place, name: odd}))
        given["mm_features"] = [MultiModalFeatureSpec(None, "image", identifier, at)]
    else:
        given[head] = odd
    return Request(**given)
