"""The weights and adapters in a rank's memory: their origin, and the step since which they are there.

Files and names describe what should be loaded, but KV depends on what was loaded. So an adapter gets its name
when it is read, vLLM's methods that change weights are watched, and samples of all weights are compared when
a plan requests it: other code may write to them.

Nothing here runs while the engine computes: vLLM changes weights between steps, and plans come before them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import torch
import vllm.envs
from vllm.config import VllmConfig
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.worker.worker_base import WorkerBase

from lmtier_integrations.identity import adapter_in
from lmtier_integrations.vllm.messages import Adapter, WeightsOrigin
from lmtier_integrations.vllm.settings import log
from lmtier_integrations.vllm.weights_origin import combined_origin, origin_of, origin_of_draft

T = TypeVar("T")

_CHANGES = (
    "update_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "finish_weight_update",
    "reset_weights",
)
"""Methods of vLLM's worker that change weights. Its model runner has the methods that load and reload."""
_SAMPLE = 1024  # elements of each tensor that are compared
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def object_on_stack(kind: type[T]) -> T | None:
    """The object of this class whose method is on the call stack.

    vLLM makes connectors inside its worker and its scheduler, but passes neither to them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def wrap_method(leave: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(method, *args, **kwargs)`, until `leave` is closed."""
    method = getattr(owner, name, None)
    if method is None:  # not in this version of vLLM
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, wrapped)
    leave.callback(vars(owner).pop, name, None)


def loading_began(config: VllmConfig) -> float:
    """A time before this process began to load weights; 0: that is not known.

    If vLLM started this process, files that are newer than the process may have been replaced during the
    load. In a user's own process the weights' files may be newer, so only later changes are noticed.
    """
    is_own = vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING or (
        config.parallel_config.distributed_executor_backend == "mp"
    )
    return _beginning() if is_own else 0.0


def adapter_of(request: Any, place: str) -> str:
    """The digest of the adapter at this place. Empty: it is not there, or is elsewhere (before 0.32)."""
    return "" if getattr(request, "tensorizer_config_dict", None) else adapter_in(place)


def loaded_by(worker: Any) -> WeightsOrigin:
    """What a worker of vLLM has just loaded. A tier calls it through vLLM's executor."""
    return combined_origin(*_loaded_by(worker))


def _loaded_by(worker: Any) -> tuple[WeightsOrigin, WeightsOrigin | None]:
    """The origin of the model's weights, and of its draft model's if there is one."""
    config, runner = worker.vllm_config, worker.model_runner
    # One rank reads all files for the digest.
    how: dict[str, Any] = {
        "computes_digest": config.parallel_config.rank == 0,
        "since": loading_began(config),
    }
    return (
        origin_of(config.model_config, config.load_config, runner.get_model(), **how),
        origin_of_draft(config, next(_drafts_of(runner), None), **how),
    )


def _drafts_of(runner: Any) -> Iterator[torch.nn.Module]:
    for drafter in ("drafter", "speculator"):
        draft = getattr(getattr(runner, drafter, None), "model", None)
        if isinstance(draft, torch.nn.Module):
            yield draft


def _beginning() -> float:
    """When this process began, to a hundredth of a second, and never later than it did.

    psutil adds the time since the boot, which is that exact, to the time of the boot in whole seconds.
    """
    since_boot = psutil.Process().create_time() - psutil.boot_time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


@dataclass(slots=True)
class _Held:
    """An adapter that was read."""

    name: str
    """The name that vLLM's own prefix cache uses for it."""
    content: str
    """A digest of the files. Empty: they changed during the read, or another adapter here has this name."""
    since: int
    """The first step from which on the name means only this adapter."""


class LoadedModel:
    def __init__(self, config: VllmConfig, worker: Any) -> None:
        self._config, self._worker = config, worker
        self.step = 0
        """The step that began last."""
        self.since = 0
        """The first step that computed with these weights."""
        self.origin = WeightsOrigin()
        """What the weights were loaded from last."""
        self._draft: WeightsOrigin | None = None
        """The same for the draft model's alone, if there is one. A reload leaves them as they are."""
        self.has_news = False
        """Whether something has happened since the last step."""
        self.has_slept = False
        """Whether it has slept at level 1, which keeps the weights."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before memory is changed or unmapped. It ends all copies."""
        self.is_asleep = False
        """Whether its weights are not in memory."""
        self._has_changed = False
        self._was_written = False
        """Whether the weights had changed unseen before vLLM changed them."""
        self._loaded: set[str] | None = None
        self._adapters: dict[int, _Held] = {}
        self._last: dict[str, str] = {}
        """Maps each name to the content that was read last under it."""
        self._reported_adapters: dict[int, str] | None = None
        self._sample: _Sample | None = None
        self._restore_methods = ExitStack()
        for name in _CHANGES:
            wrap_method(self._restore_methods, worker, name, self._change)
        wrap_method(self._restore_methods, worker, "sleep", self._sleep)
        wrap_method(self._restore_methods, worker, "discard", self._discard)
        wrap_method(self._restore_methods, worker, "wake_up", self._wake)
        wrap_method(self._restore_methods, worker.model_runner, "load_model", self._load)
        wrap_method(self._restore_methods, worker.model_runner, "reload_weights", self._reload)
        self._watch_models()

    @classmethod
    def of_this_process(cls, config: VllmConfig) -> LoadedModel | None:
        """The model of the worker that is starting. None: no worker of vLLM made this connector."""
        worker = object_on_stack(WorkerBase)
        return cls(config, worker) if worker is not None and worker.model_runner is not None else None

    def close(self) -> None:
        self._restore_methods.close()

    def look_at_files(self) -> None:
        """Find out what vLLM has just loaded."""
        model, self._draft = _loaded_by(self._worker)
        self.origin = combined_origin(model, self._draft)

    # ---- what vLLM does

    def _watch_models(self) -> None:
        for model in self._models():
            wrap_method(self._restore_methods, model, "load_weights", self._load_weights)
        if (adapters := self._manager) is not None:
            wrap_method(self._restore_methods, adapters, "_load_adapter", self._load_adapter)

    def _models(self) -> Iterator[torch.nn.Module]:
        yield self._worker.model_runner.model
        yield from _drafts_of(self._worker.model_runner)

    @property
    def _manager(self) -> Any:
        return getattr(self._worker.model_runner, "lora_manager", None)

    def _changed(self) -> None:
        self._has_changed = self.has_news = True
        self._comes_from(WeightsOrigin(), WeightsOrigin())

    def _comes_from(self, model: WeightsOrigin, draft: WeightsOrigin | None) -> None:
        self._draft = None if self._draft is None else draft
        self.origin = combined_origin(model, self._draft)

    def _begin_change(self) -> None:
        """Compare once more: what was stored since the last comparison may be of unseen weights."""
        self.before_change()
        if not (self._has_changed or self.is_asleep) and self._sample is not None:
            self._was_written |= self._sample.take()
        self._changed()

    def _change(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin_change()
        try:
            return method(*args, **kwargs)
        finally:
            self._changed()

    def _load(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return self._change(method, *args, **kwargs)
        finally:
            self._sample = None
            self._watch_models()

    def _load_weights(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loaded = self._change(method, *args, **kwargs)
        return self._loaded

    def _reload(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(method).bind(*args, **kwargs).arguments
        parameters = self._worker.model_runner.model.named_parameters()
        names = {name.replace(".base_layer.", ".") for name, _ in parameters}
        model, load = copy.copy(self._config.model_config), self._config.load_config
        if path := given.get("weights_path"):
            model.model, model.model_weights, model.revision = path, "", None
        comes_from_files = given.get("weights_iterator") is None and given.get("is_checkpoint_format", True)
        built, draft = self._worker.model_runner.get_model(), self._draft
        # Of a hub vLLM now loads the newest commit, unless one is named.
        before, self._loaded = origin_of(model, load, built, computes_digest=False, is_at_start=False), None
        self._begin_change()
        if self._was_written and draft is not None:
            draft = WeightsOrigin()  # what was written may be its own
        result = method(*args, **kwargs)
        # A parameter that was not loaded keeps its old value, so the files would be a wrong name.
        if comes_from_files and self._loaded is not None and names <= self._loaded:
            is_reader = self._config.parallel_config.rank == 0
            after = origin_of(model, load, built, computes_digest=is_reader, is_at_start=False)
            self._comes_from(after if after.files == before.files else WeightsOrigin(), draft)
        return result

    def _discard(self, method: Callable[..., Any], *args: Any) -> Any:
        self.before_change()
        return method(*args)

    def _sleep(self, method: Callable[..., Any], level: int = 1) -> Any:
        if level == 1:
            self.before_change()
            self.has_slept = True
        else:
            self._begin_change()
        self.has_news = True
        result = method(level)
        self.is_asleep = True
        return result

    def _wake(self, method: Callable[..., Any], tags: list[str] | None = None) -> Any:
        result = method(tags)
        self.is_asleep &= tags is not None and "weights" not in tags
        return result

    def _load_adapter(self, method: Callable[..., Any], request: Any) -> Any:
        folder = get_adapter_absolute_path(request.lora_path)
        content_before = adapter_of(request, folder)
        loaded = method(request)
        content = content_before if content_before and adapter_in(folder) == content_before else ""
        adapter_id, name = request.lora_int_id, request.lora_name
        held = self._adapters.get(adapter_id)
        if held is None or (held.name, held.content) != (name, content) or self._last[name] != content:
            is_first = self._last.setdefault(name, content) == content
            held = self._adapters[adapter_id] = _Held(name, content, 0 if is_first else self.step + 1)
            self._last[name] = content
        for other_id in self._manager.list_adapters() - {adapter_id}:
            other_adapter = self._adapters.get(other_id)
            if other_adapter is not None and other_adapter.name == name and other_adapter.content != content:
                other_adapter.content = held.content = self._last[name] = ""
        self.has_news = True
        return loaded

    # ---- what a step asks

    def begin(self, *, compares: bool) -> tuple[bool, bool]:
        """Whether weights have changed since the last step, and whether only a comparison found that."""
        has_known_change, self._has_changed, self.has_news = self._has_changed, False, False
        has_unseen_change, self._was_written = self._was_written, False
        if (has_known_change or compares) and not self.is_asleep:
            if self._sample is None:
                self._sample = _Sample(self._config, list(self._models()))
            if self._sample.take() and not has_known_change:
                has_unseen_change = True
                self._comes_from(WeightsOrigin(), WeightsOrigin())
        if has_unseen_change:
            log.warning("lmtier: the weights have changed without a call of vLLM")
        if has_known_change or has_unseen_change:
            self.since = self.step
        return has_known_change or has_unseen_change, has_unseen_change

    def holds(self, adapter: Adapter | None, since: int | None = None) -> bool:
        """Whether this adapter is in memory, and has been since step `since` if one is given."""
        if adapter is None:
            return True
        number, content = adapter
        held = self._adapters.get(number)
        return held is not None and held.content == content and (since is None or held.since <= since)

    def adapters(self) -> dict[int, str] | None:
        """The adapters in memory. None: the same as in the last call."""
        if self._manager is None:
            return None
        contents = {
            adapter_id: self._adapters[adapter_id].content
            for adapter_id in sorted(self._manager.list_adapters())
            if adapter_id in self._adapters
        }
        if contents == self._reported_adapters:
            return None
        self._reported_adapters = contents
        return contents


class _Sample:
    """Elements of all weights, spread over the memory of each."""

    def __init__(self, config: VllmConfig, models: list[torch.nn.Module]) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        # Balancing moves experts between ranks, which changes no KV.
        moves_experts = config.parallel_config.enable_eplb
        for model in models:
            for path, module in model.named_modules():
                if moves_experts and "expert" in path:
                    continue
                self._places += [(module._parameters, name) for name in module._parameters]
                self._places += [
                    (module._buffers, name) for name in module._buffers if name.endswith("_scale")
                ]
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._views: list[list[torch.Tensor]] = []
        self._before: list[torch.Tensor] | None = None

    def take(self) -> bool:
        """Take a sample. Returns whether it differs from the last one."""
        tensors = [tensor for owner, name in self._places if (tensor := owner.get(name)) is not None]
        # A tensor that moved may still have the same content, so compare the content.
        if len(tensors) != len(self._seen) or any(
            tensor is not tensor_before or tensor.data_ptr() != address
            for tensor, (tensor_before, address) in zip(tensors, self._seen, strict=True)
        ):
            self._seen = [(tensor, tensor.data_ptr()) for tensor in tensors]
            self._views = self._views_of(tensors)
        sample = [torch.cat(views) for views in self._views]
        last_sample, self._before = self._before, sample
        if last_sample is None:
            return False
        return len(last_sample) != len(sample) or not all(map(torch.equal, last_sample, sample))

    @staticmethod
    def _views_of(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Views of the sampled elements, grouped by device and width so that they can be concatenated."""
        views: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        skipped = 0
        for number, tensor in enumerate({id(tensor): tensor for tensor in tensors}.values()):
            size, count = tensor.element_size(), tensor.numel()
            if not count:
                continue
            try:
                raw = tensor.detach().view(_BITS[size])
                # An odd step does not divide a row's length, so the samples fall into different columns.
                step = max(1, count // _SAMPLE) | 1
                first = 17 * number % step
                if first + step > count:
                    first = 0
                sampled = torch.as_strided(
                    raw, ((count - first + step - 1) // step,), (step,), raw.storage_offset() + first
                )
            except (KeyError, RuntimeError, NotImplementedError, TypeError):
                skipped += 1  # an unknown format
                continue
            views.setdefault((tensor.device, size), []).append(sampled)
        if skipped:
            log.warning("lmtier: %d tensors of weights are not compared: their format is not known", skipped)
        return list(views.values())
