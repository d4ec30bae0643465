"""The names of this engine's KV: from the weights and adapters in the ranks' memory, and from media.

Only ranks know what they have in memory. So each plan contains the inputs of its names. A rank with other
weights loads and stores nothing of the plan, and reports that.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from lmtier.client.client import Client
from lmtier.copy.mover import fill_identity
from lmtier.format.keys import seed
from lmtier.format.layout import ChunkForm, Layout
from lmtier.observe import prompts
from lmtier_integrations.vllm.identity import identity_of, name_of
from lmtier_integrations.vllm.loaded_model import adapter_of
from lmtier_integrations.vllm.media import Media
from lmtier_integrations.vllm.messages import Adapter, RankReport, WeightsOrigin
from lmtier_integrations.vllm.settings import Settings, log

_SEEDS = 4096  # pairs of adapter and salt


class KVNaming:
    def __init__(self, config: VllmConfig, settings: Settings, client: Client) -> None:
        self._client = client
        self.sends_tokens = settings.tell_tokens
        self._config, self._ranks = config, config.parallel_config.world_size
        self._identity = identity_of(config, settings.model)
        """Its weights have no name until workers have said what they loaded."""
        self.media = Media(config, trusts_ids=settings.trust_media_ids)
        self.form: ChunkForm | None = None
        """The form of what this engine stores; None: workers have not said what they hold."""
        self.state_form: ChunkForm | None = None
        """The form of the state that a prefix has to end with, if the model keeps any."""
        self.count = 0
        """How often the model's name has changed, as the ranks count it."""
        self._before_reset: str | None = None
        """The weights' name before a reset, if ranks have not compared since. A private one is empty."""
        self._reset_at = 0
        """The last step before that."""
        self._has_slept = False
        """Whether all ranks have slept since the reset, at the level that keeps the weights."""
        self._seeds: dict[tuple[str, str], bytes] = {}
        self._adapters: dict[int, str] = {}
        """Maps an adapter's number to its content in the ranks' memory. Empty: the ranks do not agree."""
        self._read: set[Adapter] = set()
        """The adapters that all ranks have read at some time."""
        self._adapters_of: dict[int, dict[int, str]] = {}
        """The same for each rank."""

    def meet(
        self,
        layout: Layout,
        form: ChunkForm,
        origins: Mapping[int, WeightsOrigin],
        ends: ChunkForm | None,
        *,
        is_watched: bool,
    ) -> None:
        """Workers have said what they hold, and of which files.

        `is_watched`: a change of it will be seen.
        """
        weights, why = name_of(origins, self._config)
        if not is_watched:
            weights, why = "", "the engine does not show changes of its weights"
        if why:
            log.warning("lmtier: %s, so only this run of the engine finds the stored KV", why)
        if self._before_reset is None:
            self._identity = replace(self._identity, weights=weights)
        else:  # a reset came first
            self._before_reset = weights
        self.form, self.state_form = form, ends
        self._identity = fill_identity(self._identity, layout, self._client.approximation)
        self._seeds.clear()
        self._client.declare(self._identity, form)

    @property
    def is_private(self) -> bool:
        """Whether only this run of the engine finds what it stores."""
        return self._identity.is_private

    def seed(self, lora: str, salt: str) -> bytes:
        """The start of the key chains of requests with this adapter and salt."""
        found = self._seeds.get((lora, salt))
        if found is None:
            if len(self._seeds) > _SEEDS:
                self._seeds.clear()
            found = seed(self._identity, self._client.chunk_tokens, lora=lora, salt=salt)
            self._seeds[lora, salt] = found
            if lora and self.form is not None:
                self._client.declare(self._identity, self.form, lora)
        return found

    def send_tokens(
        self, keys: Sequence[bytes], tokens: Sequence[int], lora: str, salt: str, parent: bytes
    ) -> None:
        """Send the server the tokens and the origin of these keys."""
        self._client.send_tokens(keys, tokens, prompts.Origin.of(asdict(self._identity), lora, salt), parent)

    # ---- weights

    def change(self, report: RankReport) -> None:
        """Ranks have new weights. If all of them know the same source, it becomes the name."""
        self.count = report.weights_version
        digest, why = name_of(report.origins, self._config)
        log.info(
            "lmtier: the weights have changed: %s", digest[:16] or f"{why}; their KV is of this run only"
        )
        self._before_reset = None
        self._rename(digest or f"since a change {secrets.token_hex(16)}")

    def reset(self, step: int) -> None:
        """The engine has reset its prefix cache after this step was planned: its weights may have changed.

        From here on keys are private to this run of the engine, unless it turns out that it has only slept.
        The files no longer describe the weights, and a later start from those files must not find this KV.
        Chunks under the old keys stay until they are evicted: other engines may still have those weights.
        """
        self._before_reset, self._has_slept, self._reset_at = self._identity.weights, False, step
        self._rename(f"since a reset {secrets.token_hex(16)}")

    def slept(self, ranks: int, step: int) -> None:
        """So many ranks have slept before this step: they have dropped their KV and kept the weights.

        The step may not end the doubt, if something else made the engine doubt meanwhile. So the report
        counts until a later step ends it. A step that was planned before the last reset reports an earlier
        sleep.
        """
        self._has_slept |= ranks == self._ranks and step > self._reset_at

    def compared(self) -> bool:
        """A doubt has ended. True: the engine has only slept, and its weights have their old name again."""
        before, self._before_reset = self._before_reset, None
        if before is None or not self._has_slept:
            return False
        self._rename(before)
        return True

    def _rename(self, weights: str) -> None:
        """Use this name for the model's weights from now on."""
        self._identity = replace(self._identity, weights=weights)
        self._seeds.clear()
        if self.form is not None:
            self._client.declare(self._identity, self.form)

    # ---- adapters

    def adapter_of(self, request: Request) -> Adapter | None:
        """The request's adapter as the ranks have read it; or as its files are, if they read it for this
        request."""
        lora = request.lora_request
        if lora is None:
            return None
        read_content = None if lora.load_inplace else self._adapters.get(lora.lora_int_id)
        return lora.lora_int_id, _content_of(lora) if read_content is None else read_content

    def learn_adapters(self, reported: Mapping[int, dict[int, str]]) -> None:
        """Apply the adapters that ranks have reported."""
        self._adapters_of |= reported
        ranks = list(self._adapters_of.values())
        self._adapters = {
            number: content if all(each.get(number) == content for each in ranks) else ""
            for rank in ranks
            for number, content in rank.items()
        }
        self._read.update(self._adapters.items())

    def is_read_later(self, request: Request, adapter: Adapter | None) -> bool:
        """Whether ranks, if they tell their adapters, read this one when the request first computes."""
        lora = request.lora_request
        if adapter is None or lora is None or not self._adapters_of:
            return False
        return bool(lora.load_inplace) or adapter not in self._read

    def is_current(self, adapter: Adapter | None) -> bool:
        """Whether no rank has another adapter under that number."""
        return adapter is None or self._adapters.get(adapter[0], adapter[1]) == adapter[1]


def _content_of(lora: LoRARequest) -> str:
    """A digest of an adapter's files. Empty: there are none, or they cannot be read here."""
    try:
        return adapter_of(lora, lora.lora_path)
    except (OSError, ValueError, TypeError):  # a request names the place: it may be no path at all
        return ""
