"""What a user's trainer does in each worker of an engine: its `worker_extension_cls`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader


@register_model_loader("elsewhere")
class Elsewhere(BaseModelLoader):
    """Reads the weights of another folder than the model's."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra: Any = load_config.model_loader_extra_config
        self._folder = Path(extra["folder"])

    def download_model(self, model_config: Any) -> None: ...

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        yield from load_file(self._folder / "model.safetensors").items()

    def load_weights(self, model: Any, model_config: Any) -> None:
        model.load_weights(self.get_all_weights(model_config, model))


class Trainer:
    """Weights are changed in ways of which vLLM knows, and in others."""

    def write(self, by: float) -> None:
        for parameter in self.get_model().parameters():  # type: ignore[attr-defined]
            parameter.data.mul_(by)

    def connect(self) -> None:
        """vLLM's own ways to bring weights in need GPUs, so they come from files here."""
        self.weight_transfer_engine = _FromFiles(self.get_model())  # type: ignore[attr-defined]


class _FromFiles:
    def __init__(self, model: Any) -> None:
        self._model = model

    def start_weight_update(self) -> None: ...

    def update_weights(self, info: dict[str, Any]) -> None:
        mine = dict(self._model.named_parameters())
        for name, tensor in load_file(Path(info["folder"]) / "model.safetensors").items():
            # A CPU packs others anew, or with each other. These are enough to change answers.
            if name in mine and mine[name].numel():
                load = getattr(mine[name], "weight_loader", default_weight_loader)
                load(mine[name], tensor)

    def finish_weight_update(self) -> None: ...

    def reset_weight_update_target(self) -> None: ...

    def shutdown(self) -> None: ...
