"""The experts of one use: their weights by slot family, and the ops on their rows.

Letters: U tokens received, R rows computed here, D model dim, F expert dim, H home, X static and S
replica slots.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from relibra.expert_weights import joined_slots
from relibra.layer_options import ACTIVATIONS
from relibra_kernels.ops import direct_ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from relibra.expert_weights import ExpertWeights
    from relibra.layer_passes import LayerCall


@dataclasses.dataclass(frozen=True)
class Experts:
    """Weights of all slots of this rank in one use.

    Attributes:
        call: of this use.
        home: weights of the home slots.
        replica: field name -> ``[S, ...]``.
    """

    call: LayerCall
    home: ExpertWeights
    replica: Mapping[str, torch.Tensor]

    @classmethod
    def pushed(cls, call: LayerCall, home: ExpertWeights) -> Experts:
        """Fills the replica slots first; they hold until the next layer's push.

        Args:
            call: of this use.
            home: weights of the home slots.
        """
        handle = call.handle
        static = handle.static or {}
        held = {name: joined_slots(one, static.get(name)) for name, one in home.slots().items()}
        return cls(call, home, handle.movers.push(held, handle.tables, handle.what))

    def up(
        self, x_UD: torch.Tensor, score_R: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``h [R, 2F]`` and the second product's input ``[R, F]``, times the score if given."""
        handle, options = self.call.handle, self.call.options
        h_R2F, a_RF = direct_ops.expert_up(
            x_UD,
            handle.tables.row_to_token_R,
            *self._families("w13"),
            *self._tiles(),
            **self._activation(),
            **self._biases("b13"),
            interleaved=options.interleaved,
            transposed=options.transposed,
            score_R=score_R,
            backend=handle.kernels,
        )
        return h_R2F, a_RF

    def down(self, a_RF: torch.Tensor) -> torch.Tensor:
        """``w2 @ a + b2`` by row."""
        out: torch.Tensor = direct_ops.expert_down(
            a_RF,
            *self._families("w2"),
            *self._tiles(),
            **self._biases("b2"),
            transposed=self.call.options.transposed,
            backend=self.call.handle.kernels,
        )
        return out

    def down_backward(
        self, dy_UD: torch.Tensor, h_R2F: torch.Tensor, score_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of h, score * a, and gradients of the scores."""
        handle, options = self.call.handle, self.call.options
        dh_R2F, scored_RF, dscore_R = direct_ops.expert_down_backward(
            dy_UD,
            handle.tables.row_to_token_R,
            *self._families("w2"),
            h_R2F,
            score_R,
            *self._tiles(),
            **self._activation(),
            **self._biases("b2"),
            transposed=options.transposed,
            score_at=options.score_at,
            backend=handle.kernels,
        )
        return dh_R2F, scored_RF, dscore_R

    def up_backward(self, dh_R2F: torch.Tensor) -> torch.Tensor:
        """Gradients of the rows' inputs, ``[R, D]``."""
        options = self.call.options
        out: torch.Tensor = direct_ops.expert_up_backward(
            dh_R2F,
            *self._families("w13"),
            *self._tiles(),
            gated=options.is_gated,
            interleaved=options.interleaved,
            transposed=options.transposed,
            backend=self.call.handle.kernels,
        )
        return out

    def _families(self, name: str) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
        """Home, static and replica weights of a field."""
        return self.home.home(name), self._static(name), self.replica[name]

    def _static(self, name: str) -> torch.Tensor | None:
        static = self.call.handle.static
        return None if static is None else static.get(name)

    def _biases(self, name: str) -> dict[str, torch.Tensor | None]:
        """A bias of all families by argument name; nothing where the layer has none."""
        home = getattr(self.home, name)
        if home is None:
            return {}
        return {
            f"home_{name}": home,
            f"static_{name}": self._static(name),
            f"replica_{name}": self.replica[name],
        }

    def _tiles(self) -> tuple[torch.Tensor, int, bool]:
        handle = self.call.handle
        return handle.tables.mtile_B4, handle.block_rows, handle.is_exact

    def _activation(self) -> dict[str, Any]:
        options = self.call.options
        return {
            "activation": ACTIVATIONS[options.activation],
            "alpha": options.alpha,
            "limit": options.limit,
        }
