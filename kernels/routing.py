"""How a mixture of experts chooses for every token, and what it adds up: the reference in plain torch.

Every router that the compiler knows is one form (`Router`); the recogniser is passes/experts.py, the CPU's kernel
kernels/cpu/experts.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Router:
    """What makes experts and weights of a token's logits [E].

    scores: of the logits, one of SCORES. The chosen experts are the `top_k` with the highest scores, to each of which
    its correction is added first, if there are some. Of equal ones the first is chosen. groups, top_groups: only
    experts of the top_groups groups (E / groups experts that follow each other) are chosen from whose best
    `group_best` scores have the highest sum.

    The weights are the scores of the chosen, without corrections. normalise: divided by max(their sum, floor) + eps.
    Then times scale. Softmax over the logits of the chosen is softmax scores, normalised.
    """

    scores: str
    top_k: int
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    normalise: bool = False
    floor: float = 0.0
    eps: float = 0.0
    scale: float = 1.0

    def check(self, experts: int) -> None:
        """Raises ValueError when it cannot choose among so many experts."""
        if self.scores not in SCORES:
            raise ValueError(f"scores {self.scores!r} are not known: {', '.join(SCORES)}")
        if self.groups < 1 or experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"{experts} experts are not {self.groups} groups of which {self.top_groups} are chosen")
        size = experts // self.groups
        if not 1 <= self.group_best <= size or not 1 <= self.top_k <= self.top_groups * size:
            raise ValueError(
                f"top {self.top_k} of {self.top_groups} groups of {size} experts, which go by their best "
                f"{self.group_best}, cannot be chosen"
            )


def first_of(values: Tensor, count: int) -> Tensor:
    """Indices [T, count] of the highest values [T, N] of each row, in their order; of equal ones the first."""
    return values.argsort(dim=-1, descending=True, stable=True)[:, :count]


def route(logits: Tensor, correction: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """logits [T, E], correction [E] -> (experts [T, top_k] int64, weights [T, top_k])."""
    scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
    ranked = scores if correction is None else scores + correction
    if router.top_groups < router.groups:
        grouped = ranked.view(len(ranked), router.groups, -1)
        kept = first_of(grouped.topk(router.group_best).values.sum(-1), router.top_groups)
        outside = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, kept, False)
        ranked = grouped.masked_fill(outside[:, :, None], float("-inf")).view_as(ranked)
    index = first_of(ranked, router.top_k)
    weights = scores.gather(1, index)
    if router.normalise:
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=router.floor) + router.eps)
    return index, weights * router.scale


def mix(x: Tensor, index: Tensor, weights: Tensor, experts: int, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sum [T, C] of the chosen experts of every token, one expert at a time.

    expert: (which, its tokens [t, C]) -> [t, C]; called for those that have tokens, in ascending order.
    """
    out = torch.zeros_like(x)
    for e in range(experts):
        rows, slot = (index == e).nonzero(as_tuple=True)
        if len(rows):
            out[rows] += weights[rows, slot, None] * expert(e, x[rows])
    return out
