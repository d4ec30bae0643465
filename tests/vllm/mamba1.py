"""What vLLM 0.32 lacks on CPUs to run Jamba: the kernels of Mamba-1 layers, here in torch, token by token.

Import this after vLLM and before its model. Where vLLM has the kernels it does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm._custom_ops as ops
from torch.nn.functional import silu, softplus

_SCAN = (
    "selective_scan_fwd(Tensor u, Tensor(a!) delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor(b!)? z, "
    "Tensor? delta_bias, bool delta_softplus, Tensor? query_start_loc, Tensor? cache_indices, "
    "Tensor? has_initial_state, Tensor(c!) ssm_states, int null_block_id, int block_size, "
    "Tensor? block_idx_first_scheduled_token, Tensor? block_idx_last_scheduled_token, "
    "Tensor? initial_state_idx, Tensor? cu_chunk_seqlen, Tensor? last_chunk_indices) -> ()"
)


def _scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    is_softplus: bool,
    starts: torch.Tensor,
    places: torch.Tensor,
    goes_on: torch.Tensor,
    states: torch.Tensor,
    nowhere: int,
    *_: object,
) -> None:
    """Rows are channels, columns tokens. The output replaces `gate`, and the last state the first one."""
    assert is_softplus
    ends = starts.tolist()
    for start, end, place, continues in zip(ends, ends[1:], places.tolist(), goes_on.tolist(), strict=False):
        if place != nowhere:
            state = states[place].float() if continues else torch.zeros_like(states[place].float())
            for token in range(start, end):
                state, gate[:, token] = _next(
                    state,
                    u[:, token],
                    delta[:, token] + bias,
                    decay,
                    b[0, :, token],
                    c[0, :, token],
                    skip,
                    gate[:, token],
                )
            states[place] = state


def _step(
    states: torch.Tensor,
    x: torch.Tensor,
    delta: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    is_softplus: bool,
    places: torch.Tensor,
    targets: torch.Tensor,
    nowhere: int,
    out: torch.Tensor,
    *_: object,
) -> None:
    """One token of each sequence."""
    assert is_softplus
    for row, (place, target) in enumerate(zip(places.tolist(), targets.tolist(), strict=True)):
        if place != nowhere:
            states[target], out[row] = _next(
                states[place].float(), x[row], delta[row] + bias, decay, b[row], c[row], skip, gate[row]
            )


def _next(
    state: torch.Tensor,
    x: torch.Tensor,
    delta: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    gate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state after one more token, and what that token gives."""
    step = softplus(delta.float())[:, None]
    state = torch.exp(step * decay) * state + step * x.float()[:, None] * b.float()
    return state, (state @ c.float() + skip * x.float()) * silu(gate.float())


if not hasattr(torch.ops._C, "selective_scan_fwd"):
    _library = torch.library.Library("_C", "FRAGMENT")
    _library.define(_SCAN)
    _library.impl("selective_scan_fwd", _scan, "CPU")
    ops._supports_onednn = False  # it takes no transposed rows, which these layers give it
    _of_mamba_2 = ops.selective_state_update_cpu

    def _either(states: torch.Tensor, *given: Any) -> None:
        (_step if states.dim() == 3 else _of_mamba_2)(states, *given)

    ops.selective_state_update_cpu = _either
