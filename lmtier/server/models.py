"""The models and adapters that engines have sent: how they make keys, and the form of their chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView
from dataclasses import asdict
from typing import Any, TypeAlias

from lmtier.core.handover import Handover, HandoverWriter
from lmtier.format.keys import Identity, namespace
from lmtier.format.layout import ChunkForm
from lmtier.wire.verbs import MAX_MODELS

Model: TypeAlias = "tuple[Identity, str]"
"""How an engine makes its keys, and the text that stands for the adapter."""


class Models:
    """The last ones, the youngest last. They outlive sessions."""

    def __init__(self) -> None:
        self._forms: OrderedDict[Model, ChunkForm] = OrderedDict()

    def add(self, identity: Identity, lora: str, form: ChunkForm) -> None:
        self._forms[identity, lora] = form
        for key in (identity, lora), (identity, ""):  # the entry without an adapter becomes the youngest
            if key in self._forms:
                self._forms.move_to_end(key)
        if len(self._forms) > MAX_MODELS:
            self._forms.popitem(last=False)

    def get(self, model: Model) -> ChunkForm | None:
        return self._forms.get(model)

    def items(self) -> ItemsView[Model, ChunkForm]:
        return self._forms.items()

    def name_of(self, prefix: bytes) -> str:
        """The name of the model whose keys begin so; empty: no engine has sent it."""
        names = (identity.model for identity, _ in self._forms)
        return next((name for name in names if namespace(name) == prefix), "")

    def dump(self, writer: HandoverWriter) -> list[Any]:
        return [(asdict(identity), lora, writer.form(form)) for (identity, lora), form in self.items()]

    def restore(self, dumped: list[Any], handover: Handover) -> None:
        for identity, lora, form in dumped:
            self._forms[Identity(**identity), lora] = handover.forms[form]
